"""What rank 0 says of each step: a line on standard output and TensorBoard scalars, named as in the tutorials' scripts."""

import time

from torch.utils.tensorboard import SummaryWriter

from tutorial_lib.parallel_layers import parallel_state


class Logger:
    """Step loss, learning rate, throughput and gradient norm, on rank 0 alone.

    Args:
        log_dir: folder of the TensorBoard events; None writes none.
        print_line: print the line of each step.
    """

    def __init__(self, log_dir: str | None = None, print_line: bool = True):
        self._root = parallel_state.is_global_rank_zero()
        self._print = print_line and self._root
        self._writer = SummaryWriter(log_dir) if log_dir and self._root else None

    def log(
        self, epoch: int, step: int, step_loss: float, learning_rate: float, throughput: float, grad_norm: float | None
    ) -> None:
        """Writes one step: `step` counts optimizer steps, `throughput` is in sequences per second."""
        if self._print:
            norm = "" if grad_norm is None else f" grad-norm : {grad_norm:.4f}"
            print(
                f"LOG {time.asctime()} - ({epoch}, {step}) step_loss : {step_loss:.4f} learning_rate : "
                f"{learning_rate:.2e} throughput : {throughput:.2f} seq/s{norm}",
                flush=True,
            )
        if self._writer is not None:
            scalars = {"step loss": step_loss, "learning rate": learning_rate, "throughput": throughput}
            if grad_norm is not None:
                scalars["grad-norm"] = grad_norm
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes what is written."""
        if self._writer is not None:
            self._writer.close()
