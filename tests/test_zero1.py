"""ZeRO-1 equals the plain optimizer, on XLA too."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.standin import refused
from tutorial_lib import backends, xla_cpu
from tutorial_lib import xla_model as xm
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import buckets, grads, parallel_state
from tutorial_lib.parallel_layers.consistency import find_drift
from tutorial_lib.parallel_layers.marks import (
    move_model_to_device,
    set_tensor_model_parallel_attributes,
)

TP, DP = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank


class Odd(nn.Module):
    """Parameters of 5, 3, 1 and 0-d elements, a sharded one, a frozen one and one that no loss
    depends on.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        shapes = dict(five=(5,), three=(3, 1), one=(1,), scalar=(), matrix=(5, 7))
        shapes |= dict(frozen=(4,), unused=(2,))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter((0.1 * torch.randn(shape)).to(dtype)))
        rows = slice(2 * TP(), 2 * TP() + 2)
        self.sharded = nn.Parameter((0.1 * torch.randn(4, 6))[rows].to(dtype).clone())
        set_tensor_model_parallel_attributes(self.sharded, True, 0, 1)
        self.frozen.requires_grad_(False)

    def loss(self, x):
        """x: (7,), another one on each replica."""
        hidden = torch.tanh(self.matrix @ x) * self.five + self.scalar
        factor = self.three.exp().sum()
        replicated = (hidden.sum() * factor + self.one.sum() + self.frozen.sum()) ** 2
        return replicated + (self.sharded * x[:6]).pow(3).sum()

    def groups(self):
        decayed = [self.matrix, self.three, self.unused, self.sharded, self.frozen]
        return [
            {"params": decayed, "weight_decay": 0.25},
            {"params": [self.five, self.one, self.scalar], "weight_decay": 0.0, "lr": 7e-3},
        ]


def batch(step, micro=0):
    return torch.randn(7, generator=torch.Generator().manual_seed(100 * step + 10 * DP() + micro))


def train(optimizer_class, zero, clip, steps=8, dtype=torch.float32, cap_mb=1.0, **options):
    """The weights before and after, the norms, and how many graphs were there after each step."""
    model, defaults = Odd(dtype), {"lr": 1e-2, "weight_decay": 0.1}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = move_model_to_device(model, xm.xla_device())
    if zero:
        options |= {"grad_clipping": clip is not None, "max_norm": clip, **defaults}
        options["grad_norm_groups"] = parallel_state.get_tensor_model_parallel_group(as_list=True)
        optimizer = NeuronZero1Optimizer(model.groups(), optimizer_class, **options)
    else:
        optimizer = optimizer_class(model.groups(), **defaults)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    xm.mark_step()
    norms, graphs = [], [graph_count()]
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            (model.loss(batch(step, micro).to(xm.xla_device(), dtype)) / 2).backward()
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
        xm.mark_step()
        graphs.append(graph_count())
    assert find_drift(model) == [] and graph_count() == graphs[-1], "to look needs no graph"
    if zero and backends.uses_xla():  # a state that goes through the host changes nothing
        optimizer.load_state_dict(optimizer.state_dict())
        xm.mark_step()
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return before, weights, [norm if norm is None else norm.cpu() for norm in norms], graphs


def graph_count():
    return len(xla_cpu.hlo_texts()) if backends.uses_xla() else 0


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
    for (before, expected, norms, _), (_, found, zero_norms, _) in zip(plain, zero):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol, msg=name)
            assert torch.equal(found[name], before[name]) == (name in ("frozen", "unused")), name
        for a, b in zip(norms, zero_norms):
            assert a is b is None or torch.allclose(a, b, rtol=1e-6, atol=0)
    for index in range(world_size):
        for name, value in zero[index][1].items():
            assert torch.equal(value, zero[index % tp if name == "sharded" else 0][1][name]), name


