"""Random streams: equal where activations are replicated, different where they are not, and back
after a restore.
"""

import io
import random as python_random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tutorial_lib import xla_model as xm
from tutorial_lib.parallel_layers import random
from tutorial_lib.parallel_layers.recompute import checkpoint


def masks():
    random.model_parallel_xla_manual_seed(1234)
    random.separate_replicas()
    dropout, x = nn.Dropout(0.5), torch.ones(1000, device=xm.xla_device())
    replicated = dropout(x)
    with random.get_xla_rng_tracker().fork():
        sharded = dropout(x)
    state = random.get_rng_state()

    def draw():
        with random.get_xla_rng_tracker().fork():
            inside = dropout(x)
        outside = dropout(x)
        xm.mark_step()
        return inside.tolist(), outside.tolist(), np.random.rand(), python_random.random()

    expected = draw()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    random.set_rng_state(torch.load(file, weights_only=True))
    return replicated.cpu(), sharded.cpu(), draw() == expected


def test_dropout_streams(ranks):
    found = ranks(masks, world_size=4, tp=2)
    replicated, sharded, restored = zip(*found)
    assert torch.equal(replicated[0], replicated[1]) and torch.equal(replicated[2], replicated[3])
    assert not torch.equal(replicated[0], replicated[2])
    for i in range(4):
        for j in range(i):
            assert not torch.equal(sharded[i], sharded[j])
        assert not torch.equal(sharded[i], replicated[i])
        assert abs((sharded[i] > 0).float().mean() - 0.5) < 0.05
    assert all(restored)


@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_streams_on_xla(ranks, tp):
    found = ranks(masks, world_size=2, tp=tp, backend="xla")
    (replicated, sharded, restored), (other, other_sharded, other_restored) = found
    assert torch.equal(replicated, other) == (tp == 2) and restored and other_restored
    assert not torch.equal(sharded, other_sharded) and not torch.equal(sharded, replicated)
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


def replicas():
    random.model_parallel_xla_manual_seed(1234)
    before, sharded = torch.get_rng_state(), random.get_xla_rng_tracker().get_states()
    random.separate_replicas()
    kept = random.get_xla_rng_tracker().get_states()
    same = all(torch.equal(kept[n][d], sharded[n][d]) for n in sharded for d in sharded[n])
    assert same, "the model-parallel stream differs between replicas already"
    untouched = torch.equal(before, torch.get_rng_state())
    first = torch.rand(100)
    random.separate_replicas()
    return untouched, first, torch.rand(100)


def test_replicas_are_separated_and_groups_are_not(ranks):
    found = ranks(replicas, world_size=4, tp=2)
    for draw in (1, 2):
        numbers = [each[draw] for each in found]
        assert torch.equal(numbers[0], numbers[1]) and torch.equal(numbers[2], numbers[3])
        assert not torch.equal(numbers[0], numbers[2])
    assert not torch.equal(found[2][1], found[2][2]), "a second time does not begin anew"
    assert all(untouched for untouched, *_ in ranks(replicas, world_size=2, tp=2))


def test_a_fork_needs_its_stream():
    with pytest.raises(ValueError, match="model_parallel_xla_manual_seed"):
        with random.XLARNGStatesTracker().fork():
            pass


def test_a_fork_leaves_the_default_stream_and_goes_on_with_its_own():
    tracker = random.XLARNGStatesTracker()
    tracker.start(1)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    states = tracker.get_states()
    with tracker.fork():
        second = torch.rand(2)
    assert not torch.equal(first, second)
    tracker.set_states(states)
    with pytest.raises(RuntimeError), tracker.fork():
        assert torch.equal(torch.rand(2), second)
        raise RuntimeError


def test_a_fork_within_a_fork_draws_no_number_twice():
    tracker = random.XLARNGStatesTracker()
    tracker.start(1)
    start = tracker.get_states()
    with tracker.fork():
        expected = torch.rand(8)
    tracker.set_states(start)
    with tracker.fork():
        found = [torch.rand(4)]
        with tracker.fork():
            found.append(torch.rand(2))
        found.append(torch.rand(2))
    assert torch.equal(torch.cat(found), expected)


def test_states_are_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        state = random.get_rng_state()
        drawn = torch.rand(3, device="cpu")
        random.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cpu"), drawn)


def test_a_retained_graph_is_recomputed_alike():
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(torch.tanh(model(x)), 0.5), x).sum()
    y.backward(retain_graph=True)
    once, before = x.grad.clone(), torch.get_rng_state()
    y.backward()
    assert torch.equal(x.grad, 2 * once) and torch.equal(torch.get_rng_state(), before)


def recompute(checkpointed, forked):
    """Dropout from both streams around a matrix."""
    random.model_parallel_xla_manual_seed(5)
    device, dropout = xm.xla_device(), nn.Dropout(0.5)
    dense = nn.Linear(8, 8).to(device, torch.float64)
    x = torch.randn(4, 8, dtype=torch.float64).to(device).requires_grad_()

    def block(t):
        with random.get_xla_rng_tracker().fork():
            t = dropout(t)
        return dropout(torch.tanh(dense(t)))

    with random.get_xla_rng_tracker().fork() if forked else nullcontext():
        y = checkpoint(block, x) if checkpointed else block(x)
    y.pow(2).sum().backward()
    with random.get_xla_rng_tracker().fork():
        after = torch.rand(3, device=device)
    found = [y, x.grad, *(p.grad for p in dense.parameters()), torch.rand(3, device=device), after]
    xm.mark_step()
    return [t.detach().cpu() for t in found]


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("backend, rtol", [("cpu", 0.0), ("xla", 1e-12)])
def test_a_recomputed_forward_replays_its_dropout(ranks, backend, rtol, forked):
    where = dict(world_size=2, tp=2, backend=backend)
    plain, again = (ranks(recompute, each, forked, **where) for each in (False, True))
    torch.testing.assert_close(again, plain, rtol=rtol, atol=rtol)
