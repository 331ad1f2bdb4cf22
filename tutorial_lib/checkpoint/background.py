"""Saving while training goes on, in a thread of each rank. The threads meet in a process group of
their own, for they must not share collectives with training.
"""

import atexit
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ..parallel_layers import parallel_state

PATIENCE = timedelta(hours=1)  # how long one thread may write while the others wait for it
_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_pending: tuple[Future, dist.ProcessGroup] | None = None


def start(work: Callable) -> None:
    """Calls `work(group)` in a thread of each rank, with a group for `parallel_layers.ranks`. Every
    rank calls it; if `work` fails on one, it has to fail on all.
    """
    global _pending
    world = parallel_state.axis_of(parallel_state.get_world_group())
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    _pending = _executor.submit(work, replace(world, group=group)), group


def finalize_checkpoint() -> None:
    """Waits for the asynchronous save under way, if there is one. Every rank calls it.

    Raises:
        Exception: what went wrong with that save on any rank, on all.
    """
    global _pending
    if _pending is not None:
        (future, group), _pending = _pending, None
        try:
            future.result()
        finally:
            dist.destroy_process_group(group)


@atexit.register
def _at_exit() -> None:
    if _pending is not None:
        _pending[0].result()  # shows an error that nobody has seen
