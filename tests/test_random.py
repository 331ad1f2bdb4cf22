"""Random streams: equal where activations are replicated, different where they are not, and back
after a restore.
"""

import io
import random as python_random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tutorial_lib.parallel_layers import random
from tutorial_lib.parallel_layers.recompute import checkpoint


def masks():
    random.model_parallel_xla_manual_seed(1234)
    random.separate_replicas()
    dropout, x = nn.Dropout(0.5), torch.ones(1000)
    replicated = dropout(x)
    with random.get_xla_rng_tracker().fork():
        sharded = dropout(x)
    state = random.get_rng_state()

    def draw():
        with random.get_xla_rng_tracker().fork():
            inside = dropout(x)
        return [
            inside,
            dropout(x),
            torch.from_numpy(np.random.rand(3)),
            torch.tensor(python_random.random()),
        ]

    expected = draw()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    random.set_rng_state(torch.load(file, weights_only=True))
    again = draw()
    return replicated, sharded, all(torch.equal(a, b) for a, b in zip(expected, again))


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


def recompute_in_a_fork(checkpointed):
    random.model_parallel_xla_manual_seed(5)
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    with random.get_xla_rng_tracker().fork():
        y = checkpoint(block, x) if checkpointed else block(x)
    y.pow(2).sum().backward()
    return y.detach(), x.grad


def test_what_was_drawn_within_a_fork_is_drawn_again(ranks):
    plain, again = (ranks(recompute_in_a_fork, each, world_size=1)[0] for each in (False, True))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


class Block(nn.Module):
    """Dropout from both streams around a matrix."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        with random.get_xla_rng_tracker().fork():
            x = self.dropout(x)
        return self.dropout(torch.tanh(self.dense(x)))


def recompute(checkpointed):
    random.model_parallel_xla_manual_seed(5)
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, 8, requires_grad=True)
    y = x
    for block in model:
        y = checkpoint(block, y) if checkpointed else block(y)
    loss = y.pow(2).sum()
    loss.backward()
    with random.get_xla_rng_tracker().fork():
        after = torch.rand(3)
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters()), torch.rand(3), after]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_recomputed_forward_replays_its_dropout(ranks, tp):
    plain, again = (ranks(recompute, c, world_size=2, tp=tp) for c in (False, True))
    for a, b in zip(plain, again):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
