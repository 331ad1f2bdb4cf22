"""How many cores a piece of work takes."""

import contextlib
import os
from collections.abc import Iterator

_SWITCH = "TOKENIZERS_PARALLELISM"


def available() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Inside the block a tokenizer starts no threads, which would make one worker take all cores."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
