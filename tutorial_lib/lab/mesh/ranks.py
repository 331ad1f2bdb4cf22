"""The kernel's end of the ranks: a connection to each, what comes in on it, and the process behind
it.

A rank has two connections. One carries a task at a time and what it prints; the other leads to a
thread of the rank
that answers while the task is stuck. On the kernel's own machine they are pairs of sockets that the
ranks inherit: no other process can reach them, and there is no port. Nothing here waits for a rank
without a limit.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import psutil

from tutorial_lib.backends import on_trainium
from tutorial_lib.lab.mesh import nursery
from tutorial_lib.lab.mesh.failures import MeshError
from tutorial_lib.network import loopback

START_TIMEOUT = 120.0  # seconds that all ranks together get to start
PATIENCE = 2.0  # seconds that a rank gets to answer while its task runs
STALL = 10  # seconds that a rank may leave a message half read or half sent
CLOSING = 15.0  # seconds that the nursery gets to end everything


class Task:
    """What a rank runs, and what has come of it so far.

    Attributes:
        output: what it printed, in chunks.
        displays: rich outputs, as pairs of data and metadata.
        ended: whether it has ended.
        value: its pickled result.
        report: what went wrong, as `tutorial_lib.lab.mesh.worker.report` has it, or None.
    """

    def __init__(self):
        self.output: list[str] = []
        self.displays: list[tuple[dict, dict]] = []
        self.ended = False
        self.value, self.report = b"", None

    def take(self, kind: str, content) -> None:
        """Notes a message of the rank."""
        if kind == "output":
            self.output.append(content)
        elif kind == "display":
            self.displays.append(content)
        else:
            self.ended = True
            if kind == "failed":
                self.report = content
            else:
                self.value = content


class Rank:
    """One rank, as the kernel sees it.

    Attributes:
        place: where it runs: `node`, `host`, `address`, `pid`; None until it is up.
        task: what it runs, or ran last.
        status: `running`, `stopped` (SIGSTOP), `lost` (its connection is closed), or the exit
            status of its process.
    """

    def __init__(self, task_connection: Connection, control: Connection):
        self.connection, self.control = task_connection, control
        self.place: dict | None = None
        self.task = Task()
        self.status: str | int = "running"
        self.answer: dict | None = None
        self.lost_at = 0.0
        self._asked = 0
        for connection in (task_connection, control):
            limit(connection)

    @property
    def is_alive(self) -> bool:
        return self.status in ("running", "stopped")

    def start(self, kind: str, *content) -> Task:
        """Sends it a task: `("cell", source)` or `("call", function, *arguments)`."""
        self.task = Task()
        self._send(self.connection, pickle.dumps((kind, pickle.dumps(content))))
        return self.task

    def ask(self, do: str, **details) -> None:
        """Asks the thread of the rank that answers while its task runs; see `worker.attend`."""
        self._asked += 1
        self.answer = None
        self._send(self.control, json.dumps(details | {"do": do, "number": self._asked}).encode())

    def receive(self, connection: Connection) -> None:
        """Takes in one message."""
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):  # closed, or stuck in the middle of a message
            self.lose()
            return
        if connection is self.control:
            answer = json.loads(message)
            if answer["number"] == self._asked:
                self.answer = answer
            return
        kind, content = pickle.loads(message)
        if kind == "up":
            self.place = content
        else:
            self.task.take(kind, content)

    def _send(self, connection: Connection, message: bytes) -> None:
        try:
            connection.send_bytes(message)
        except OSError:  # closed, or not read for too long
            self.lose()

    def lose(self) -> None:
        """Its connection is closed, or of no use any more."""
        if self.is_alive:
            self.status, self.lost_at = "lost", time.monotonic()


class Ranks:
    """The ranks on the kernel's own machine, in the order of their numbers; `slurm.SlurmRanks` are
    on others.

    Everything they leave on disk is in one temporary folder. The nursery ends them and removes the
    folder when the kernel closes them, and also when it dies.

    Args:
        count: how many.
        environment: that they start with.

    Attributes:
        address: where they reach the kernel's stores.
        members: the `Rank`s.
        store: where the ranks of the present process group meet.

    Raises:
        MeshError: they did not come up; nothing is left of them.
    """

    def __init__(self, count: int, environment: dict[str, str]):
        self.address = loopback()
        self.members: list[Rank] = []
        pairs = [(socket.socketpair(), socket.socketpair()) for _ in range(count)]
        for task, control in pairs:
            self.members.append(Rank(Connection(task[0].detach()), Connection(control[0].detach())))
        theirs = [(task[1], control[1]) for task, control in pairs]
        self._open(environment, theirs)
        self._wait_until_up()

    def _open(self, environment: dict[str, str], pairs=(), folder=None, end=()) -> None:
        """Starts the nursery, and with it the ranks whose ends of the connections are given."""
        self.store, self._fault = None, ""
        self.directory = tempfile.mkdtemp(prefix="mesh-", dir=folder)
        self._news, theirs = Pipe()
        descriptors = [[end.fileno() for end in pair] for pair in pairs]
        settings = {
            "channel": theirs.fileno(),
            "ranks": descriptors,
            "fork": nursery.LINUX
            and not on_trainium(),  # the vendor's runtime may start threads with torch
            "directory": self.directory,
            "end": list(end),
        }
        inherited = [theirs.fileno(), *(number for pair in descriptors for number in pair)]
        with open(os.path.join(self.directory, "nursery.log"), "w") as log:
            try:
                self._process = subprocess.Popen(
                    nursery.python("nursery", json.dumps(settings)),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=inherited,
                    start_new_session=True,  # an interrupt is for the kernel
                )
            except OSError as error:
                shutil.rmtree(self.directory)
                raise MeshError(f"no process could be started for the ranks: {error}") from None
        for end in (theirs, *(end for pair in pairs for end in pair)):
            end.close()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while missing := [rank for rank, one in enumerate(self.members) if not one.place]:
                self.pump(0.1)
                dead = [rank for rank in missing if not self.members[rank].is_alive]
                if dead:
                    raise MeshError(self._failure(dead[0], self.cause_of_death(dead[0])))
                if time.monotonic() > deadline:
                    raise MeshError(self._failure(missing[0], f"not up in {START_TIMEOUT:.0f} s"))
        except BaseException:
            self.close()
            raise

    def _failure(self, rank: int, cause: str) -> str:
        logs = sorted(Path(self.directory).glob("*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        tail = "".join(f"\n  {line}" for line in lines[-10:])
        return (
            f"rank {rank} could not be started: "
            f"{cause}{tail and '. The last lines of its log:'}{tail}"
        )

    def pump(self, timeout: float) -> None:
        """Takes in what the ranks and the nursery have sent, and waits for it at most `timeout`
        seconds.
        """
        sources = {
            one: rank
            for rank in self.members
            if rank.is_alive
            for one in (rank.connection, rank.control)
        }
        watched = [*sources, *([] if self._news.closed else [self._news])]
        for connection in wait(watched, timeout):
            if connection is self._news:
                self._hear()
            else:
                sources[connection].receive(connection)

    def _hear(self) -> None:
        """Takes in one message of the nursery. If it has died, so have the ranks."""
        try:
            rank, status = json.loads(self._news.recv_bytes())
            if rank is None:
                self._fault = status
                return
            one = self.members[rank]
            while one.is_alive and one.connection.poll():  # what it still sent
                one.receive(one.connection)
            one.status = status
        except (EOFError, OSError):
            self._news.close()
            for one in self.members:
                one.lose()

    def ask(self, do: str, ranks: list[int], **details) -> dict[int, dict]:
        """Asks ranks something while their tasks run; the answers of those that do answer."""
        for rank in ranks:
            self.members[rank].ask(do, **details)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(
            self.members[rank].is_alive and self.members[rank].answer is None for rank in ranks
        ):
            self.pump(0.05)
        answers = {rank: self.members[rank].answer for rank in ranks}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def kill(self, rank: int) -> None:
        """Ends a rank at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.members[rank].place["pid"], signal.SIGKILL)

    def cause_of_death(self, rank: int) -> str:
        """Why the process of a rank has ended."""
        one = self.members[rank]
        deadline = time.monotonic() + PATIENCE
        while isinstance(one.status, str) and not self._news.closed and time.monotonic() < deadline:
            self.pump(0.05)
        if isinstance(one.status, str):
            return (
                f"the process that holds the ranks together is "
                f"gone{self._fault and ': '}{self._fault}"
            )
        if one.status >= 0:
            return f"the process exited with status {one.status}"
        name = signal.Signals(-one.status).name
        if -one.status == signal.SIGKILL:
            return f"the process was killed by {name}: the usual reason is that memory ran out"
        said = self._last_words(one)
        if sizes := re.search(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)", said):
            return (
                f"gloo ended the process ({name}), as {sizes[1]} bytes arrived where {sizes[2]} "
                f"were "
                "expected: the ranks gave a collective tensors of different sizes"
            )
        return f"the process was killed by {name}" + (f": {said}" if said else "")

    def _last_words(self, one: Rank) -> str:
        """What C++ printed when it gave up, if it did."""
        log = Path(self.directory, f"{one.place['pid']}.log") if one.place else None
        if log is None or not log.exists():
            return ""
        return "".join(re.findall(r"what\(\):\s+(.*)", log.read_text(errors="replace"))[-1:])

    def close(self) -> None:
        """Ends all of it and returns when it is gone."""
        for one in self.members:
            one.connection.close()
            one.control.close()
        self._news.close()
        try:
            self._process.wait(CLOSING)
        except subprocess.TimeoutExpired:  # it was stopped, say
            below = psutil.Process(self._process.pid).children(recursive=True)
            for process in (psutil.Process(self._process.pid), *below):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)


def limit(connection: Connection) -> None:
    """Lets a rank that does not go on with a message raise BlockingIOError here, in place of a wait
    without end.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            duplicate.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL, 0))
