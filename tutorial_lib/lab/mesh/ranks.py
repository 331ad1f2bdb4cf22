"""The kernel's end of the ranks: the processes, and one connection to each.

Whoever starts the processes (the nursery on this machine, a job in `slurm`) puts an address of the
kernel and a key into their environment. Each process connects, proves that it has the key, and
says where it runs. A connection carries one task at a time, what it prints, and questions that a
thread of the rank answers while the task runs. Nothing here waits for a rank without a limit.
"""

import contextlib
import json
import os
import pickle
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

import psutil

from tutorial_lib.backends import is_installed
from tutorial_lib.lab.mesh import nursery
from tutorial_lib.lab.mesh.failures import MeshError

START_TIMEOUT = 120.0  # seconds that all ranks together get to start
PATIENCE = 2.0  # seconds that a rank gets to answer while its task runs
STALL = 10  # seconds that a rank may leave a message half read or half sent
CLOSING = 15.0  # seconds that the ranks get to end


class Rank:
    """One rank, as the kernel sees it.

    Attributes:
        place: where it runs: `node`, `host`, `address` (at which other ranks reach it), `pid`.
        lost_at: when its connection was closed; None while it lives.
        answer: to the last question.
        output, displays: what the task has printed, and its rich outputs (data, metadata).
        ended, value, report: whether the task has ended, its pickled result, and what went wrong
            (`reports.report`) or None.
    """

    def __init__(self, connection: Connection, address: str):
        self.connection = connection
        self.place: dict = pickle.loads(connection.recv_bytes()) | {"address": address}
        self.lost_at: float | None = None
        self.answer: dict | None = None
        self.output, self.displays = [], []  # before its first task a process may print, too

    @property
    def is_alive(self) -> bool:
        return self.lost_at is None

    def start(self, kind: str, *content) -> None:
        """Sends it a task: `("cell", source)` or `("call", function, *arguments)`."""
        self.output: list[str] = []
        self.displays: list[tuple[dict, dict]] = []
        self.ended, self.value, self.report = False, b"", None
        self.send(kind, pickle.dumps(content))

    def send(self, kind: str, content=None) -> None:
        """Sends a message; `worker.attend` has the kinds."""
        self.answer = None
        try:
            self.connection.send_bytes(pickle.dumps((kind, content)))
        except OSError:  # closed, or not read for too long
            self.lose()

    def receive(self) -> None:
        """Takes in what it has sent."""
        try:
            messages = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # closed, or stuck in the middle of a message
            self.lose()
            return
        for kind, content in map(pickle.loads, messages):
            if kind == "output":
                self.output.append(content)
            elif kind == "display":
                self.displays.append(content)
            elif kind == "answer":
                self.answer = content
            else:
                self.ended = True
                self.value, self.report = (content, None) if kind == "done" else (b"", content)

    def lose(self) -> None:
        """Notes that the connection is closed or unusable."""
        self.lost_at = self.lost_at or time.monotonic()


