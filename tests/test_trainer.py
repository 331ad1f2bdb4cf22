"""One configuration for model and optimizer: the order within a step, schedulers, meta-device and
wave-wise building.
"""

import copy

import pytest
import torch
from torch import nn

from tutorial_lib import xla_model as xm
from tutorial_lib.parallel_layers import comm, consistency, parallel_state, random
from tutorial_lib.parallel_layers.marks import set_tensor_model_parallel_attributes
from tutorial_lib.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)

TP, DP = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank
SEQUENCE = 8


class Normed(nn.Module):
    """A norm and a bias that run on this rank's part of the sequence, and a weight cut over the
    ranks.
    """

    def __init__(self, tp_size):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.bias = nn.LayerNorm(4), nn.Parameter(torch.randn(4))
        for p in (*self.norm.parameters(), self.bias):
            p.sequence_parallel_enabled = True
        self.tp_size = tp_size
        rows = 4 // tp_size
        place = TP() if tp_size > 1 else 0
        self.dense = nn.Parameter(torch.randn(4, 4)[place * rows : (place + 1) * rows].clone())
        set_tensor_model_parallel_attributes(self.dense, True, 0, 1)

    def loss(self, x):
        """x: (SEQUENCE, 4), the whole sequence. A sum over positions, and over the rows of the
        weight.
        """
        part = x.chunk(self.tp_size)[TP()] if self.tp_size > 1 else x
        replicated = (self.norm(part) + self.bias).pow(2).sum()
        return (replicated + (x @ self.dense.t()).pow(2).sum()) / 100


def data(replica, step, micro):
    return torch.randn(
        SEQUENCE, 4, generator=torch.Generator().manual_seed(100 * step + 10 * replica + micro)
    )


def train(tp, zero, clip, dp=2, sequence_parallel=True, steps=3):
    config = neuronx_distributed_config(
        tensor_parallel_size=tp,
        optimizer_config={
            "zero_one_enabled": zero,
            "grad_clipping": clip is not None,
            "max_grad_norm": clip or 1.0,
        },
        sequence_parallel=sequence_parallel,
    )
    model = Normed(tp)
    optimizer = initialize_parallel_optimizer(
        config, torch.optim.AdamW, model.parameters(), lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            (model.loss(data(DP(), step, micro)) / 2).backward()
        optimizer.step()
        scheduler.step()
        norms.append(optimizer.grad_norm)
    drift = consistency.find_drift(model)
    dense = comm.all_gather(model.dense.detach(), 0)
    return (
        {"dense": dense, **{n: p.detach() for n, p in model.named_parameters() if n != "dense"}},
        norms,
        drift,
    )


def single(clip, steps=3, dp=2):
    """The same training in one process, with torch alone."""
    model = Normed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(dp):
            for micro in range(2):
                (model.loss(data(replica, step, micro)) / 2 / dp).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
        optimizer.step()
        scheduler.step()
    return {n: p.detach() for n, p in model.named_parameters()}, norms


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_equals_that_of_one_process(ranks, tp, zero, clip):
    expected, norms = single(clip)
    for found, found_norms, drift in ranks(train, tp, zero, clip, world_size=2 * tp, tp=None):
        assert drift == []
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
        for a, b in zip(found_norms, norms):
            assert a is None if clip is None else a.item() == pytest.approx(b.item(), rel=1e-5)


def copied(zero):
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero})
    model = nn.Linear(2, 1, bias=False)
    optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it puts another `step` in the place of ours
    other_model, other = copy.deepcopy((model, optimizer))
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append("step"))
    before = other_model.weight.detach().clone()
    other_model(torch.ones(1, 2)).sum().backward()
    other.step()
    return (before - other_model.weight).tolist(), torch.equal(before, model.weight), seen


def test_an_optimizer_is_copied_with_its_model_or_not_at_all(ranks):
    clipped = [[pytest.approx(0.5**0.5)] * 2]
    assert ranks(copied, False, world_size=2) == [(clipped, True, ["step"])] * 2
    with pytest.raises(TypeError, match="state_dict"):
        ranks(copied, True, world_size=2)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"optimizer_config": {"zero": True}},
            ValueError,
            "'zero': True.*not a dict of zero_one_enabled",
        ),
        ({"optimizer_config": {"max_grad_norm": None}}, ValueError, "max_grad_norm is None"),
        ({"optimizer_config": ["zero_one_enabled"]}, ValueError, "not a dict of zero_one_enabled"),
        ({"tensor_parallel_size": "2"}, ValueError, "tensor_parallel_size is '2'"),
        (
            {"mixed_precision_config": {"use_master_weights": True}},
            ValueError,
            "use_master_weights needs",
        ),
        ({"model_init_config": {"meta_device_init": True}}, ValueError, "param_init_fn"),
        (
            {"model_init_config": {"sequential_move_factor": 0}},
            ValueError,
            "sequential_move_factor is 0",
        ),
        ({"pipeline_config": {"a": 1}}, NotImplementedError, "pipeline_config"),
        ({"pipeline_parallel_size": 2}, NotImplementedError, "got 2"),
    ],
)
def test_configurations_that_cannot_be_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        neuronx_distributed_config(**arguments)


