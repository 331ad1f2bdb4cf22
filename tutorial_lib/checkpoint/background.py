"""Saving while training goes on: one thread a rank writes a copy, and rank 0's publishes when all
have written.

The ranks' threads must not share collectives with training. They report their progress by files in
the folder aside: `reports/rank_<r>.json` holds the digests of what rank r wrote, or its error.
"""

import atexit
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from ..parallel_layers import comm, parallel_state, ranks
from ..storage import Digest, read_json, write_text

REPORTS = "reports"
PATIENCE = 600.0  # seconds that a rank's report may be awaited after the previous one
GRACE = 10.0  # seconds that a rank may go on writing after another one has failed
_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_pending: "Save | None" = None


class PeerFailed(RuntimeError):
    """This rank's part was given up because of another's."""


class Save:
    """One save under way."""

    def __init__(
        self,
        aside: Path,
        write: Callable[[], dict[str, Digest]],
        publish: Callable[[dict[str, Digest]], None],
        wait_for: Iterable[int],
    ):
        self._aside, self._write, self._publish = aside, write, publish
        self._wait_for = list(wait_for)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._abandoned = threading.Event()
        self.future: Future = _executor.submit(self._run)

    def _run(self) -> None:
        try:
            self._await(self._wait_for)
            mine = {"files": {name: digest._asdict() for name, digest in self._write().items()}}
        except Exception as error:
            self._report({"error": f"{type(error).__name__}: {error}"})
            raise
        self._report(mine)
        if self._rank == 0:
            reports = self._await(range(self._world))
            shutil.rmtree(self._aside / REPORTS)
            files = {name: found for report in reports for name, found in report["files"].items()}
            self._publish({name: Digest(**digest) for name, digest in files.items()})

    def _report(self, report: dict) -> None:
        (self._aside / REPORTS).mkdir(exist_ok=True)
        write_text(self._aside / REPORTS / f"rank_{self._rank}.json", json.dumps(report))

    def _await(self, wanted: Iterable[int]) -> list[dict]:
        """The reports of these ranks, as soon as they are there."""
        found = []
        for rank in wanted:
            path = self._aside / REPORTS / f"rank_{rank}.json"
            deadline = time.monotonic() + PATIENCE
            while not path.exists():
                if self._abandoned.wait(0.02):
                    raise PeerFailed(f"the save to {self._aside} was given up")
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} has not written its part of {self._aside} in {PATIENCE:.0f} s"
                    )
            found.append(read_json(path))
            if "error" in found[-1]:
                raise PeerFailed(f"rank {rank}: {found[-1]['error']}")
        return found

    def wait(self) -> None:
        """Returns on every rank once all have finished; raises on all what one of them raised.

        After a failure the others get `GRACE` seconds to end what they are writing.
        """
        pause, deadline = 0.005, math.inf
        while True:
            done = self.future.done()
            failed = done and self.future.exception() is not None
            states = ranks.gather((done, failed, time.monotonic() > deadline))
            finished = all(done for done, _, _ in states)
            if finished or any(overdue for _, _, overdue in states):
                break
            if any(failed for _, failed, _ in states) and not self._abandoned.is_set():
                self._abandoned.set()
                deadline = time.monotonic() + GRACE
            time.sleep(pause := min(pause * 1.5, 0.2))
        error = self.future.exception() if states[self._rank][1] else None
        if isinstance(error, PeerFailed):  # that peer raises the error itself
            error = None
        try:
            comm.raise_on_all(error, parallel_state.get_world_group())
        except Exception:
            if self._rank == 0 and finished:  # otherwise it stays, incomplete, until the next save
                shutil.rmtree(self._aside, ignore_errors=True)
            raise


def start(save: Save) -> None:
    global _pending
    _pending = save


def finalize_checkpoint() -> None:
    """Waits for the asynchronous save under way, if there is one. Every rank calls it.

    Raises:
        Exception: what went wrong with that save on any rank, on all.
    """
    global _pending
    save, _pending = _pending, None
    if save is not None:
        save.wait()


@atexit.register
def _at_exit() -> None:
    # The thread has ended by now, without its peers' help; an error that nobody has seen is shown.
    if _pending is not None:
        _pending.future.result()