class Ranks:
    """The ranks on the kernel's own machine, in the order of their numbers; `slurm.SlurmRanks` are
    on others.

    The nursery ends them when the kernel closes them, and also when it dies. They leave no files.

    Args:
        count: how many.
        environment: what they start with.
        preload: modules that their parent imports once for all of them.

    Attributes:
        address: where they reach the kernel.
        members: the `Rank`s.
        store: where the ranks of the present process group meet.

    Raises:
        MeshError: they did not come up; nothing is left of them.
    """

    address = "127.0.0.1"

    def __init__(self, count: int, environment: dict[str, str], preload: tuple[str, ...] = ()):
        self.members: list[Rank] = []
        self._preload = preload
        self.store = None
        self._exits: dict[int, tuple[int, str]] = {}  # by process: its status, what C++ printed
        self._process: subprocess.Popen | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._deadline = time.monotonic() + START_TIMEOUT
        key = secrets.token_bytes(32)
        try:
            with socket.create_server((self.address, 0), backlog=count) as server:
                meeting = f"{self.address} {server.getsockname()[1]} {key.hex()}"
                self._launch(count, environment | {nursery.MEETING: meeting})
                self._accept(server, count, key)
        except BaseException:
            self.close()
            raise
        self.members.sort(key=lambda one: [one.place[part] for part in ("node", "host", "pid")])

    def _launch(self, count: int, environment: dict[str, str]) -> None:
        # The vendor's runtime may start threads with torch, which a fork would not have.
        vendor = is_installed("libneuronxla") or is_installed("torch_neuronx")
        preload = self._preload if nursery.LINUX and not vendor else ()
        self._start(nursery.python("nursery", str(count), *preload), environment)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        """Starts the process that ends the ranks once its input can be read or is closed."""
        try:
            self._process = subprocess.Popen(
                command, env=environment, bufsize=0, start_new_session=True,  # Ctrl-C: the kernel's
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            )  # fmt: skip
        except OSError as error:
            raise MeshError(f"no process could be started for the ranks: {error}") from None

    def _accept(self, server: socket.socket, count: int, key: bytes) -> None:
        """Lets in as many processes as there are ranks, if they have the key."""
        while len(self.members) < count:
            self.pump(0)
            trouble = self._trouble()
            if not trouble and time.monotonic() > self._deadline:
                trouble = f"{count - len(self.members)} not up in {START_TIMEOUT:.0f} s"
            if trouble:
                log = "".join(f"\n  {line}" for line in self._read_log().splitlines()[-10:])
                log = log and f". The last lines of their log:{log}"
                raise MeshError(f"the {count} ranks could not be started: {trouble}{log}")
            if not select.select([server], [], [], 0.1)[0]:
                continue
            accepted, (address, _) = server.accept()
            connection = Connection(accepted.detach())
            limit(connection)
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                self.members.append(Rank(connection, address))
            except (AuthenticationError, EOFError, OSError):  # a stranger
                connection.close()

    def _trouble(self) -> str:
        """Why ranks that are not up yet never will be; empty if they may."""
        if self._process.stdout.closed:
            return "the process that starts them has ended"
        return "".join(describe_exit(*found) for found in list(self._exits.values())[:1])

    def _read_log(self) -> str:
        self._log.seek(0)
        said = (text for _, text in self._exits.values())
        return "\n".join([self._log.read().decode(errors="replace"), *said])

    def pump(self, timeout: float) -> None:
        """Takes in what has been sent, and waits for it at most `timeout` seconds."""
        sources = {one.connection: one.receive for one in self.members if one.is_alive}
        if not self._process.stdout.closed:
            sources[self._process.stdout] = self._hear
        for source in wait(list(sources), timeout):
            sources[source]()

    def _hear(self) -> None:
        """Takes in one message of the nursery. When it dies, its ranks die with it."""
        line = self._process.stdout.readline()
        if not line:
            self._process.stdout.close()
            for one in self.members:
                one.lose()
            return
        pid, *found = json.loads(line)
        self._exits[pid] = tuple(found)
        for one in self.members:
            if one.place["pid"] == pid:  # a process that it forked may hold its connection open
                while one.is_alive and one.connection.poll():
                    one.receive()
                one.lose()

    def ask_where(self, ranks: list[int]) -> dict[int, dict]:
        """What ranks run at this moment, as `reports.describe_thread` has it."""
        asked = {rank: self.members[rank] for rank in ranks}
        for one in asked.values():
            one.send("where")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(
            one.is_alive and one.answer is None for one in asked.values()
        ):
            self.pump(0.05)
        return {rank: one.answer for rank, one in asked.items() if one.answer is not None}

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has suspended the process of a rank."""
        try:
            return psutil.Process(self.members[rank].place["pid"]).status() == "stopped"
        except psutil.NoSuchProcess:
            return False

    def kill(self, rank: int) -> None:
        """Ends a rank at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.members[rank].place["pid"], signal.SIGKILL)

    def cause_of_death(self, rank: int) -> str:
        """Why the process of a rank has ended."""
        pid, deadline = self.members[rank].place["pid"], time.monotonic() + PATIENCE
        while pid not in self._exits and time.monotonic() < deadline:
            if self._process.stdout.closed:
                return "the process that holds the ranks together is gone"
            self.pump(0.05)
        return describe_exit(*self._exits.get(pid, (None, "")))

    def close(self) -> None:
        """Ends all of it and returns when it is gone."""
        for one in self.members:
            one.connection.close()
        self._log.close()
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        try:
            self._process.wait(CLOSING)
        except subprocess.TimeoutExpired:  # it was stopped, say
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def describe_exit(status: int | None, said: str) -> str:
    """Why a process ended.

    Args:
        status: its exit status, or a signal's number below 0.
        said: what it has printed outside of Python.
    """
    if status is None:
        return "the process has closed its connection"
    if status >= 0:
        return f"the process exited with status {status}"
    name = signal.Signals(-status).name
    if -status == signal.SIGKILL:
        return f"the process was killed by {name}: the usual reason is that memory ran out"
    last = "".join(re.findall(r"what\(\):\s+(.*)", said)[-1:])
    if sizes := re.search(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)", last):
        return (
            f"gloo ended the process ({name}), as {sizes[1]} bytes arrived where {sizes[2]} were "
            "expected: the ranks gave a collective tensors of different sizes"
        )
    return f"the process was killed by {name}" + (f": {last}" if last else "")


def limit(connection: Connection) -> None:
    """Reads and writes raise BlockingIOError once a rank stalls in a message for `STALL` s."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            duplicate.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL, 0))
