"""What a run logs, on rank 0: lines on standard output and TensorBoard's scalars, under the names
of the tutorials' scripts.
"""

import logging
import math
import time
from pathlib import Path
from statistics import fmean

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tutorial_lib.parallel_layers import parallel_state

from .gpt_arguments import GPTArguments
from .loop import Step

BY_SAMPLES = " vs samples"


class Logger:
    """Step loss, learning rate, throughput and gradient norm; and how many steps were left out, if
    there are any.

    Args:
        log_dir: folder of the TensorBoard events; None writes none.
        print_every, write_every: steps from one line to the next, and from one point in TensorBoard
            to the next.
        done, samples: steps and samples before this run, if it resumes. Later TensorBoard events,
            of a killed run that had not saved them, are hidden.
    """

    scalars = {  # fields of a step by their names in TensorBoard
        "step loss": "loss",
        "learning rate": "learning_rate",
        "throughput": "throughput",
        "grad-norm": "grad_norm",
        "skipped steps": "skipped",
    }

    def __init__(
        self,
        log_dir: str | None = None,
        print_every: int = 1,
        write_every: int = 1,
        done: int = 0,
        samples: int = 0,
    ):
        self._root = parallel_state.is_global_rank_zero()
        self._print_every, self._write_every = print_every, write_every
        self._not_printed: list[Step] = []
        self._writer = _writer(log_dir, done, samples) if log_dir and self._root else None

    def log(self, step: Step) -> None:
        """Takes a step as `train` reports it."""
        if not self._root:
            return
        self._not_printed.append(step)
        if step.step % self._print_every == 0:
            print(self._line(self._not_printed), flush=True)
            self._not_printed = []
        if step.step % self._write_every == 0:
            values = {name: getattr(step, field) for name, field in self.scalars.items()}
            if not step.skipped:
                del values["skipped steps"]
            self._write(step, values)

    def _line(self, steps: list[Step]) -> str:
        """The line of the last of these steps, all since the line before."""
        step = steps[-1]
        norm = "" if step.grad_norm is None else f" grad-norm : {step.grad_norm:.4f}"
        skipped = f" skipped steps : {step.skipped}" if step.skipped else ""
        return (
            f"LOG {time.asctime()} - ({step.epoch}, {step.step}) step_loss : {step.loss:.4f} "
            f"learning_rate : {step.learning_rate:.2e} throughput : {step.throughput:.2f} seq/s"
            f"{norm}{skipped}"
        )

    def _write(self, step: Step, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if self._writer and value is not None:
                self._writer.add_scalar(name, value, step.step)

    def flush(self) -> None:
        """Writes events to their file, so that a run that goes on from here finds them."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Writes out what is still held back."""
        if self._writer:
            self._writer.close()


class GPTLogger(Logger):
    """Megatron-LM's line and scalars, and validations.

    Args:
        arguments: intervals, folder of events.
        done, samples: see `Logger`.
    """

    scalars = {
        "learning-rate": "learning_rate",
        "batch-size": "sequences",
        "lm loss": "loss",
        "throughput": "throughput",
        "grad-norm": "grad_norm",
        "skipped steps": "skipped",
        "iteration-time": "seconds",
    }

    def __init__(self, arguments: GPTArguments, done: int, samples: int):
        folder, write_every = arguments.tensorboard_dir, arguments.tensorboard_log_interval
        super().__init__(folder, arguments.log_interval, write_every, done, samples)
        self._train_iters = arguments.train_iters

    def _line(self, steps: list[Step]) -> str:
        """Loss and time are means over the steps."""
        step, seconds = steps[-1], fmean(step.seconds for step in steps)
        norm = "" if step.grad_norm is None else f" grad norm: {step.grad_norm:.3f} |"
        skipped = f" number of skipped iterations: {step.skipped} |" if step.skipped else ""
        return (
            f" iteration {step.step:8d}/{self._train_iters:8d} |"
            f" consumed samples: {step.samples:12d} |"
            f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
            f" learning rate: {step.learning_rate:.3E} |"
            f" global batch size: {step.sequences:5d} |"
            f" lm loss: {fmean(step.loss for step in steps):.6E} |{norm}{skipped}"
            f" throughput: {step.sequences / seconds:.3f} |"
        )

    def _write(self, step: Step, values: dict[str, float | None]) -> None:
        super()._write(step, values)
        for name, value in values.items():
            if self._writer and value is not None and name != "iteration-time":
                self._writer.add_scalar(name + BY_SAMPLES, value, step.samples)

    def log_validation(self, step: Step, loss: float) -> None:
        """The loss of a validation after a step, and its perplexity."""
        if not self._root:
            return
        perplexity = math.exp(min(20.0, loss))  # Megatron-LM's bound: a diverged run's is a number
        print(
            f" validation loss at iteration {step.step} | lm loss value: {loss:.6E} |"
            f" lm loss PPL: {perplexity:.6E} |",
            flush=True,
        )
        self._write(step, {"lm loss validation": loss, "lm loss validation ppl": perplexity})


def read_events(folder: str) -> EventAccumulator:
    """The events of a folder as TensorBoard shows them, without those that a resumed run hides."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each that is hidden
    return EventAccumulator(folder, {"scalars": 0}).Reload()


def _writer(folder: str, done: int, samples: int) -> SummaryWriter:
    """A writer of events into `folder` with which TensorBoard shows no step twice.

    `purge_step` hides events from that step on. It would also hide scalars by samples of steps that
    count, so these are written again.
    """
    shown = read_events(folder) if Path(folder).is_dir() else None
    writer = SummaryWriter(folder, purge_step=done + 1)
    for name in [] if shown is None else shown.Tags()["scalars"]:
        if name.endswith(BY_SAMPLES):
            for event in shown.Scalars(name):
                if done < event.step <= samples:
                    writer.add_scalar(name, event.value, event.step, event.wall_time)
    return writer
