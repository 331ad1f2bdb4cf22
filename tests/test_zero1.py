"""ZeRO-1 equals the plain optimizer, in a fraction of its state."""

import io
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import buckets, comm, grads, parallel_state
from tutorial_lib.parallel_layers.marks import set_tensor_model_parallel_attributes

TP, DP = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank


class Odd(nn.Module):
    """Parameters of 5, 3, 1 and 0-d elements, a sharded one, a frozen one and one that no loss
    depends on.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        shapes = {
            "five": (5,),
            "three": (3, 1),
            "one": (1,),
            "scalar": (),
            "matrix": (5, 7),
            "frozen": (4,),
            "unused": (2,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter((0.1 * torch.randn(shape)).to(dtype)))
        self.sharded = nn.Parameter(
            (0.1 * torch.randn(4, 6))[2 * TP() : 2 * TP() + 2].to(dtype).clone()
        )
        set_tensor_model_parallel_attributes(self.sharded, True, 0, 1)
        self.frozen.requires_grad_(False)

    def loss(self, x):
        """x: (7,), another one on each replica."""
        hidden = torch.tanh(self.matrix @ x) * self.five + self.scalar
        replicated = (hidden.sum() * self.three.sum() + self.one.sum() + self.frozen.sum()) ** 2
        return replicated + (self.sharded * x[:6]).pow(3).sum()

    def groups(self):
        decayed = [self.matrix, self.three, self.unused, self.sharded, self.frozen]
        return [
            {"params": decayed, "weight_decay": 0.3},
            {"params": [self.five, self.one, self.scalar], "weight_decay": 0.0, "lr": 3e-3},
        ]


def batch(step, micro=0):
    return torch.randn(7, generator=torch.Generator().manual_seed(100 * step + 10 * DP() + micro))


def train(optimizer_class, zero, clip, steps=8, dtype=torch.float32, cap_mb=1.0, **options):
    """The weights before and after, and the norms."""
    model, defaults = Odd(dtype), {"lr": 1e-2, "weight_decay": 0.1}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if zero:
        clipping = {"grad_clipping": clip is not None, "max_norm": clip}
        optimizer = NeuronZero1Optimizer(
            model.groups(), optimizer_class, **clipping, **options, **defaults
        )
    else:
        optimizer = optimizer_class(model.groups(), **defaults)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            (model.loss(batch(step, micro).to(dtype)) / 2).backward()
        if zero:
            with mock.patch.object(buckets, "HOST_BUCKET_CAP_MB", cap_mb):
                optimizer.step()
            norms.append(optimizer.grad_norm)
        else:
            parameters = list(model.parameters())
            grads.bucket_allreduce_gradients([p.grad for p in parameters if p.grad is not None])
            norms.append(grads.clip_grad_norm(parameters, clip) if clip is not None else None)
            optimizer.step()
        scheduler.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize(
    "world_size, tp, clip, optimizer_class, dtype, cap_mb",
    [
        (2, 1, None, torch.optim.AdamW, torch.float32, 1.0),
        (2, 1, 0.5, torch.optim.SGD, torch.float64, 0.0),
        (4, 2, 0.5, torch.optim.AdamW, torch.float32, 1.0),
        (4, 2, None, torch.optim.SGD, torch.float32, 0.0),
        (4, 1, 0.5, AdamW_FP32OptimParams, torch.float32, 0.0001),
        (1, 1, 0.5, AdamW_FP32OptimParams, torch.float64, 1.0),
    ],
)
def test_equals_the_plain_optimizer(ranks, world_size, tp, clip, optimizer_class, dtype, cap_mb):
    options = dict(dtype=dtype, world_size=world_size, tp=tp)
    plain = ranks(train, optimizer_class, False, clip, **options)
    zero = ranks(train, optimizer_class, True, clip, cap_mb=cap_mb, **options)
    atol = 1e-7 if dtype == torch.float32 else 1e-13
    for (before, expected, norms), (_, found, zero_norms) in zip(plain, zero):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol, msg=name)
            assert torch.equal(found[name], before[name]) == (name in ("frozen", "unused")), name
        for a, b in zip(norms, zero_norms):
            assert a is b is None or torch.allclose(a, b, rtol=1e-6, atol=0)
    for index in range(world_size):
        for name, value in zero[index][1].items():
            assert torch.equal(value, zero[index % tp if name == "sharded" else 0][1][name]), name


def collectives_of_a_step():
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(20)))
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(10)).sum().backward()
    with comm.record() as log:
        optimizer.step()
    return dict(comm.count(log))


def test_a_step_takes_three_collectives(ranks):
    assert ranks(collectives_of_a_step, world_size=2)[0] == {
        ("reduce_scatter", 2): 1, ("all_reduce", 2): 1, ("all_gather", 2): 1
    }  # fmt: skip


def norm_over_the_mesh():
    sharded, replicated = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    set_tensor_model_parallel_attributes(sharded, True, 0, 1)
    sharded.grad, replicated.grad = torch.tensor([3.0 + TP()]), torch.tensor([0.0, 12.0])
    tp_groups = parallel_state.get_tensor_model_parallel_group(as_list=True)
    optimizer = NeuronZero1Optimizer(
        [sharded, replicated], torch.optim.SGD, grad_norm_groups=tp_groups, lr=1.0
    )
    optimizer.step()
    return optimizer.grad_norm.item(), replicated.tolist()


def test_the_norm_is_over_all_shards_and_counts_replicated_parameters_once(ranks):
    weights = [0, pytest.approx(-12 / 13, abs=1e-6)]
    assert ranks(norm_over_the_mesh, world_size=4, tp=2) == [(13.0, weights)] * 4


def kv_norm_of_shards():
    parallel_state.initialize_kv_group(2)
    own, kv = torch.arange(3.0) + TP(), 10.0 + TP() % 2 + torch.arange(4.0)
    p = nn.Parameter(torch.zeros(7))
    set_tensor_model_parallel_attributes(p, True, 0, 1)
    p.kv_shared_numel = 4
    p.grad = torch.cat([own, kv])
    optimizer = NeuronZero1Optimizer([p], torch.optim.SGD, lr=0.0)
    expected = grads.get_grad_norm([p])
    optimizer.step()
    return expected.item(), optimizer.grad_norm.item()


def test_the_shared_part_of_a_shard_counts_once(ranks):
    for expected, found in ranks(kv_norm_of_shards, world_size=4, tp=2):
        own = sum((i + r) ** 2 for r in (0, 1) for i in range(3))
        kv = sum((10 + i) ** 2 for i in range(4))  # with tp 2 and a kv group of 2 there is one head
        assert expected == pytest.approx(
            (own + (kv + sum((11 + i) ** 2 for i in range(4))) / 2) ** 0.5
        )
        assert found == pytest.approx(expected)


def state_size(numel):
    p = nn.Parameter(torch.zeros(numel))
    p.grad = torch.ones(numel)
    optimizer = NeuronZero1Optimizer([p], torch.optim.AdamW)
    optimizer.step()
    state = optimizer.state_dict()
    moments = sum(
        t.numel() for s in state["base_state"].values() for k, t in s.items() if k != "step"
    )
    return moments + sum(t.numel() for t in state["sharded_master_weights"].values())


@pytest.mark.parametrize("shape, world_size", [(1001, 2), ((3, 501), 4), ((1, 1, 1999), 4)])
def test_each_rank_holds_its_share_of_the_state(ranks, shape, world_size):
    numel = torch.zeros(shape).numel()
    for held in ranks(state_size, shape, world_size=world_size):
        assert held == pytest.approx(3 * numel / world_size, rel=0.01)


# --- bfloat16 -------------------------------------------------------------------------------------


def constant_gradient(steps, lr, masters=True, state=None):
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = NeuronZero1Optimizer(
        [p], torch.optim.SGD, use_master_weights=masters, grad_clipping=False, lr=lr
    )
    if state is not None:
        optimizer.load_state_dict(state[dist.get_rank()])
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
        shard = optimizer.base_optimizer.param_groups[0]["params"][0]
        if dist.get_rank() == 0:
            assert torch.equal(p.detach(), shard.detach().to(p.dtype))
    return shard.detach(), p.item(), optimizer.state_dict()


def test_a_master_moves_where_bfloat16_cannot(ranks):
    master, weight, _ = ranks(constant_gradient, 100, 6e-4, world_size=2)[0]
    assert master.item() == pytest.approx(0.94, abs=1e-5) and weight == 0.94140625
    assert ranks(constant_gradient, 100, 6e-4, False, world_size=2)[0][1] == 1.0


def test_masters_survive_a_resume(ranks):
    straight = ranks(constant_gradient, 4, 5e-4, world_size=2)
    half = ranks(constant_gradient, 2, 5e-4, world_size=2)
    resumed = ranks(constant_gradient, 2, 5e-4, state=[h[2] for h in half], world_size=2)
    assert straight[0][0].item() == pytest.approx(0.9980, abs=1e-6) and straight[0][1] == 0.99609375
    for a, b in zip(straight, resumed):
        assert torch.equal(a[0], b[0]) and a[1] == b[1]


def accumulate_small(use_hook):
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = NeuronZero1Optimizer(
        [p], torch.optim.SGD, grad_clipping=False, use_grad_acc_hook=use_hook, lr=1.0
    )
    for scale in [1.0] + [2**-9] * 256:
        (p * scale).sum().backward()
    seen = p.grad
    optimizer.step()
    return seen, p.detach()


def test_gradients_accumulate_in_float32(ranks):
    grad, weight = ranks(accumulate_small, True, world_size=2)[0]
    assert grad.dtype == torch.float32 and grad.tolist() == [1.5] * 3
    assert weight.tolist() == [-1.5] * 3
    grad, weight = ranks(accumulate_small, False, world_size=2)[0]
    assert grad.tolist() == [1.0] * 3, "in bfloat16 the small ones are lost"


def test_bf16_with_masters_follows_float32(ranks):
    wide = ranks(train, torch.optim.AdamW, True, 0.5, world_size=2)
    options = {"dtype": torch.bfloat16, "use_grad_acc_hook": True}
    narrow = ranks(train, torch.optim.AdamW, True, 0.5, world_size=2, **options)
    for name, value in narrow[0][1].items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), wide[0][1][name], rtol=0.02, atol=0.02)


def mixed_model(masters):
    dtypes = torch.bfloat16, torch.float32, torch.float16
    model = [nn.Parameter(torch.ones(n, dtype=dtype)) for n, dtype in zip((5, 3, 2), dtypes)]
    optimizer = NeuronZero1Optimizer(
        model, torch.optim.SGD, max_norm=100.0, lr=0.5, use_master_weights=masters,
        use_grad_acc_hook=True,
    )  # fmt: skip
    sum(p.float().sum() for p in model).backward()
    optimizer.step()
    return [p.detach() for p in model], optimizer.grad_norm.item()


@pytest.mark.parametrize("masters", [True, False])
def test_a_model_may_mix_dtypes(ranks, masters):
    for weights, norm in ranks(mixed_model, masters, world_size=2):
        assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in weights)
        assert norm == pytest.approx(10**0.5)


# --- groups, missing gradients, resume ------------------------------------------------------------


def one_rank_lacks_a_gradient(use_hook):
    p = nn.Parameter(torch.zeros(3))
    optimizer = NeuronZero1Optimizer(
        [p], torch.optim.SGD, grad_clipping=False, use_grad_acc_hook=use_hook, lr=1.0
    )
    if DP() == 1:
        (p * 4).sum().backward()
    optimizer.step()
    return p.tolist()


@pytest.mark.parametrize("use_hook", [False, True])
def test_a_gradient_that_one_replica_lacks_counts_as_zero(ranks, use_hook):
    assert ranks(one_rank_lacks_a_gradient, use_hook, world_size=2) == [[-2.0] * 3] * 2


def resume(steps, state=None, break_it=None):
    model = Odd(torch.bfloat16)
    optimizer = NeuronZero1Optimizer(
        list(model.named_parameters()), torch.optim.AdamW, use_grad_acc_hook=True, lr=1e-2
    )
    start = 0
    if state is not None:
        weights, optimizer_state = torch.load(io.BytesIO(state[dist.get_rank()]), weights_only=True)
        if break_it == "order":
            optimizer.load_state_dict(optimizer_state)
            model.load_state_dict(weights)
        else:
            model.load_state_dict(weights)
            if break_it == "size":
                optimizer_state["sharding"]["size"] = 8
            elif break_it == "one":
                optimizer_state["shape_info"][0]["shape"][0] += DP()
            try:
                optimizer.load_state_dict(optimizer_state)
            except ValueError as error:
                return str(error)
        start = 3
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model.loss(batch(step).bfloat16()).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return file.getvalue()


def tensors(saved):
    weights, state = torch.load(io.BytesIO(saved), weights_only=True)
    inner = {(place, key): t for place, s in state["base_state"].items() for key, t in s.items()}
    return {**weights, **inner, **state["sharded_master_weights"]}, state


@pytest.mark.parametrize("order", [None, "order"])
@pytest.mark.parametrize("world_size, tp", [(2, 1), (4, 2)])
def test_a_resumed_run_is_the_uninterrupted_one(ranks, world_size, tp, order):
    straight = ranks(resume, 5, world_size=world_size, tp=tp)
    saved = ranks(resume, 3, world_size=world_size, tp=tp)
    resumed = ranks(resume, 2, state=saved, break_it=order, world_size=world_size, tp=tp)
    for a, b in zip(straight, resumed):
        (found, state), (expected, _) = tensors(b), tensors(a)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    info = state["shape_info"]
    assert [i["name"] for i in info.values()][:2] == ["five", "three"]
    assert info[0] == {
        "name": "five", "shape": [5], "padding": 1, "dtype": "bfloat16",
        "tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1,
        "num_partitions": -1,
    }  # fmt: skip


def test_shards_put_together_are_the_parameter(ranks):
    saved = ranks(resume, 3, world_size=4)
    (weights, _), states = tensors(saved[0]), [tensors(each)[1] for each in saved]
    for place, info in states[0]["shape_info"].items():
        masters = [state["sharded_master_weights"][place] for state in states]
        numel = math.prod(info["shape"])
        whole = torch.cat(masters)[:numel].view(info["shape"])
        assert torch.equal(whole.bfloat16(), weights[info["name"]])
        assert torch.cat(masters)[numel:].tolist() == [0.0] * info["padding"]


@pytest.mark.parametrize(
    "break_it, message", [("size", "of 8.* of 2"), ("one", r"parameter 0 has shape \[5\].*\[6\]")]
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks(ranks, break_it, message):
    saved = ranks(resume, 3, world_size=2)
    assert all(
        re.search(message, found)
        for found in ranks(resume, 1, state=saved, break_it=break_it, world_size=2)
    )


def wrong_arguments(options):
    try:
        NeuronZero1Optimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, **options, lr=1.0)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_norm": -1.0}, "-1.0"),
        ({"sharding_groups": [[0]]}, "[[0]]"),
        ({"grad_norm_groups": [[0, 1]]}, "[[0, 1]]"),
    ],
)
def test_bad_arguments_are_named_on_all_ranks(ranks, options, message):
    assert all(message in found for found in ranks(wrong_arguments, options, world_size=2))