# --- the model ------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, width=4, fail_on=None):
        super().__init__()
        if fail_on is not None and DP() == fail_on:
            raise ValueError(f"rank {fail_on} cannot")
        self.embed, self.head = nn.Embedding(8, width), nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        set_tensor_model_parallel_attributes(self.embed.weight, True, 0, 1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, ids):
        return self.head(self.dropout(self.embed(ids))).pow(2).mean()


def fill(module, device):
    for p in module.parameters(recurse=False):
        p.copy_(torch.arange(float(p.numel()), device=device).view(p.shape))


def build(meta, factor):
    config = neuronx_distributed_config(
        model_init_config={
            "meta_device_init": meta,
            "param_init_fn": fill,
            "sequential_move_factor": factor,
        }
    )
    model = initialize_parallel_model(config, Tied, False, 4)
    inner = model.original_module()
    assert inner.head.weight is inner.embed.weight and inner.embed.weight.partition_dim == 0
    assert model.table.tolist() == [0, 1, 2]
    assert (
        list(model.state_dict()) == list(inner.state_dict()) and len(list(model.parameters())) == 1
    )
    loss = model.run_train(torch.tensor([1, 2]))
    assert not loss.requires_grad and inner.embed.weight.grad is not None
    return inner.embed.weight.detach(), str(inner.embed.weight.device)


@pytest.mark.parametrize("factor", [1, 11])
@pytest.mark.parametrize("meta", [False, True])
def test_models_are_built_in_waves_with_their_ties_marks_and_buffers(ranks, meta, factor):
    found = ranks(build, meta, factor, world_size=2, tp=None)
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == "cpu"
    if meta:
        assert torch.equal(found[0][0], torch.arange(32.0).view(8, 4))


def build_badly(arguments, kwargs):
    config = neuronx_distributed_config(model_init_config={"sequential_move_factor": 1})
    with pytest.raises(ValueError) as error:
        initialize_parallel_model(config, Tied, *arguments, **kwargs)
    return str(error.value)


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    found = ranks(build_badly, (), {"fail_on": 1}, world_size=2, tp=None)
    assert found == ["rank 1: rank 1 cannot", "rank 1 cannot"]
    assert "include_buffers is 4" in ranks(build_badly, (4,), {}, world_size=2, tp=None)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.tanh(self.dense(x)))


class Blocks(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x).pow(2).sum()


def checkpointed(which):
    config = neuronx_distributed_config(activation_checkpoint_config=which)
    random.model_parallel_xla_manual_seed(1)
    model = initialize_parallel_model(config, Blocks)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(torch.ones(2, 4))
    loss.backward()
    return (
        [loss.detach(), *(p.grad for p in model.parameters())],
        list(model.state_dict()),
        len(kept),
    )


def test_checkpointing_keeps_less_and_changes_nothing(ranks):
    plain, names, kept = ranks(checkpointed, None, world_size=2, tp=None)[0]
    for which in (Block, [Block], "full"):
        found, found_names, fewer = ranks(checkpointed, which, world_size=2, tp=None)[0]
        assert (
            all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
            and found_names == names
        )
        assert fewer < kept


# --- xla_model ------------------------------------------------------------------------------------


def developer_guide():
    """Two steps written as in the developer guide."""
    from tutorial_lib.parallel_layers.grads import clip_grad_norm

    device = xm.xla_device()
    weight = nn.Parameter(torch.zeros(2, device=device))
    set_tensor_model_parallel_attributes(weight, True, 0, 1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    (weight * (xm.get_ordinal() + 1)).sum().backward()
    clip_grad_norm([weight], 1000.0)
    xm.optimizer_step(optimizer, groups=parallel_state.get_data_parallel_group(as_list=True))
    optimizer.zero_grad()
    xm.rendezvous("done")
    return weight.tolist(), xm.xrt_world_size(), xm.is_master_ordinal()


def test_the_average_is_over_the_group_not_the_world(ranks):
    found = ranks(developer_guide, world_size=4, tp=2)
    assert [weight for weight, _, _ in found] == [[-2.0] * 2, [-3.0] * 2] * 2
    assert [rest for _, *rest in found] == [[4, rank == 0] for rank in range(4)]


def world_average():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), xm.get_ordinal() + 1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    try:
        xm.reduce_gradients(optimizer)
    except ValueError as error:
        return str(error)
    return weight.grad.tolist()


def test_no_groups_means_the_world_unless_that_mixes_weights(ranks):
    assert ranks(world_average, world_size=2) == [[1.5, 1.5]] * 2
    assert all(
        "tensor-parallel groups of 2" in message
        for message in ranks(world_average, world_size=2, tp=2)
    )
