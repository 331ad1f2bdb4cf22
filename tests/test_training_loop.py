"""The training loop's arithmetic and errors; that it trains rightly is for the models' tests."""

import contextlib
import io
import math
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.training.logger import Logger, read_events
from tutorial_lib.training.loop import train


class Mean(torch.nn.Module):
    """The smallest model that the loop takes."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def count_targets(self, batch: dict) -> torch.Tensor:
        return torch.tensor(batch["x"].numel())

    def forward(self, x, num_items_in_batch):
        loss = (self.weight * x).sum() / num_items_in_batch
        return SimpleNamespace(loss=loss)


def short_stream(batches):
    model = Mean()
    stream = ({"x": torch.ones(2)} for _ in range(batches))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return len(train(model, optimizer, stream, steps=3, gradient_accumulation_steps=2))


def test_batches_that_end_early_are_named(ranks):
    assert ranks(short_stream, 6, world_size=1) == [3]
    with pytest.raises(ValueError, match="ended in step 3 of 3, after 1 of its 2"):
        ranks(short_stream, 5, world_size=1)


def left_out(folder):
    """A run whose second step has a gradient that is not finite."""
    model = Mean()
    config = neuronx_distributed_config()
    optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
    logger, done, text = Logger(folder), [], io.StringIO()
    stream = ({"x": torch.full((2,), value)} for value in (1.0, math.inf, 1.0))

    def on_step(step):
        logger.log(step)
        done.append((step.step, step.skipped, step.sequences))
        time.sleep(0.2)  # is no part of a step

    with contextlib.redirect_stdout(text), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        steps = train(model, optimizer, stream, steps=3, on_step=on_step)
        seconds = sum(step.seconds for step in steps)
        assert seconds < time.perf_counter() - began - 0.6
    logger.close()
    assert steps[-1].throughput == pytest.approx(6 / seconds)
    return done, text.getvalue().splitlines()


def test_steps_that_were_left_out_are_logged(ranks, tmp_path):
    ((done, lines),) = ranks(left_out, str(tmp_path), world_size=1, tp=None)
    assert done == [(1, 0, 2), (2, 1, 2), (3, 1, 2)]
    assert [line.rpartition("skipped steps : ")[2] for line in lines[1:]] == ["1", "1"]
    assert "skipped" not in lines[0]
    skipped = read_events(str(tmp_path)).Scalars("skipped steps")
    assert [(event.step, event.value) for event in skipped] == [(2, 1), (3, 1)]
