"""Saving while training goes on, in a thread of each rank. The threads meet in a process group of
their own, for they must not share collectives with training.
"""

import atexit
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from ..parallel_layers import comm, parallel_state

PATIENCE = timedelta(hours=1)  # how long one thread may write while the others wait for it
_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_pending: tuple[Future, dist.ProcessGroup] | None = None


class PeerFailed(RuntimeError):
    """This rank's share was given up because of another's, which raises the error itself."""


def start(work: Callable[[Callable], None]) -> None:
    """Calls `work(gather)` in the thread of each rank, where `gather(function)` calls a function on
    every rank and gives what it returned on each; if it fails on one, all raise. Every rank calls
    it.
    """
    global _pending
    group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def gather(function: Callable) -> list:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:  # raised again below
            error = caught
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (result, error is not None), group=group)
        if error is not None:
            raise error
        if any(failed for _, failed in found):
            raise PeerFailed("another rank could not write its share of a checkpoint")
        return [result for result, _ in found]

    _pending = _executor.submit(work, gather), group


def finalize_checkpoint() -> None:
    """Waits for the asynchronous save under way, if there is one. Every rank calls it.

    Raises:
        Exception: what went wrong with that save on any rank, on all.
    """
    global _pending
    if _pending is None:
        return
    (future, group), _pending = _pending, None
    error = future.exception()
    dist.destroy_process_group(group)
    own = None if isinstance(error, PeerFailed) else error
    comm.raise_on_all(own, parallel_state.get_world_group())


@atexit.register
def _at_exit() -> None:
    if _pending is not None:
        _pending[0].result()  # shows an error that nobody has seen
