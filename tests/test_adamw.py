"""The tutorials' AdamW against its formulas, against torch's where they coincide, and the decay
groups.
"""

import math
import re

import pytest
import torch
from torch import nn

from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams, get_param_groups_by_weight_decay


def train(make, steps=20, dtype=torch.float64, weights=None):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 5), (), (7,))]
    optimizer = make(parameters)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
    return [p.detach() for p in parameters], optimizer


def test_equals_torch_without_epsilon_and_decay():
    ours, _ = train(lambda p: AdamW_FP32OptimParams(p, lr=1e-2, betas=(0.8, 0.95), eps=0.0))
    theirs, _ = train(
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=0.0, weight_decay=0.0)
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("correct_bias", [True, False])
def test_equals_the_formula_step_by_step(correct_bias):
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-3, 0.2
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(4, dtype=torch.float64))
    optimizer = AdamW_FP32OptimParams([p], lr, (beta1, beta2), eps, decay, correct_bias)
    w, m, v = p.detach().clone(), 0, 0
    for t in range(1, 6):
        p.grad = g = torch.randn(4, dtype=torch.float64)
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        alpha = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if correct_bias else lr
        w = w - alpha * m / (v.sqrt() + eps)
        w = w - lr * decay * w
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "dtype, wide", [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]
)
def test_state_is_wide_and_survives_a_load(dtype, wide):
    def make(p):
        return AdamW_FP32OptimParams(p, lr=1e-2)

    parameters, optimizer = train(make, dtype=dtype)
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wide
        assert isinstance(state["step"], torch.Tensor) and state["step"].item() == 20
    fresh = make([nn.Parameter(p.clone()) for p in parameters])
    fresh.load_state_dict(optimizer.state_dict())
    for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        for key in a:
            assert torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype
            assert a[key].data_ptr() != b[key].data_ptr()


def test_a_parameter_without_gradient_is_left_alone():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    optimizer = AdamW_FP32OptimParams([used, unused], weight_decay=0.5)
    optimizer.step()
    assert unused.tolist() == [1, 1] and used[0] != 1 and unused not in optimizer.state


@pytest.mark.parametrize(
    "bad",
    [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}]
    + [{name: float("nan")} for name in ("lr", "eps", "weight_decay")],
)
def test_bad_values_are_named(bad):
    (value,) = bad.values()
    with pytest.raises(ValueError, match=re.escape(str(value))):
        AdamW_FP32OptimParams([nn.Parameter(torch.ones(1))], **bad)


class TinyRMSNorm(nn.Module):
    """Derived from no norm of torch's, as Hugging Face's are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_decay_groups_go_by_module_type():
    model = nn.Module()
    model.LayerNorm, model.final, model.dense = nn.LayerNorm(2), TinyRMSNorm(), nn.Linear(2, 2)
    model.normal_projection = nn.Linear(2, 2, bias=False)  # a name with "norm" in it
    model.embed = nn.Embedding(4, 2)
    model.head = nn.Linear(2, 4)
    model.head.weight = model.embed.weight
    decayed, plain = get_param_groups_by_weight_decay(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    expected = [model.dense.weight, model.normal_projection.weight, model.embed.weight]
    assert set(decayed["params"]) == set(expected) and len(decayed["params"]) == 3
    expected = [*model.LayerNorm.parameters(), model.final.weight]
    expected += [model.dense.bias, model.head.bias]
    assert set(plain["params"]) == set(expected) and len(plain["params"]) == 5
