"""Work that is shared among processes, and what becomes of it when one of them is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

_SWITCH = "TOKENIZERS_PARALLELISM"
AHEAD = 3  # jobs for each worker that may be finished or under way

Job, Result = TypeVar("Job"), TypeVar("Result")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Inside the block a tokenizer starts no threads: one worker would take all cores."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def in_order(
    function: Callable[[Job], Result], jobs: Iterable[Job], workers: int
) -> Iterator[Result]:
    """`function` of each job, in the order of the jobs, with a few of them taken ahead.

    With one worker this process does the work. Otherwise worker processes do, which end when the
    iterator is left and when this process is killed.

    Args:
        function: at the top level of a module; what it has to know travels with each job.
        jobs: small enough to be sent to another process.
        workers: processes.
    """
    if workers == 1:
        for job in jobs:
            with one_core():
                result = function(job)
            yield result
        return
    # Spawned, not forked: a notebook's kernel runs threads.
    context = get_context("spawn")
    alive, end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (alive,))
    results = deque()
    try:
        for job in jobs:
            results.append(pool.submit(function, job))
            if len(results) == AHEAD * workers:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:
        end.close()
        pool.shutdown(cancel_futures=True)
        alive.close()


def _start_worker(alive: Connection) -> None:
    """Ends this process when nothing can be written to the pipe `alive` any more."""

    def watch() -> None:
        with contextlib.suppress(EOFError):
            alive.recv_bytes()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process gets it too, and ends us
    os.environ[_SWITCH] = "false"
    threading.Thread(target=watch, daemon=True).start()


def exit_on_signals() -> None:
    """For a command: signals that end it raise SystemExit, so that nothing half-done is left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def removed_afterwards(*paths: Path) -> Iterator[None]:
    """Removes files and folders when the block is left, and also when this process is killed.

    A shell waits for the end of the block: for a line, or for the end of the process. In that case
    workers may still write for a moment.
    """
    script = 'read -r line || sleep 2; rm -rf -- "$@"'
    shell = ["sh", "-c", script, "sh", *map(os.path.abspath, paths)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(shell, **pipes, start_new_session=True) as remover:
        try:
            yield
        finally:
            remover.communicate(b"\n")
