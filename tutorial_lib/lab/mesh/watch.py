"""Waits for a task on several ranks until each has ended, one way or another.

A rank may be beyond the reach of a message: stuck in a collective that a peer never enters. So
there is a second way to it, through a store that a thread of the rank listens to
(`tutorial_lib.lab.mesh.engine`): to ask where it is, and to cut it loose.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta

import ipyparallel as ipp
from torch.distributed import TCPStore

# Seconds that ranks get to end by themselves once another has failed, and again after each stronger measure.
GRACE = 3.0
TICK = 0.05  # seconds between looks at the ranks
PATIENCE = 2.0  # seconds that a rank gets to answer


class Rendezvous:
    """The two stores that the kernel serves to one process group: one to find each other, one to talk to the kernel.

    Their ports are bound here before a rank hears of them, so no port can be taken by somebody else in between.
    """

    def __init__(self, address: str, places: list[dict]):
        self._places = places
        self._stores = [
            TCPStore(address, 0, is_master=True, wait_for_workers=False) for _ in range(2)
        ]
        for store in self._stores:
            store.set_timeout(timedelta(seconds=PATIENCE))
        self.port, self.control_port = (store.port for store in self._stores)
        self._asked = [0] * len(places)

    def close_meeting(self) -> None:
        """Closes the store of the process group; ranks that wait there for a peer raise."""
        self._stores[0] = None

    def ask(self, do: str, ranks: list[int]) -> dict[int, object]:
        """The answers of those ranks that do answer; see `tutorial_lib.lab.mesh.engine` for what can be asked."""
        control = self._stores[1]
        keys = {}
        for rank in ranks:
            keys[rank] = f"mesh/{self._asked[rank]}/{rank}"
            self._asked[rank] += 1
            control.set(keys[rank], json.dumps({"do": do, "places": self._places}))
        answers = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < len(keys) and time.monotonic() < deadline:
            for rank in keys.keys() - answers.keys():
                if control.check([f"{keys[rank]}/answer"]):
                    answers[rank] = json.loads(control.get(f"{keys[rank]}/answer"))
            time.sleep(0.01)
        return answers


class Watch:
    """One task on several ranks.

    Args:
        tasks: the result to come, by rank.
        processes: the process of each rank, by rank: `LocalProcess` or `SlurmProcess`.
        rendezvous: of the process group that is up, or None.
        timeout: seconds that a collective waits for its peers.

    Attributes:
        reports: after `wait`, what went wrong, by rank: as `tutorial_lib.lab.mesh.engine.report` has it.
        dead: ranks whose process is gone.
        released: whether connections had to be cut.
    """

    def __init__(
        self,
        tasks: dict[int, ipp.AsyncResult],
        processes: list,
        rendezvous: Rendezvous | None,
        timeout: float,
    ):
        self._tasks, self._processes, self._rendezvous, self._timeout = (
            tasks,
            processes,
            rendezvous,
            timeout,
        )
        self.reports: dict[int, dict] = {}
        self.dead: set[int] = set()
        self.released = False

    def wait(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Returns when no rank is busy with its task any more. An interrupt ends the task on all
        ranks, then is raised.
        """
        failed_at = None
        try:
            while pending := self._pending():
                self._tasks[pending[0]].wait(TICK)
                on_tick()
                if failed_at is None and any(self._failed(rank) for rank in self._tasks):
                    failed_at = time.monotonic()
                if (failed_at and time.monotonic() - failed_at > GRACE) or self._is_stuck(pending):
                    self._release(("cut", "interrupt"))
        except KeyboardInterrupt:
            self._release(("interrupt", "cut"))
            raise
        finally:
            self.reports |= {
                rank: r
                for rank in self._tasks
                if rank not in self.reports and (r := self._report(rank))
            }

    def in_step(self, world_size: int) -> bool:
        """Whether the ranks can go on together: all failed, at the same line and none while it waited for another.

        If only some failed, or at different places, one may have sent what another has not received.
        """
        places = {
            (r["error"].partition(":")[0], r["line"], r["waited_in"]) for r in self.reports.values()
        }
        return not self.reports or (
            len(self.reports) == world_size and len(places) == 1 and places.pop()[2] is None
        )

    def _pending(self) -> list[int]:
        for rank in self._tasks.keys() - self.dead:
            if not self._processes[rank].is_alive():
                self.dead.add(rank)
        return [
            rank for rank, task in self._tasks.items() if rank not in self.dead and not task.ready()
        ]

    def _failed(self, rank: int) -> bool:
        task = self._tasks[rank]
        return rank in self.dead or (task.ready() and not task.successful())

    _stuck_since = _asked_at = None

    def _is_stuck(self, pending: list[int]) -> bool:
        """Whether all that are still busy have been inside collectives for too long while a peer has left the cell.

        Collectives of the host have a time-out of their own; this is for those of a device.
        """
        now = time.monotonic()
        if (
            self._rendezvous is None
            or len(pending) == len(self._tasks)
            or now - (self._asked_at or 0) < PATIENCE
        ):
            return False
        self._asked_at = now
        places = self._rendezvous.ask("where", pending)
        if not all(rank in places and places[rank]["waited_in"] for rank in pending):
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or now
        return now - self._stuck_since > self._timeout + GRACE

    def _release(self, measures: tuple[str, ...]) -> None:
        """Ends the task on all ranks: the connections between them are cut, then they are interrupted, then killed."""
        if not (pending := self._pending()):
            return
        self.released = True
        if self._rendezvous is not None:
            places = self._rendezvous.ask("where", pending)
            for measure in measures:
                alive = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
                if measure == "cut":
                    self._rendezvous.close_meeting()
                self._rendezvous.ask(measure, alive if measure == "cut" else pending)
                if not (pending := self._settle()):
                    break
            self.reports |= {
                rank: place
                for rank, place in places.items()
                if place["waited_in"] or rank in pending
            }
        for rank in pending:
            self._processes[rank].kill()
        self._settle()

    def _settle(self) -> list[int]:
        deadline = time.monotonic() + GRACE
        while (pending := self._pending()) and time.monotonic() < deadline:
            self._tasks[pending[0]].wait(TICK)
        return pending

    def _report(self, rank: int) -> dict | None:
        # What a rank raised before it died says more than its death: cutting connections may have killed it.
        dead = rank in self.dead
        if not dead or self._tasks[rank].ready():
            try:
                self._tasks[rank].get(timeout=PATIENCE)
            except ipp.error.RemoteError as error:
                try:
                    return json.loads(error.traceback)
                except ValueError:  # raised by IPython itself, such as for an unknown magic, and so without a traceback
                    if not dead:
                        return _without_place(f"{error.ename}: {error.evalue}")
        return _without_place(self._processes[rank].cause_of_death()) if dead else None


def _without_place(error: str) -> dict:
    return {"error": error, "frames": [], "line": None, "waited_in": None}
