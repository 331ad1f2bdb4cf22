"""What a GPT run says of itself: Megatron-LM's line, TensorBoard's scalars, `results.json`."""

import math
import time
from pathlib import Path
from statistics import fmean

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tutorial_lib.parallel_layers import parallel_state

from .gpt_arguments import GPTArguments
from .loop import Step
from .metrics import Metric, TrainingMetrics

BY_SAMPLES = " vs samples"


class GPTLogger:
    """Takes every step and every validation; speaks on rank 0 alone.

    Times are of steps only: call `restart_clock` after a validation or a save. It is a context manager, for a whole
    run.

    Args:
        arguments: intervals, folder of events, file of metrics.
        batch: samples of a step.
        iteration, consumed: steps done before, and their samples, where the run goes on. What
            TensorBoard shows of later ones, which a run that was killed had not saved, goes.
    """

    def __init__(self, arguments: GPTArguments, batch: int, iteration: int = 0, consumed: int = 0):
        self.arguments, self.batch = arguments, batch
        self._root = parallel_state.is_global_rank_zero()
        self._writer = self._metrics = None
        if self._root and arguments.tensorboard_dir:
            self._writer = _continued(arguments.tensorboard_dir, iteration, consumed)
        if self._root and arguments.metrics_file:
            self._metrics = TrainingMetrics(arguments.metrics_file)
            self._metrics.store_parameters(vars(arguments))
        self._began = time.perf_counter()
        self._seconds: list[float] = []  # of each step of this run
        self._losses: list[float] = []
        self._line = 0  # steps that the lines so far cover
        self._consumed = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def log(self, step: Step, consumed: int) -> None:
        """A step as `train` reports it, and the samples that it and all before it were given."""
        now = time.perf_counter()
        self._seconds.append(now - self._clock)
        self._losses.append(step.loss)
        self._clock, self._consumed = now, consumed
        if not self._root:
            return
        if step.step % self.arguments.log_interval == 0:
            self._print(step)
        if self._writer and step.step % self.arguments.tensorboard_log_interval == 0:
            norm = {} if step.grad_norm is None else {"grad-norm": step.grad_norm}
            self._scalars(
                step.step,
                {
                    "learning-rate": step.learning_rate,
                    "batch-size": self.batch,
                    "lm loss": step.loss,
                    "throughput": self.batch / self._seconds[-1],
                    **norm,
                },
            )
            self._writer.add_scalar("iteration-time", self._seconds[-1], step.step)

    def _print(self, step: Step) -> None:
        """The line of this step; loss and time are means over the steps since the last line."""
        covered = slice(self._line, None)
        seconds, loss = fmean(self._seconds[covered]), fmean(self._losses[covered])
        self._line = len(self._seconds)
        norm = "" if step.grad_norm is None else f" grad norm: {step.grad_norm:.3f} |"
        print(
            f" iteration {step.step:8d}/{self.arguments.train_iters:8d} |"
            f" consumed samples: {self._consumed:12d} |"
            f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
            f" learning rate: {step.learning_rate:.3E} |"
            f" global batch size: {self.batch:5d} |"
            f" lm loss: {loss:.6E} |{norm}"
            f" throughput: {self.batch / seconds:.3f} |",
            flush=True,
        )

    def log_validation(self, iteration: int, loss: float) -> None:
        """The loss of a validation after so many steps, and its perplexity."""
        if not self._root:
            return
        print(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |"
            f" lm loss PPL: {perplexity(loss):.6E} |",
            flush=True,
        )
        if self._writer:
            scalars = {"lm loss validation": loss, "lm loss validation ppl": perplexity(loss)}
            self._scalars(iteration, scalars)
        if self._metrics:
            self._metrics.store_metrics(
                [Metric("Validation loss", loss, "", {"Global step": iteration})]
            )

    def flush(self) -> None:
        """Writes events to the file, so that a run that goes on from here finds all of them."""
        if self._writer:
            self._writer.flush()

    def _scalars(self, iteration: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            self._writer.add_scalar(name + BY_SAMPLES, value, self._consumed)

    def __enter__(self) -> "GPTLogger":
        return self

    def __exit__(self, kind, *_) -> None:
        """Writes out what is held back, and of a run that did not break what was seen over all of it."""
        if self._writer:
            self._writer.close()
        if self._metrics and self._losses and kind is None:
            speeds = [self.batch / seconds for seconds in self._seconds]
            self._metrics.store_metrics(
                [
                    Metric("Final loss", self._losses[-1]),
                    Metric("Time to train", (time.perf_counter() - self._began) / 60, "minutes"),
                    Metric("Average throughput", fmean(speeds), "seq/s"),
                    Metric("Peak throughput", max(speeds), "seq/s"),
                ]
            )


def _continued(folder: str, iteration: int, consumed: int) -> SummaryWriter:
    """A writer of events into `folder` after which TensorBoard shows no step twice.

    `purge_step` hides earlier events by their step. Of the scalars by samples it would hide those
    of the steps that count, so these are written again.
    """
    shown = EventAccumulator(folder, {"scalars": 0}).Reload() if Path(folder).is_dir() else None
    writer = SummaryWriter(folder, purge_step=iteration + 1)
    for name in [] if shown is None else shown.Tags()["scalars"]:
        if name.endswith(BY_SAMPLES):
            for event in shown.Scalars(name):
                if event.step <= consumed:
                    writer.add_scalar(name, event.value, event.step, event.wall_time)
    return writer


def perplexity(loss: float) -> float:
    """e to the loss; Megatron-LM's bound keeps a diverged run's a number."""
    return math.exp(min(20.0, loss))
