"""One run at a time saves into a folder."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from tutorial_lib.parallel_layers.ranks import together

LOCK = ".run.lock"
TRIES = 25  # each 0.2 seconds: what the ranks of a run that was just killed get to end


@contextmanager
def sole_run(folder: str | None) -> Iterator[None]:
    """Lets one run at a time into this block for a folder; None needs no lock.

    Every rank enters it. Rank 0 holds an operating-system lock on a file in the folder, which is
    released when rank 0 ends, however it ends, and works across nodes where the file system's
    locks do.

    Raises:
        ValueError: another run is in there; with its process and node, on every rank.
    """
    lock = together(_acquire, folder) if folder is not None else None
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _acquire(folder: str) -> TextIO | None:
    """The locked file on rank 0, None elsewhere."""
    if dist.get_rank() != 0:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = open(Path(folder) / LOCK, "a+")  # noqa: SIM115 (held while the run lasts)
    for _ in range(TRIES):
        with suppress(BlockingIOError, PermissionError):
            # Unlike flock's, this lock is not inherited by forked loader workers.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.asctime()}\n")
            lock.flush()
            return lock
        time.sleep(0.2)
    lock.seek(0)
    raise ValueError(
        f"another run saves into {folder} ({lock.read(200).strip()}): wait until it has ended, end "
        "it, or save into another folder"
    )
