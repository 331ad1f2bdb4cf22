"""The learning rate as a function of how many samples were trained on, as Megatron-LM counts."""

import math
from dataclasses import asdict, dataclass

STYLES = ("linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """A rise in a straight line, then a decay, then a floor.

    Counted in samples, the schedule does not change with the batch size. At n samples, with W of
    warm-up, D of decay and r = (n - W) / (D - W):

        n ≤ W      max_lr · n / W          (so the very first step, at n = 0, moves nothing)
        n > D      min_lr
        linear     min_lr + (1 - r) (max_lr - min_lr)
        cosine     min_lr + (1 + cos πr) / 2 (max_lr - min_lr)

    Attributes:
        max_lr, min_lr: the rates.
        warmup_samples: W, not rounded where it is a fraction of D; 0 for none.
        decay_samples: D, counted from the first sample, the warm-up included.
        style: one of `STYLES`.

    Raises:
        ValueError: an unknown style, or numbers that do not fit together.
    """

    max_lr: float
    min_lr: float
    warmup_samples: float
    decay_samples: int
    style: str = "linear"

    def __post_init__(self):
        if self.style not in STYLES:
            raise ValueError(f"decay style {self.style!r} is not one of {', '.join(STYLES)}")
        if not 0 <= self.min_lr <= self.max_lr:
            raise ValueError(f"need 0 ≤ min_lr ≤ lr, got min_lr {self.min_lr}, lr {self.max_lr}")
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise ValueError(
                f"need 0 ≤ warm-up < decay in samples, got a warm-up of {self.warmup_samples} and "
                f"a decay of {self.decay_samples}"
            )

    def at(self, samples: int) -> float:
        """The learning rate after so many samples."""
        if self.warmup_samples and samples <= self.warmup_samples:
            return self.max_lr * samples / self.warmup_samples
        if samples > self.decay_samples:
            return self.min_lr
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.min_lr + left * (self.max_lr - self.min_lr)


class SampleScheduler:
    """Moves an optimizer along a `Schedule`, with the interface of torch's schedulers.

    Args:
        optimizer: all of whose groups get the rate.
        schedule: see there.
        samples_per_step: by how many samples `step` moves; the global batch size.
        on_mismatch: when a checkpoint was made under another schedule: `raise`, `keep` this one, or
            `load` that one.
    """

    def __init__(self, optimizer, schedule: Schedule, samples_per_step: int, on_mismatch="raise"):
        self.optimizer, self.schedule, self.samples_per_step = optimizer, schedule, samples_per_step
        self.on_mismatch, self.samples = on_mismatch, 0
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.at(self.samples)

    def step(self) -> None:
        """Counts the samples of a step as trained on."""
        self.samples += self.samples_per_step
        self._set()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict:
        return {"samples": self.samples, "schedule": asdict(self.schedule)}

    def load_state_dict(self, state: dict) -> None:
        """Goes on where a run was.

        Raises:
            ValueError: that run had another schedule, and `on_mismatch` is `raise`.
        """
        saved = Schedule(**state["schedule"])
        if saved != self.schedule and self.on_mismatch == "raise":
            raise ValueError(
                f"the checkpoint's schedule is {saved}, this run's {self.schedule}; "
                "--override-lr-scheduler keeps this run's, --use-checkpoint-lr-scheduler the other"
            )
        if self.on_mismatch == "load":
            self.schedule = saved
        self.samples = state["samples"]
        self._set()
