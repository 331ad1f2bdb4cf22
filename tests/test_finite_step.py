"""A gradient that is not finite on one rank: the step is left out on all."""

import warnings

import pytest
import torch
from torch import nn

from tutorial_lib import xla_model as xm
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.marks import (
    move_model_to_device,
    set_tensor_model_parallel_attributes,
)
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config

TP, DP = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank
FIRST_RANK, LAST_RANK = (0, 0), (1, 1)


def make(zero, optimizer_class, clip=True, tp=2):
    config = neuronx_distributed_config(
        tensor_parallel_size=tp,
        optimizer_config={"zero_one_enabled": zero, "grad_clipping": clip},
    )
    torch.manual_seed(TP())
    model = nn.Linear(3, 2)
    torch.manual_seed(0)
    nn.init.normal_(model.bias)  # replicated
    model = move_model_to_device(model, xm.xla_device())
    set_tensor_model_parallel_attributes(model.weight, True, 0, 1)
    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {"weight_decay": 0.1}
    return model, initialize_parallel_optimizer(
        config, optimizer_class, model.named_parameters(), lr=0.1, **options
    )


def train(steps, bad, value, where, zero, optimizer_class, size=2, clip=True):
    """Trains with the batches of `steps`, of which one rank gets a bad number in those of `bad`."""
    model, optimizer = make(zero, optimizer_class, clip=clip, tp=size)
    warnings.simplefilter("ignore")
    for step in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + DP()))
        if step in bad and where == (TP(), DP()):
            x[0, 0] = value
        model(x.to(xm.xla_device())).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()
    state = {
        (number, name): value.cpu()
        for number, fields in enumerate(optimizer.state.values())
        for name, value in fields.items()
    }
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {**weights, **state}, int(optimizer.skipped_steps), optimizer.grad_norm is None


@pytest.mark.parametrize(
    "zero, clip, optimizer_class, where",
    [
        (True, True, torch.optim.AdamW, FIRST_RANK),
        (True, False, AdamW_FP32OptimParams, LAST_RANK),
        (True, False, torch.optim.SGD, FIRST_RANK),
        (False, True, torch.optim.SGD, LAST_RANK),
        (False, False, torch.optim.AdamW, FIRST_RANK),
        (False, True, AdamW_FP32OptimParams, LAST_RANK),
    ],
)
def test_a_step_is_left_out_on_all_ranks(ranks, zero, clip, optimizer_class, where):
    options = dict(zero=zero, clip=clip, optimizer_class=optimizer_class, where=where)
    value = torch.inf if clip else torch.nan
    found = ranks(train, range(6), (0, 3), value, **options, world_size=4, tp=None)
    expected = ranks(train, (1, 2, 4, 5), (), 0, **options, world_size=4, tp=None)
    for (tensors, skipped, no_norm), (right, none, _) in zip(found, expected):
        assert (skipped, none) == (2, 0) and no_norm == (not clip)
        assert tensors.keys() == right.keys()
        for name, tensor in right.items():
            assert tensor.isfinite().all() and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("optimizer_class", [AdamW_FP32OptimParams, torch.optim.SGD])
@pytest.mark.parametrize("zero", [True, False])
def test_a_traced_step_is_left_out(ranks, zero, optimizer_class):
    rest = zero, optimizer_class, 1
    where = {"world_size": 2, "backend": "xla"}
    found = ranks(train, range(5), (0, 3), torch.nan, (0, 1), *rest, **where)
    expected = ranks(train, (1, 2, 4), (), 0, (0, 1), *rest, **where)
    for (tensors, skipped, _), (right, none, _) in zip(found, expected):
        assert (skipped, none) == (2, 0)
        for name, tensor in right.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-7)


def warned(zero):
    model, optimizer = make(zero, torch.optim.AdamW)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    if (TP(), DP()) == LAST_RANK:
        model.weight.grad[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before))
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("zero", [True, False])
def test_rank_0_names_the_parameter_of_another_rank(ranks, zero):
    (said,), *others = ranks(warned, zero, world_size=4, tp=None)
    assert "is nan: not finite are those of weight of shape (2, 3);" in said and not any(others)


def huge():
    model, optimizer = make(True, torch.optim.SGD)
    before = model.bias.detach().clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return torch.equal(model.bias, before), [str(w.message) for w in caught]


def test_an_overflow_of_the_norm_is_left_out_and_rank_0_says_so(ranks):
    found = ranks(huge, world_size=4, tp=None)
    assert [left_out for left_out, _ in found] == [True] * 4
    assert [len(said) for _, said in found] == [1, 0, 0, 0]
    assert "inf: their sum overflows; the step is left out on all ranks" in found[0][1][0]
