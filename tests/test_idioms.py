"""What a plain loop does to gradients, weights, groups, state and options has the effect under
ZeRO-1, in its default configuration, that it has on a plain optimizer in one process.

All numbers are multiples of a power of two, so results are equal bit for bit in float32, and but
for the rounding that masters avoid in bfloat16.
"""

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(5, 1, bias=False)
        self.late = nn.Parameter(torch.ones(3))  # in no group
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.arange(p.numel()).view(p.shape) % 3 - number % 2)

    def loss(self, step):
        """Gradients of 1 and 2, other ones at each step."""
        terms = []
        for number, p in enumerate(self.parameters()):
            factors = 1 + (torch.arange(p.numel(), dtype=p.dtype) + step + number) % 2
            terms.append((p * factors.view(p.shape)).sum())
        return sum(terms)


IDIOMS = {}


def idiom(when):
    """Registers what to do at the second and third step: first, between its two micro-batches, or
    last before `optimizer.step()`. It is called with model, optimizer, a place for keepsakes and
    the step's number.
    """

    def register(function):
        IDIOMS[function.__name__] = when, function
        return function

    return register


# --- gradients ------------------------------------------------------------------------------------


@idiom("between")
def model_zero_grad(model, optimizer, kept, step):
    model.zero_grad()


@idiom("between")
def zero_grad_in_place(model, optimizer, kept, step):
    optimizer.zero_grad(set_to_none=False)


@idiom("between")
def grad_scaled(model, optimizer, kept, step):
    for p in model.parameters():
        p.grad.mul_(0.5)
        p.grad.data.add_(1)


@idiom("between")
def grad_assigned(model, optimizer, kept, step):
    model.a.weight.grad = torch.ones_like(model.a.weight)
    model.a.bias.grad = model.a.bias.grad * 0.5
    model.b.weight.grad = None if step == 1 else torch.zeros_like(model.b.weight)


@idiom("last")
def grad_clipped_by_value(model, optimizer, kept, step):
    nn.utils.clip_grad_value_(model.parameters(), 2.5)


@idiom("last")
def grad_kept_and_restored(model, optimizer, kept, step):
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad


def add_one(p):
    p.grad.add_(1)


@idiom("last")
def grad_hooks(model, optimizer, kept, step):
    model.a.weight.register_hook(lambda grad: grad * 2)
    model.a.bias.register_post_accumulate_grad_hook(add_one)


# --- weights --------------------------------------------------------------------------------------


@idiom("first")
def model_load_state_dict(model, optimizer, kept, step):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@idiom("first")
def weights_assigned(model, optimizer, kept, step):
    model.a.weight.data = model.a.weight.data.clone() + 1
    model.b.weight.data.copy_(torch.ones(1, 5))
    model.a.bias.data[1] = -2


@idiom("first")
def weights_in_place(model, optimizer, kept, step):
    with torch.no_grad():
        model.a.weight.mul_(0.5)
        model.b.weight.clamp_(-1, 1)
        nn.init.ones_(model.a.bias)


@idiom("last")
def weights_decayed_by_hand(model, optimizer, kept, step):
    for p in model.parameters():
        p.data.add_(p.data, alpha=-0.5)


@idiom("first")
def weights_tied(model, optimizer, kept, step):
    model.late = model.a.bias if step == 1 else model.b.weight


@idiom("first")
def frozen_and_back(model, optimizer, kept, step):
    model.a.requires_grad_(step == 2)


@idiom("first")
def another_dtype(model, optimizer, kept, step):
    model.to(torch.bfloat16 if step == 1 else torch.float32)


# --- groups and options ---------------------------------------------------------------------------


@idiom("last")
def lr_written(model, optimizer, kept, step):
    optimizer.param_groups[0]["lr"] /= 2
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25)


@idiom("last")
def options_written(model, optimizer, kept, step):
    optimizer.param_groups[1]["weight_decay"] = 1.0
    for group in optimizer.param_groups:
        group.update(momentum=0.0, maximize=step == 2)


@idiom("last")
def group_added(model, optimizer, kept, step):
    if step == 1:
        optimizer.defaults["lr"] = 0.25
        optimizer.add_param_group({"params": [model.late], "momentum": 0.0})


@idiom("first")
def parameter_replaced(model, optimizer, kept, step):
    model.b.weight = optimizer.param_groups[1]["params"][0] = nn.Parameter(model.b.weight * 0)


# --- state ----------------------------------------------------------------------------------------


@idiom("last")
def state_cleared(model, optimizer, kept, step):
    if step == 1:
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)


@idiom("last")
def state_of_a_parameter(model, optimizer, kept, step):
    optimizer.state[model.a.weight]["momentum_buffer"].zero_()
    assert len(optimizer.state) == 3 and model.late not in optimizer.state
    optimizer.state[model.b.weight]["momentum_buffer"] *= 0.5
    del optimizer.state[model.a.bias]


def rewind(model, optimizer, kept, step, model_first):
    if step == 1:
        kept["model"] = copy.deepcopy(model.state_dict())
        kept["optimizer"] = copy.deepcopy(optimizer.state_dict())
        return
    halves = [
        lambda: model.load_state_dict(kept["model"]),
        lambda: optimizer.load_state_dict(kept["optimizer"]),
    ]
    for half in halves if model_first else halves[::-1]:
        half()


@idiom("first")
def loaded_model_first(model, optimizer, kept, step):
    rewind(model, optimizer, kept, step, True)


@idiom("first")
def loaded_optimizer_first(model, optimizer, kept, step):
    rewind(model, optimizer, kept, step, False)


# --- the step -------------------------------------------------------------------------------------


@idiom("last")
def step_hooks(model, optimizer, kept, step):
    def before(optimizer, args, kwargs):
        model.a.weight.grad.mul_(2)

    def after(optimizer, args, kwargs):
        model.b.weight.data.add_(1)

    if step == 1:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


@idiom("last")
def closure(model, optimizer, kept, step):
    def evaluate():
        loss = model.loss(step)
        loss.backward()
        return loss

    kept["loss"] = optimizer.step(evaluate).item()


@idiom("last")
def stepped_twice(model, optimizer, kept, step):
    optimizer.step()


def train(name, zero, dtype):
    when, act = IDIOMS[name]
    model, kept = Model().to(dtype), {}
    groups = [{"params": list(model.a.parameters())}, {"params": [model.b.weight], "lr": 0.25}]
    options = {"lr": 0.5, "momentum": 0.5}
    if zero:
        config = neuronx_distributed_config(
            optimizer_config={"zero_one_enabled": True, "max_grad_norm": float("inf")}
        )
        optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, groups, **options)
    else:
        optimizer = torch.optim.SGD(groups, **options)
    for step in range(4):
        now = when if step in (1, 2) else None
        if now == "first":
            act(model, optimizer, kept, step)
        model.loss(step).backward()
        if now == "between":
            act(model, optimizer, kept, step)
        model.loss(step).backward()
        if now == "last":
            act(model, optimizer, kept, step)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return weights, [group["lr"] for group in optimizer.param_groups], kept.get("loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_has_its_plain_effect(ranks, name, dtype):
    expected, rates, loss = train(name, False, dtype)
    rtol = 0.0 if dtype == torch.float32 else 2.0**-7
    for weights, found_rates, found_loss in ranks(train, name, True, dtype, world_size=2):
        assert found_rates == rates and found_loss == loss
        for parameter, value in expected.items():
            torch.testing.assert_close(weights[parameter], value, rtol=rtol, atol=0, msg=parameter)
