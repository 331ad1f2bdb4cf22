"""Sequences per second over a moving window of steps."""

import time
from collections import deque

from tutorial_lib.parallel_layers.utils import ensure_positive


class Throughput:
    """Moving average of the sequences that all data-parallel ranks train on in a second.

    Args:
        batch_size: sequences in one micro-batch of one rank.
        world_size: data-parallel size.
        grad_accum_usteps: micro-batches in a step.
        moving_avg_window_size: steps that the average is taken over.
        logging_interval: steps between two calls of `get_throughput`.

    Raises:
        ValueError: a number that is below 1.
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        grad_accum_usteps: int,
        moving_avg_window_size: int = 10,
        logging_interval: int = 1,
    ):
        ensure_positive(
            batch_size=batch_size, world_size=world_size, grad_accum_usteps=grad_accum_usteps,
            moving_avg_window_size=moving_avg_window_size, logging_interval=logging_interval,
        )  # fmt: skip
        self.seqs_per_iteration = batch_size * world_size * grad_accum_usteps * logging_interval
        self._seconds: deque[float] = deque(maxlen=-(-moving_avg_window_size // logging_interval))
        self.reset_time()

    def reset_time(self) -> None:
        """Starts the clock anew: what happened since the last call (a save, say) does not count."""
        self._start = time.perf_counter()

    def get_throughput(self) -> float:
        """Call it once an iteration: sequences per second over the window."""
        now = time.perf_counter()
        self._seconds.append(now - self._start)
        self._start = now
        return self.seqs_per_iteration * len(self._seconds) / sum(self._seconds)
