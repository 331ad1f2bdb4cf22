"""The training loop's arithmetic and errors; that it trains rightly is for the models' tests."""

import time
from types import SimpleNamespace

import pytest
import torch

from tutorial_lib.training.logger import BY_SAMPLES, _writer
from tutorial_lib.training.loop import train
from tutorial_lib.training.throughput import Throughput


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


def test_throughput_is_of_the_last_steps(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 100.0, 102.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Throughput(batch_size=2, world_size=3, grad_accum_usteps=4, moving_avg_window_size=2)
    assert [meter.get_throughput() for _ in range(3)] == [24, 24 * 2 / 3, 24 * 2 / 3]
    meter.reset_time()  # what took 96 seconds does not count
    assert meter.get_throughput() == 24 * 2 / 3


def saving_run():
    model, stream = Mean(), ({"x": torch.ones(2)} for _ in range(9))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    done = train(model, optimizer, stream, steps=4, on_step=lambda _: time.sleep(0.2))
    return done[-1].throughput


def test_throughput_is_of_steps_alone(ranks):
    """Not of what is done between two of them: 2 sequences in 0.2 seconds are 10 a second."""
    (throughput,) = ranks(saving_run, world_size=1)
    assert throughput > 50


@pytest.mark.parametrize(
    "name, value",
    [("batch_size", 0), ("world_size", -1), ("logging_interval", 0), ("grad_accum_usteps", 1.5)],
)
def test_numbers_that_measure_nothing_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Throughput(**{"batch_size": 1, "world_size": 1, "grad_accum_usteps": 1, name: value})


def test_tensorboard_shows_each_step_once_after_a_run_was_killed(tmp_path):
    """Killed after step 40, its last checkpoint is of step 30; by steps and by samples."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, last in ((0, 40), (30, 50), (50, 55)):
        writer = _writer(str(tmp_path), done, 8 * done)
        for step in range(done + 1, last + 1):
            writer.add_scalar("lm loss", last, step)
            writer.add_scalar("lm loss" + BY_SAMPLES, last, 8 * step)
        writer.close()
        time.sleep(1.1)  # the files' names, by which they are ordered, count seconds
    events = EventAccumulator(str(tmp_path), {"scalars": 0}).Reload()
    expected = [40] * 30 + [50] * 20 + [55] * 5
    for name, stride in (("lm loss", 1), ("lm loss" + BY_SAMPLES, 8)):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(stride * (i + 1), value) for i, value in enumerate(expected)]