WIDE = dict(dtype=torch.bfloat16, use_grad_acc_hook=True)
# Of bfloat16 one step of a weight, and a tenth of the updates.
XLA = [
    (1, True, torch.optim.AdamW, {}, dict(rtol=1e-6, atol=1e-7)),
    (2, False, AdamW_FP32OptimParams, {}, dict(rtol=1e-6, atol=1e-7)),
    (1, True, AdamW_FP32OptimParams, WIDE, dict(rtol=2**-8, atol=1e-3)),
]


@pytest.mark.parametrize("tp, zero, optimizer_class, options, tolerance", XLA)
def test_xla_gives_the_values_of_the_cpu_in_two_graphs(
    ranks, tp, zero, optimizer_class, options, tolerance
):
    arguments, where = (train, optimizer_class, zero, 0.5, 5), dict(world_size=2, tp=tp)
    on_cpu = ranks(*arguments, **options, **where)
    on_xla = ranks(*arguments, **options, **where, backend="xla", timeout=240)
    for (_, expected, norms, _), (_, found, xla_norms, graphs) in zip(on_cpu, on_xla):
        torch.testing.assert_close(found, expected, **tolerance)
        if not options:
            torch.testing.assert_close(xla_norms, norms, **tolerance)
        assert graphs[-1] == graphs[2], "a step after the second one was another graph"
        assert graphs[2] - graphs[0] <= 2


def sharded_there_and_back(folder, load):
    model = move_model_to_device(Odd(), xm.xla_device())
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    xm.mark_step()
    if load:
        optimizer.load_sharded_state_dict(folder)
    else:
        model.loss(torch.ones(7, device=xm.xla_device())).backward()
        optimizer.step()
        xm.mark_step()
        optimizer.save_sharded_state_dict(folder, num_workers_per_step=1)
    xm.mark_step()
    held = [shard for _, shard in optimizer.pairs()]
    held += [state["exp_avg"] for state in optimizer.base_optimizer.state.values()]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *held)]


def test_sharded_state_dict_on_xla(ranks, tmp_path):
    """Written one rank after the other, though its parts are gathered."""
    saved, loaded = (
        ranks(sharded_there_and_back, str(tmp_path), load, world_size=2, backend="xla")
        for load in (False, True)
    )
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


# --- bfloat16 -------------------------------------------------------------------------------------


def zero1_of(p, **options):
    return NeuronZero1Optimizer([p], torch.optim.SGD, grad_clipping=False, **options)


def constant_gradient(steps, lr, masters=True, state=None):
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = zero1_of(p, lr=lr, use_master_weights=masters)
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
    optimizer = zero1_of(p, lr=1.0, use_grad_acc_hook=use_hook)
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
    optimizer = zero1_of(p, lr=1.0, use_grad_acc_hook=use_hook)
    if DP() == 1:
        (p * 4).sum().backward()
    optimizer.step()
    return p.tolist()


@pytest.mark.parametrize("use_hook", [False, True])
def test_a_gradient_that_one_replica_lacks_counts_as_zero(ranks, use_hook):
    assert ranks(one_rank_lacks_a_gradient, use_hook, world_size=2) == [[-2.0] * 3] * 2


def loaded_badly(what):
    optimizer = NeuronZero1Optimizer([nn.Parameter(torch.zeros(5))], torch.optim.AdamW)
    state = optimizer.state_dict()
    if what == "size":
        state["sharding"]["size"] = 8
    else:
        state["shape_info"][0]["shape"][0] += DP()
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "what, message", [("size", ["of 8", "of 2"]), ("one", ["parameter 0 has shape [5]", "[6]"])]
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks(ranks, what, message):
    refused(ranks, ValueError, message, loaded_badly, what, tp=1)


def wrong_arguments(options):
    NeuronZero1Optimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, **options, lr=1.0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_norm": -1.0}, "-1.0"),
        ({"sharding_groups": [[0]]}, "[[0]]"),
        ({"grad_norm_groups": [[0, 1]]}, "[[0, 1]]"),
    ],
)
def test_bad_arguments_are_named_on_all_ranks(ranks, options, message):
    refused(ranks, ValueError, [message], wrong_arguments, options, tp=1)
