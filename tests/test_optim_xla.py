"""Gradients, random streams and optimizers on XLA: the values of the CPU, and no compilation after
the second step.
"""

import pytest
import torch
from torch import nn

from tutorial_lib import xla_model as xm
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import grads, parallel_state, random
from tutorial_lib.parallel_layers.marks import (
    move_model_to_device,
    set_tensor_model_parallel_attributes,
)
from tutorial_lib.parallel_layers.recompute import checkpoint

from .pool import needs_xla

pytestmark = needs_xla


class Small(nn.Module):
    """Odd sizes, a 0-d parameter, one that is cut over tensor parallelism, and a tie."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in {"matrix": (5, 7), "five": (5,), "one": (1,), "scalar": ()}.items():
            self.register_parameter(name, nn.Parameter((0.1 * torch.randn(shape)).to(dtype)))
        tp, place = (
            parallel_state.get_tensor_model_parallel_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        self.cut = nn.Parameter((0.1 * torch.randn(4, 7)).chunk(tp)[place].to(dtype).clone())
        set_tensor_model_parallel_attributes(self.cut, True, 0, 1)
        self.tied = self.matrix

    def forward(self, x):
        hidden = torch.tanh(self.matrix @ x) * self.five + self.scalar
        return (
            (hidden.sum() * self.one.sum()) ** 2 * 50
            + (self.cut @ x).pow(3).sum()
            + self.tied.pow(2).sum()
        )


def train(optimizer_class, zero, clip, dtype=torch.float32, hook=False, steps=5):
    device = xm.xla_device()
    model = move_model_to_device(Small(dtype), device)
    assert model.tied is model.matrix and model.cut.tensor_model_parallel
    groups = [{"params": [model.matrix, model.cut], "weight_decay": 0.1}]
    groups += [{"params": [model.five, model.one, model.scalar], "weight_decay": 0.0}]
    if zero:
        optimizer = NeuronZero1Optimizer(
            groups, optimizer_class, max_norm=clip, use_grad_acc_hook=hook, lr=1e-2
        )
    else:
        optimizer = optimizer_class(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    xm.mark_step()
    norms, compiled = [], [_graphs()]
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            seed = 100 * step + 10 * parallel_state.get_data_parallel_rank() + micro
            x = torch.randn(7, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
            (model(x) / 2).backward()
        if zero:
            optimizer.step()
            norms.append(optimizer.grad_norm)
        else:
            grads.bucket_allreduce_gradients([p.grad for p in model.parameters()])
            norms.append(grads.clip_grad_norm(model.parameters(), clip))
            optimizer.step()
        scheduler.step()
        xm.mark_step()
        compiled.append(_graphs())
    if zero:  # a state that goes through the host changes nothing
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        xm.mark_step()
    return [p.detach().cpu() for p in model.parameters()], [n.cpu() for n in norms], compiled


def _graphs():
    from tutorial_lib import backends

    if not backends.uses_xla():
        return 0
    from tutorial_lib import xla_cpu

    return xla_cpu.graph_count()


@pytest.mark.parametrize(
    "tp, zero, optimizer_class",
    [
        (1, True, torch.optim.AdamW),
        (2, False, AdamW_FP32OptimParams),
        pytest.param(2, True, torch.optim.AdamW, marks=pytest.mark.slow),
        pytest.param(1, False, torch.optim.AdamW, marks=pytest.mark.slow),
    ],
)
def test_float32_equals_the_cpu(ranks, tp, zero, optimizer_class):
    expected = ranks(train, optimizer_class, zero, 0.5, world_size=2, tp=tp)
    found = ranks(train, optimizer_class, zero, 0.5, world_size=2, tp=tp, backend="xla")
    for (weights, norms, _), (xla_weights, xla_norms, compiled) in zip(expected, found):
        for a, b in zip(weights + norms, xla_weights + xla_norms, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert compiled[-1] == compiled[2], "a step after the second one was another graph"
        assert compiled[2] - compiled[0] <= 2


def test_bfloat16_with_masters_stays_near_the_cpu(ranks):
    options = {"dtype": torch.bfloat16, "hook": True, "world_size": 2}
    expected = ranks(train, AdamW_FP32OptimParams, True, 0.5, **options)
    found = ranks(train, AdamW_FP32OptimParams, True, 0.5, **options, backend="xla")
    for a, b in zip(expected[0][0], found[0][0]):
        torch.testing.assert_close(
            a, b, rtol=2**-8, atol=1e-3
        )  # one bfloat16 step of a weight, a tenth of five updates
        assert b.dtype == torch.bfloat16


def masks():
    dropout, x = nn.Dropout(0.5), torch.ones(1000, device=xm.xla_device())
    random.model_parallel_xla_manual_seed(7)
    random.separate_replicas()
    replicated = dropout(x)
    with random.get_xla_rng_tracker().fork():
        sharded = dropout(x)
    state = random.get_rng_state()
    first = dropout(x)
    xm.mark_step()
    random.set_rng_state(state)
    again = dropout(x)
    xm.mark_step()
    return [t.cpu() for t in (replicated, sharded, first, again)]


@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_streams(ranks, tp):
    (replicated, sharded, first, again), (other, other_sharded, *_) = ranks(
        masks, world_size=2, tp=tp, backend="xla"
    )
    assert torch.equal(replicated, other) == (tp == 2)
    assert not torch.equal(sharded, other_sharded) and not torch.equal(sharded, replicated)
    assert torch.equal(first, again)
    assert abs((replicated > 0).float().mean() - 0.5) < 0.05


def seed_after_a_round_trip(seed):
    import torch_xla.core.xla_model as real

    real.set_rng_state(seed)
    state = random.get_rng_state()
    real.set_rng_state(1)
    random.set_rng_state(state)
    return real.get_rng_state()


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_state_of_the_default_stream_survives_a_checkpoint(ranks, seed):
    assert ranks(seed_after_a_round_trip, seed, world_size=2, tp=2, backend="xla") == [seed, seed]


def recompute(checkpointed):
    random.model_parallel_xla_manual_seed(5)
    device = xm.xla_device()
    dense, dropout = nn.Linear(8, 8).to(device), nn.Dropout(0.5)
    x = torch.randn(4, 8).to(device).requires_grad_()

    def block(t):
        with random.get_xla_rng_tracker().fork():
            t = dropout(t)
        return dropout(torch.tanh(dense(t)))

    y = checkpoint(block, x) if checkpointed else block(x)
    y.pow(2).sum().backward()
    after = torch.rand(3, device=device)
    xm.mark_step()
    return [t.detach().cpu() for t in (y, x.grad, dense.weight.grad, dense.bias.grad, after)]


def test_a_recomputed_forward_replays_its_dropout(ranks):
    plain, again = (
        ranks(recompute, c, world_size=2, tp=2, backend="xla")[0] for c in (False, True)
    )
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def sharded_there_and_back(folder, load):
    device = xm.xla_device()
    model = move_model_to_device(Small(torch.float32), device)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    xm.mark_step()
    if load:
        optimizer.load_sharded_state_dict(folder)
    else:
        model(torch.ones(7, device=device)).backward()
        optimizer.step()
        xm.mark_step()
        optimizer.save_sharded_state_dict(folder, num_workers_per_step=1)
    xm.mark_step()
    held = [shard for _, shard in optimizer.pairs()]
    held += [optimizer.base_optimizer.state[shard]["exp_avg"] for shard in held]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *held)]


def test_sharded_state_dict(ranks, tmp_path):
    """Written one rank after the other, though its parts are gathered."""
    saved = ranks(sharded_there_and_back, str(tmp_path), False, world_size=2, backend="xla")
    loaded = ranks(sharded_there_and_back, str(tmp_path), True, world_size=2, backend="xla")
    for before, after in zip(saved, loaded):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
