"""What a run logs, on rank 0: lines on standard output, TensorBoard's scalars and `results.json`,
under the names of the tutorials' scripts.
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
from .metrics import Metric, TrainingMetrics

BY_SAMPLES = " vs samples"


class Logger:
    """Step loss, learning rate, throughput and gradient norm.

    Args:
        log_dir: folder of the TensorBoard events; None writes none.
        print_every, write_every: steps from one line to the next (0: none), and from one point in
            TensorBoard to the next.
        done, samples: steps done before and their samples, where a run goes on. What TensorBoard
            shows of later ones, which a run that was killed had not saved, goes.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        print_every: int = 1,
        *,
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
        if self._print_every and step.step % self._print_every == 0:
            print(self._line(self._not_printed), flush=True)
            self._not_printed = []
        if self._writer and step.step % self._write_every == 0:
            self._write(step, self._scalars(step))

    def _line(self, steps: list[Step]) -> str:
        """The line of the last of these steps, all since the line before."""
        step = steps[-1]
        norm = "" if step.grad_norm is None else f" grad-norm : {step.grad_norm:.4f}"
        return (
            f"LOG {time.asctime()} - ({step.epoch}, {step.step}) step_loss : {step.loss:.4f} "
            f"learning_rate : {step.learning_rate:.2e} throughput : {step.throughput:.2f} seq/s"
            f"{norm}"
        )

    def _scalars(self, step: Step) -> dict[str, float]:
        scalars = {
            "step loss": step.loss,
            "learning rate": step.learning_rate,
            "throughput": step.throughput,
        }
        return scalars | ({} if step.grad_norm is None else {"grad-norm": step.grad_norm})

    def _write(self, step: Step, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
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
    """Megatron-LM's line and scalars, validations, and the sum of a run in `results.json`.

    Args:
        arguments: intervals, folder of events, file of metrics.
        batch: samples of a step.
        done, samples: see `Logger`.
    """

    def __init__(self, arguments: GPTArguments, batch: int, done: int = 0, samples: int = 0):
        super().__init__(
            arguments.tensorboard_dir,
            arguments.log_interval,
            write_every=arguments.tensorboard_log_interval,
            done=done,
            samples=samples,
        )
        self.arguments, self.batch = arguments, batch
        self._began, self._steps = time.perf_counter(), []
        self._metrics = None
        if self._root and arguments.metrics_file:
            self._metrics = TrainingMetrics(arguments.metrics_file)
            self._metrics.store_parameters(vars(arguments))

    def log(self, step: Step) -> None:
        self._steps.append(step)
        super().log(step)

    def _line(self, steps: list[Step]) -> str:
        """Loss and time are means over the steps."""
        step, seconds = steps[-1], fmean(step.seconds for step in steps)
        norm = "" if step.grad_norm is None else f" grad norm: {step.grad_norm:.3f} |"
        return (
            f" iteration {step.step:8d}/{self.arguments.train_iters:8d} |"
            f" consumed samples: {step.samples:12d} |"
            f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
            f" learning rate: {step.learning_rate:.3E} |"
            f" global batch size: {self.batch:5d} |"
            f" lm loss: {fmean(step.loss for step in steps):.6E} |{norm}"
            f" throughput: {self.batch / seconds:.3f} |"
        )

    def _scalars(self, step: Step) -> dict[str, float]:
        scalars = {
            "learning-rate": step.learning_rate,
            "batch-size": self.batch,
            "lm loss": step.loss,
            "throughput": self.batch / step.seconds,
            "iteration-time": step.seconds,
        }
        return scalars | ({} if step.grad_norm is None else {"grad-norm": step.grad_norm})

    def _write(self, step: Step, scalars: dict[str, float]) -> None:
        super()._write(step, scalars)
        for name, value in scalars.items():
            if name != "iteration-time":
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
        if self._writer:
            scalars = {"lm loss validation": loss, "lm loss validation ppl": perplexity}
            self._write(step, scalars)
        if self._metrics:
            where = {"Global step": step.step}
            self._metrics.store_metrics([Metric("Validation loss", loss, "", where)])

    def finish(self) -> None:
        """Stores what was seen over all of a run."""
        if not self._metrics or not self._steps:
            return
        speeds = [self.batch / step.seconds for step in self._steps]
        minutes = (time.perf_counter() - self._began) / 60
        self._metrics.store_metrics(
            [
                Metric("Final loss", self._steps[-1].loss),
                Metric("Time to train", minutes, "minutes"),
                Metric("Average throughput", fmean(speeds), "seq/s"),
                Metric("Peak throughput", max(speeds), "seq/s"),
            ]
        )


def read_events(folder: str) -> EventAccumulator:
    """The events of a folder as TensorBoard shows them, without those that a resumed run hides."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each that is hidden
    return EventAccumulator(folder, {"scalars": 0}).Reload()


def _writer(folder: str, done: int, samples: int) -> SummaryWriter:
    """A writer of events into `folder` after which TensorBoard shows no step twice.

    `purge_step` hides events from that step on. Of the scalars by samples it would hide those
    of the steps that count, so these are written again.
    """
    shown = read_events(folder) if Path(folder).is_dir() else None
    writer = SummaryWriter(folder, purge_step=done + 1)
    for name in [] if shown is None else shown.Tags()["scalars"]:
        if name.endswith(BY_SAMPLES):
            for event in shown.Scalars(name):
                if done < event.step <= samples:
                    writer.add_scalar(name, event.value, event.step, event.wall_time)
    return writer
