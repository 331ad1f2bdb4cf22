"""The learning rate by samples: Megatron-LM's formula, and what a checkpoint may change."""

from types import SimpleNamespace

import pytest
import torch

from tutorial_lib.training.schedules import SampleScheduler, Schedule

COSINE = Schedule(1.5e-4, 1e-5, 100, 1100, "cosine")


def test_the_published_run():
    """64 samples a step, a decay of 320000 steps and a hundredth of it warm-up."""
    schedule = Schedule(1.5e-4, 1e-5, 0.01 * 320000 * 64, 320000 * 64, "cosine")
    assert schedule.at(3200 * 64) == 1.5e-4
    assert f"{schedule.at(4873 * 64):.3E}" == "1.500E-04"  # the tutorial's log line


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(style="square"), "square"),
        (dict(min_lr=2e-4), "min_lr 0.0002, lr 0.00015"),
        (dict(warmup_samples=1100), "a warm-up of 1100 and a decay of 1100"),
        (dict(warmup_samples=-1), "-1"),
    ],
)
def test_what_does_not_fit_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        Schedule(**{**vars(COSINE), **change})


def scheduler(schedule=COSINE, **options):
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    groups = [{"params": [parameter]} for parameter in parameters]
    return SampleScheduler(torch.optim.SGD(groups, lr=1.0), schedule, 64, **options)


def test_steps_count_samples_and_set_every_group():
    moved = scheduler()
    assert moved.get_last_lr() == [0.0, 0.0]
    moved.step()
    assert moved.get_last_lr() == [COSINE.at(64)] * 2
    moved.step()
    assert moved.samples == 128 and moved.optimizer.param_groups[1]["lr"] == COSINE.at(128)
    again = scheduler()
    again.load_state_dict(moved.state_dict())
    assert again.get_last_lr() == moved.get_last_lr()
    again.step()
    assert again.samples == 192


def test_another_schedule_is_refused_kept_or_taken():
    saved = scheduler()
    saved.step()
    other = Schedule(1e-3, 0.0, 10, 1000, "linear")
    with pytest.raises(ValueError, match="--override-lr-scheduler"):
        scheduler(other).load_state_dict(saved.state_dict())
    kept, taken = (scheduler(other, on_mismatch=choice) for choice in ("keep", "load"))
    kept.load_state_dict(saved.state_dict())
    taken.load_state_dict(saved.state_dict())
    assert kept.get_last_lr()[0] == other.at(64) and taken.get_last_lr()[0] == COSINE.at(64)


@pytest.mark.parametrize("style", ["cosine", "linear"])
@pytest.mark.parametrize("fraction, iters", [(0.29, 100), (0.015, 100), (0.01, 320000), (0.0, 6)])
def test_the_schedule_is_megatrons(fraction, iters, style):
    """Its scheduler, with the steps that its training script makes of the arguments."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer, decay = SimpleNamespace(param_groups=[{}]), 8 * iters
    theirs = module.OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 1e-3, fraction * decay, decay, style, 0.0, 0.0, decay, "constant"
    )
    ours = Schedule(1e-2, 1e-3, fraction * decay, decay, style)
    for iteration in range(min(iters, 500) + 2):
        assert ours.at(8 * iteration) == pytest.approx(optimizer.param_groups[0]["lr"])
        theirs.step(8)
