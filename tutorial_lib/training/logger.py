"""What rank 0 says of each step: a line on standard output and TensorBoard scalars, named as in the
tutorials' scripts.
"""

import time

from torch.utils.tensorboard import SummaryWriter

from tutorial_lib.parallel_layers import parallel_state

from .loop import Step


class Logger:
    """Step loss, learning rate, throughput and gradient norm, on rank 0 alone.

    Args:
        log_dir: folder of the TensorBoard events; None writes none.
        print_every: steps from one line to the next; 0 prints none. TensorBoard gets every step.
    """

    def __init__(self, log_dir: str | None = None, print_every: int = 1):
        self._root = parallel_state.is_global_rank_zero()
        self._print_every = print_every
        self._writer = SummaryWriter(log_dir) if log_dir and self._root else None

    def log(self, step: Step) -> None:
        """Takes a step as `train` reports it."""
        if self._root and self._print_every and step.step % self._print_every == 0:
            norm = "" if step.grad_norm is None else f" grad-norm : {step.grad_norm:.4f}"
            print(
                f"LOG {time.asctime()} - ({step.epoch}, {step.step}) step_loss : {step.loss:.4f} learning_rate : "
                f"{step.learning_rate:.2e} throughput : {step.throughput:.2f} seq/s{norm}",
                flush=True,
            )
        if self._writer is not None:
            scalars = {
                "step loss": step.loss,
                "learning rate": step.learning_rate,
                "throughput": step.throughput,
            }
            if step.grad_norm is not None:
                scalars["grad-norm"] = step.grad_norm
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step.step)

    def close(self) -> None:
        """Writes out what is still held back."""
        if self._writer is not None:
            self._writer.close()
