"""Recomputation: a part of the model keeps only its inputs, and runs again when backward needs the
rest (Chen et al., 2016).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.utils.checkpoint

from .random import set_streams, streams, xla_model


def checkpoint(function: Callable, *args, **kwargs):
    """`function(*args, **kwargs)`, computed again in backward rather than kept: its inner
    activations cost no memory.

    The second run draws the random numbers of the first, from both streams;
    `torch.utils.checkpoint` by itself replays only the default one, and not XLA's. On XLA a barrier
    keeps the compiler from reusing the first run's values.
    """
    replay = _Replay()

    def run(*args):
        again = replay.running and xla_model()
        return function(*(_behind_barrier(args) if again else args), **kwargs)

    # torch keeps arguments where `SavedActivations` sees them, but looks up their device, and
    # does not know XLA's.
    block, inputs = (partial(run, *args), ()) if xla_model() else (run, args)
    return torch.utils.checkpoint.checkpoint(
        block,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), replay),
    )


class _Replay:
    """Inside the block both random streams are where they were when this object was made. It can be
    entered again: each backward through a retained graph recomputes.
    """

    def __init__(self):
        self._start, self.running = streams(), False

    def __enter__(self) -> None:
        self._before, self.running = streams(), True
        set_streams(self._start)

    def __exit__(self, *_) -> None:
        set_streams(self._before)
        self.running = False


def _behind_barrier(args: tuple) -> tuple:
    """The same values, with their origin hidden from XLA."""
    held = tuple(
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    )
    xla_model().optimization_barrier_([a for a in held if isinstance(a, torch.Tensor)])
    return held
