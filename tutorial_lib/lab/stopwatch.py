"""When a rank computes and when it is in a collective, by the times of its own calls.

`comm.record` lists what ranks exchange; this lists when. It wraps the functions of
`torch.distributed`, so that collectives which a notebook calls itself are seen too. Tensors have to
be on the host: a compiled graph has its collectives inside, and a GPU runs them behind the host's
back. `show.timeline` draws what all ranks recorded.
"""

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

_CALLS = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "isend", "irecv",
    "all_gather_object", "barrier",
)  # fmt: skip
ACTIVITIES = "computing", "waiting", "communicating"
COMPUTING, WAITING, COMMUNICATING = ACTIVITIES


@dataclass
class Call:
    """One call of a collective on this rank; times in seconds since 1970, as on all its peers."""

    kind: str
    ranks: tuple[int, ...]  # of the group
    begun: float
    waited: float  # when this rank had nothing else to do but wait for it
    ended: float


@dataclass
class StepTimes:
    """What one rank recorded."""

    began: float
    ended: float = 0.0
    calls: list[Call] = field(default_factory=list)


class _TimedWork:
    """A `torch.distributed` work that notes when it is waited for and when that ends."""

    def __init__(self, work, call: Call):
        self._work, self._call = work, call

    def wait(self, *args):
        self._call.waited = time.time()
        try:
            return self._work.wait(*args)
        finally:
            self._call.ended = time.time()

    def __getattr__(self, name: str):
        return getattr(self._work, name)


@contextmanager
def record_times() -> Iterator[StepTimes]:
    """Records every collective that this rank begins inside the block, and when.

    with record_times() as times:
        step()
    """
    times = StepTimes(time.time())
    originals = {name: getattr(dist, name) for name in _CALLS}
    for name, function in originals.items():
        setattr(dist, name, _timed(name, function, times.calls))
    try:
        yield times
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
        times.ended = time.time()


def _timed(kind: str, function: Callable, calls: list[Call]) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def timed(*args, **kwargs):
        group = signature.bind(*args, **kwargs).arguments.get("group") or dist.group.WORLD
        begun = time.time()
        call = Call(kind, tuple(dist.get_process_group_ranks(group)), begun, begun, begun)
        calls.append(call)
        work = function(*args, **kwargs)
        call.ended = time.time()
        return None if work is None else _TimedWork(work, call)

    return timed


def segments(recorded: Sequence[StepTimes]) -> list[list[tuple[str, float, float]]]:
    """What each rank did when: `(computing, waiting or communicating, from, to)`, in order.

    A rank that has begun a collective waits until the last rank of its group begins it too; what it
    is blocked for after that is communication. One that runs while a rank computes takes no time.

    Args:
        recorded: of each rank, in rank order.
    """
    arrived: dict[tuple, float] = {}
    for times in recorded:
        for key, call in _numbered(times.calls):
            arrived[key] = max(call.begun, arrived.get(key, 0.0))
    found = []
    for times in recorded:
        now, done = times.began, []
        for key, call in sorted(_numbered(times.calls), key=lambda item: item[1].waited):
            start = max(now, call.waited)
            everyone = min(max(arrived[key], start), max(call.ended, start))
            done += [
                (COMPUTING, now, start),
                (WAITING, start, everyone),
                (COMMUNICATING, everyone, max(call.ended, everyone)),
            ]
            now = done[-1][2]
        done.append((COMPUTING, now, times.ended))
        found.append([segment for segment in done if segment[2] > segment[1]])
    return found


def _numbered(calls: list[Call]) -> list[tuple[tuple, Call]]:
    """Each call with its group and its number among the group's calls, the same on every rank."""
    seen: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for call in calls:
        numbered.append(((call.ranks, seen[call.ranks]), call))
        seen[call.ranks] += 1
    return numbered


def shares(recorded: Sequence[StepTimes]) -> list[dict[str, float]]:
    """Seconds that each rank spent computing, waiting and communicating."""
    totals = []
    for done in segments(recorded):
        total = dict.fromkeys(ACTIVITIES, 0.0)
        for activity, start, end in done:
            total[activity] += end - start
        totals.append(total)
    return totals
