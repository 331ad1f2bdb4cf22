"""Waits for a task on several ranks until each has ended, one way or another: the one place where
the kernel waits.

A rank may be beyond the reach of a message: stuck in a collective that a peer never enters,
stopped, or inside a call that does not let go of Python's interpreter lock. So ranks that go on
after another has failed are asked where they are, released (connections cut, then interrupted), and
killed at last. On this machine all is over about 10 s after the first failure; SLURM may take a
minute to say why.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tutorial_lib.lab.mesh.ranks import Ranks
from tutorial_lib.lab.mesh.reports import without_place

LATE = 2.0  # seconds that ranks get to end by themselves once another has failed
GRACE = 3.0  # seconds that they get to end once they have been released
TICK = 0.05  # seconds between looks at the ranks
LOCKED = "a call that does not let go of Python's interpreter lock"
STOPPED = "the process was stopped (SIGSTOP), and is ended"


@contextlib.contextmanager
def counted_interrupts() -> Iterator[list]:
    """Notes SIGINT instead of raising it: no message is left half read, no release half done."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class Watch:
    """One task on several ranks.

    Args:
        ranks: all of them.
        busy: the numbers of those that were given the task.

    Attributes:
        reports: after `wait`, what went wrong, by rank (`reports.report`).
        dead: ranks whose process is gone.
        released: whether connections had to be cut.
        interrupted: whether the reader ended the task.
    """

    def __init__(self, ranks: Ranks, busy: list[int]):
        self._ranks, self._busy = ranks, busy
        self.reports: dict[int, dict] = {}
        self.dead: set[int] = set()
        self.released = self.interrupted = False
        self._stopped: set[int] = set()
        self._looked_at = 0.0

    def wait(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Returns when no rank is busy with its task any more. An interrupt ends the task on all
        ranks.
        """
        failed_at = None
        with counted_interrupts() as interrupts:
            while pending := self._pending():
                self._ranks.pump(TICK)
                on_tick()
                now = time.monotonic()
                failed = self.dead or any(self._ranks.members[r].report for r in self._busy)
                if failed_at is None and (failed or self._has_stopped(pending, now)):
                    failed_at = now
                self.interrupted = bool(interrupts)
                late = failed_at is not None and now - failed_at > LATE
                if self.interrupted or late:
                    self._release()
                    break
            for rank in self._busy:
                # What a rank raised before it died says more than its death: the release may have
                # killed it. Where it was says more than what the release made it raise.
                report = self._ranks.members[rank].report
                if report is None and rank in self.dead:
                    report = without_place(self._ranks.cause_of_death(rank))
                if report is not None:
                    self.reports.setdefault(rank, report)

    def in_step(self, world_size: int) -> bool:
        """Whether the ranks can go on together: all failed, at the same line and none while it
        waited for another.

        If only some failed, or at different places, one may have sent what another has not
        received.
        """
        places = {
            (r["error"].partition(":")[0], r["line"], r["waited_in"]) for r in self.reports.values()
        }
        return not self.reports or (
            len(self.reports) == world_size and len(places) == 1 and places.pop()[2] is None
        )

    def _pending(self) -> list[int]:
        members = self._ranks.members
        self.dead |= {rank for rank in self._busy if not members[rank].is_alive}
        return [r for r in self._busy if r not in self.dead and not members[r].ended]

    def _has_stopped(self, pending: list[int], now: float) -> bool:
        """Whether a rank was found suspended at two looks, one after the other."""
        if now - self._looked_at < GRACE:
            return False
        self._looked_at, before = now, self._stopped
        self._stopped = {rank for rank in pending if self._ranks.is_stopped(rank)}
        return bool(before & self._stopped)

    def _release(self) -> None:
        """Ends the task on all ranks; kills those that do not react."""
        self.released = True
        places = self._ranks.ask_where(self._pending())
        for rank in self._pending():
            stopped = self._ranks.is_stopped(rank)
            mute = without_place(STOPPED) if stopped else without_place(None, LOCKED)
            self.reports[rank] = places.get(rank, mute)
        self._ranks.store = None  # whoever waits there for a peer is told at once
        alive = [one for one in self._ranks.members if one.is_alive]
        for one in alive:
            one.send("release", [other.place["address"] for other in alive])
        self._let_end()
        for rank in self._pending():
            self._ranks.kill(rank)
        self._let_end()
        self.dead |= set(self._pending())

    def _let_end(self) -> None:
        deadline = time.monotonic() + GRACE
        while self._pending() and time.monotonic() < deadline:
            self._ranks.pump(TICK)
