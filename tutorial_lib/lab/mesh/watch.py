"""Waits for a task on several ranks until each has ended, one way or another: the one place where
the kernel waits.

A rank may be beyond the reach of a message: stuck in a collective that a peer never enters,
stopped, or inside a call that does not let go of Python's interpreter lock. So ranks that go on
after another has failed are asked where they are, cut loose, interrupted and killed at last, in
this order; each measure has a time-out.
"""

import signal
import threading
import time
from collections.abc import Callable

from tutorial_lib.lab.mesh.ranks import PATIENCE, Ranks, Task

# Seconds that ranks get to end by themselves once another has failed, and again after each stronger
# measure.
GRACE = 3.0
TICK = 0.05  # seconds between looks at the ranks
LOCKED = "a call that does not let go of Python's interpreter lock"


class Interrupts:
    """`with Interrupts() as interrupts:` SIGINT is counted meanwhile, not raised: no message is
    left half read.
    """

    def __enter__(self) -> "Interrupts":
        self.count = 0
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_) -> None:
        self.count += 1


class Watch:
    """One task on several ranks.

    Args:
        ranks: all of them.
        tasks: what some of them run, by rank.
        timeout: seconds that a collective waits for its peers.

    Attributes:
        reports: after `wait`, what went wrong, by rank: as `tutorial_lib.lab.mesh.worker.report`
            has it.
        dead: ranks whose process is gone.
        released: whether connections had to be cut.
        interrupted: whether the reader ended the task.
    """

    def __init__(self, ranks: Ranks, tasks: dict[int, Task], timeout: float):
        self._ranks, self._tasks, self._timeout = ranks, tasks, timeout
        self.reports: dict[int, dict] = {}
        self.dead: set[int] = set()
        self.released = self.interrupted = False
        self._stopped_since: dict[int, float] = {}
        self._stuck_since: float | None = None
        self._asked_at = 0.0

    def wait(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Returns when no rank is busy with its task any more. An interrupt ends the task on all
        ranks.
        """
        failed_at = None
        with Interrupts() as interrupts:
            while pending := self._pending():
                self._ranks.pump(TICK)
                on_tick()
                if interrupts.count:
                    self.interrupted = True
                    self._release(("interrupt", "cut"))
                    break
                if failed_at is None and any(self._failed(rank) for rank in self._tasks):
                    failed_at = time.monotonic()
                late = failed_at is not None and time.monotonic() - failed_at > GRACE
                if late or self._is_stuck(pending):
                    self._release(("cut", "interrupt"))
                    break
            for rank in self._tasks.keys() - self.reports.keys():
                if found := self._report(rank):
                    self.reports[rank] = found

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
        self.dead |= {rank for rank in self._tasks if not self._ranks.members[rank].is_alive}
        return [
            rank for rank, task in self._tasks.items() if rank not in self.dead and not task.ended
        ]

    def _failed(self, rank: int) -> bool:
        if self._ranks.members[rank].status != "stopped":
            self._stopped_since.pop(rank, None)
        else:
            since = self._stopped_since.setdefault(rank, time.monotonic())
            if time.monotonic() - since > GRACE:
                return True
        return rank in self.dead or self._tasks[rank].report is not None

    def _is_stuck(self, pending: list[int]) -> bool:
        """Whether all that are still busy have been inside collectives for too long while a peer
        has left the cell.

        Collectives of the host have a time-out of their own; this is for those of a device.
        """
        now = time.monotonic()
        if len(pending) == len(self._tasks) or now - self._asked_at < PATIENCE:
            return False
        self._asked_at = now
        places = self._ranks.ask("where", pending)
        if not all(rank in places and places[rank]["waited_in"] for rank in pending):
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or now
        return now - self._stuck_since > self._timeout + GRACE

    def _release(self, measures: tuple[str, ...]) -> None:
        """Ends the task on all ranks: the connections between them are cut, then they are
        interrupted, then killed.
        """
        self.released = True
        pending = self._pending()
        places = self._ranks.ask("where", pending)
        mute = [rank for rank in pending if rank not in places]
        for rank in mute:
            self.reports[rank] = self._mute(rank)
        everyone = [one.place for one in self._ranks.members]
        details = {"places": everyone, "kernel_address": self._ranks.address}
        for measure in measures:
            alive = [rank for rank, one in enumerate(self._ranks.members) if one.is_alive]
            reached = alive if measure == "cut" else pending
            if measure == "cut":
                self._ranks.store = None  # whoever waits there for a peer is told at once
            self._ranks.ask(measure, [rank for rank in reached if rank not in mute], **details)
            deadline = time.monotonic() + GRACE
            while (pending := self._pending()) and time.monotonic() < deadline:
                self._ranks.pump(TICK)
            if not pending:
                break
        # What such a rank raises now the release has brought about: where it was says more.
        self.reports |= places
        for rank in pending:
            self._ranks.kill(rank)
        deadline = time.monotonic() + GRACE
        while self._pending() and time.monotonic() < deadline:
            self._ranks.pump(TICK)
        self.dead |= set(pending)

    def _mute(self, rank: int) -> dict:
        """What is known of a rank that does not answer."""
        if self._ranks.members[rank].status == "stopped":
            return _without_place("the process was stopped (SIGSTOP), and is ended")
        return _without_place(None) | {"line": LOCKED}

    def _report(self, rank: int) -> dict | None:
        # What a rank raised before it died says more than its death: cutting connections may have
        # killed it.
        if (report := self._tasks[rank].report) is not None:
            return report
        return _without_place(self._ranks.cause_of_death(rank)) if rank in self.dead else None


def _without_place(error: str | None) -> dict:
    return {"error": error, "frames": [], "line": None, "waited_in": None, "tensor": None}
