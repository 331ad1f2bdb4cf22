"""What runs on a rank: a loop that takes a task from the kernel, runs it, and sends back what it
prints and returns.

A task is a cell, run by IPython, or one of the functions of this module. A thread answers the
kernel while the task is stuck, as the main thread may be inside a collective that a peer never
enters. torch is imported only after `boot` has
put the rank's environment in place, unless the nursery has done so: OpenMP and torch-xla read it
    once.
"""

import contextlib
import faulthandler
import io
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType

import psutil
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tutorial_lib.network import address_towards, loopback

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What a collective says when a peer is missing: gloo, NCCL and the store have no exception for it.
_WAITING = (
    "Connection closed by peer", "Connection reset", "Timed out waiting", "wait timeout",
    "Broken pipe", "Socket closed", "failed to recv", "could not finish its step",
    "Watchdog caught collective operation timeout",
)  # fmt: skip
MAX_FRAMES = 12  # lines of a traceback that a reader is shown
MAX_OUTPUT = 1_000_000  # characters of a cell that a reader is shown
FLUSH = 0.2  # seconds that output may be held back
_shell = None


# ---- the loop ----


class Outbox:
    """The rank's end of the connection to the kernel, which also collects what is printed.

    A message is never interrupted half-way: SIGINT is held back meanwhile. Between tasks it has no
    effect.
    """

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.RLock()
        self._text: list[str] = []
        self._sent_at = 0.0
        self._sender: int | None = None
        self._interrupted = self.interruptible = False
        self.begin()

    def begin(self) -> None:
        """A task begins: its output is counted from here."""
        self._lines = self._line = self._left_out = 0

    def write(self, text: str) -> None:
        """Adds to the output, of which `MAX_OUTPUT` characters are sent. A line that is overwritten
        counts once.
        """
        if self._lines >= MAX_OUTPUT:
            self._left_out += len(text)
            return
        kept = text[:MAX_OUTPUT] if self._line < MAX_OUTPUT else ""
        self._text.append(kept)
        self._left_out += len(text) - len(kept)
        head, newline, rest = text.rpartition("\n")
        if newline:
            self._lines += self._line + len(head)
            self._line = 0
        self._line = len(rest.rpartition("\r")[2]) + (0 if "\r" in rest else self._line)
        if time.monotonic() - self._sent_at > FLUSH:
            self.flush()

    def flush(self) -> None:
        """Sends what was printed."""
        if (
            self._text and self._sender != threading.get_ident()
        ):  # a finalizer prints while a message is sent
            self.send("output")

    def end(self, kind: str, content) -> None:
        """A task has ended, with this result."""
        if self._left_out:
            self._text.append(f"\n… {self._left_out} more characters are not shown\n")
        self.flush()
        self.send(kind, content)

    def send(self, kind: str, content=None) -> None:
        """Sends a message; with kind `output`, the text that was held back."""
        with self._lock:
            self._sender = threading.get_ident()
            try:
                if kind == "output":
                    self._text, text = [], self._text
                    content, self._sent_at = "".join(text), time.monotonic()
                self._connection.send_bytes(pickle.dumps((kind, content)))
            finally:
                self._sender = None
        if self._interrupted and threading.current_thread() is threading.main_thread():
            self._interrupted = False
            raise KeyboardInterrupt

    def on_sigint(self, *_) -> None:
        """The handler of SIGINT, which runs in the main thread."""
        if self._sender == threading.main_thread().ident:
            self._interrupted = self.interruptible
        elif self.interruptible:
            raise KeyboardInterrupt


class Stream(io.TextIOBase):
    """`sys.stdout` and `sys.stderr` of a rank. In processes that it forks they are the file that
    C++ prints to.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(self, outbox: Outbox, descriptor: int):
        self._outbox, self._descriptor, self._pid = outbox, descriptor, os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() == self._pid:
            self._outbox.write(text)
        else:
            os.write(self._descriptor, text.encode(errors="replace"))
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True


def main(task: str, control: str, directory: str) -> None:
    """Serves the kernel on these descriptors until it closes them."""
    serve(Connection(int(task)), Connection(int(control)), directory)


def serve(tasks: Connection, control: Connection, directory: str) -> None:
    """Runs what the kernel sends until it closes the connection. Files of the rank are in
    `directory`.
    """
    global _shell
    log = os.open(f"{directory}/{os.getpid()}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):  # what C++ and other processes print
        os.dup2(log, descriptor)
    outbox = Outbox(tasks)
    sys.stdout, sys.stderr = Stream(outbox, 1), Stream(outbox, 2)
    faulthandler.enable(log)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forked ranks would all draw the same numbers
    _shell = _make_shell(outbox, directory)
    threading.Thread(target=_attend, args=(control, outbox), daemon=True).start()
    outbox.send("up", _whoami(tasks))
    with contextlib.suppress(EOFError, OSError):  # the kernel closed the connection, or is gone
        while True:
            kind, content = pickle.loads(tasks.recv_bytes())
            signal.signal(signal.SIGINT, outbox.on_sigint)
            outbox.begin()
            printed = os.fstat(log).st_size
            answer = _perform(kind, content, outbox)
            outbox.write(os.pread(log, MAX_OUTPUT, printed).decode(errors="replace"))
            outbox.end(*answer)


def _perform(kind: str, content: bytes, outbox: Outbox) -> tuple[str, object]:
    """Runs a task; `("done", its pickled value)` or `("failed", a report)`."""
    try:
        try:
            outbox.interruptible = True
            content = pickle.loads(content)
            if kind == "call":
                function, *arguments = content
                return "done", pickle.dumps(function(*arguments))
            result = _shell.run_cell(*content)
            result.raise_error()
            return "done", b""
        finally:
            outbox.interruptible = False
    except BaseException as error:
        outbox.interruptible = False
        return "failed", report(error)


def _make_shell(outbox: Outbox, directory: str) -> InteractiveShell:
    """IPython, which runs the cells; what it would show goes to the kernel, errors in the task's
    answer.
    """
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, ipython_dir=directory, colors="nocolor")
    shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: None
    shell.displayhook.write_output_prompt = lambda: None
    shell.displayhook.prompt_end_newline = True
    shell.display_pub.publish = lambda data, metadata=None, **_: outbox.send(
        "display", (data, metadata or {})
    )
    return shell


def _whoami(tasks: Connection) -> dict:
    """Where this rank runs; the kernel numbers the ranks by it."""
    with socket.socket(fileno=os.dup(tasks.fileno())) as duplicate:
        inherited = duplicate.family == socket.AF_UNIX
        address = loopback() if inherited else duplicate.getsockname()[0]
    return {
        "node": int(os.environ.get("SLURM_NODEID", 0)),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "address": address,  # at which the others reach it
        "pid": os.getpid(),
    }


# ---- what the kernel calls ----


def boot(environment: dict[str, str]) -> None:
    """Gives this process the environment of its rank, before torch-xla is imported."""
    os.environ.update(environment)


def join(
    backend: str, timeout: float, tp_size: int | None, address: str, port: int, key: str
) -> None:
    """Joins the process group over the kernel's store at `address:port`; torch, dist, rank, …
    become variables.

    Whoever lacks the key can connect to the store, but not read or change what the ranks write
    there.
    """
    import torch
    import torch.distributed as dist

    from tutorial_lib import backends

    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore(key, dist.TCPStore(address, port, is_master=False, timeout=limit))
    backends.init_distributed(backend, timeout, store)
    if tp_size is not None:
        from tutorial_lib.parallel_layers.parallel_state import initialize_model_parallel

        initialize_model_parallel(tensor_model_parallel_size=tp_size)
    _shell.user_ns.update(
        torch=torch,
        dist=dist,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=backends.get_device(backend),
    )


def leave() -> None:
    """Closes the process group, if there is one, and deletes the reader's variables that are groups
    of it.

    They are void from now on. And a gloo group that lives on in a variable is closed at some later
    moment, while others connect; with torch 2.9 the next join then took five seconds longer in 8
    cases of 112, against 1 of 196 without.
    """
    import torch.distributed as dist

    from tutorial_lib.parallel_layers.parallel_state import destroy_model_parallel

    for name in [
        name for name, value in _shell.user_ns.items() if isinstance(value, dist.ProcessGroup)
    ]:
        del _shell.user_ns[name]
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def probe() -> tuple[int, float]:
    """This rank and the sum of all ranks by an all-reduce on its device: shows that the ranks hear
    one another.
    """
    import torch
    import torch.distributed as dist

    from tutorial_lib import backends

    rank, world_size, device = dist.get_rank(), dist.get_world_size(), _shell.user_ns["device"]
    total = torch.tensor([float(rank)], device=device)
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        total = xm.all_reduce("sum", total, groups=[list(range(world_size))], pin_layout=False)
    else:
        dist.all_reduce(total)
    backends.mark_step()  # on XLA the value is there only then
    return rank, total.item()


def value(expression: str):
    """The value of an expression in the rank's namespace, with its tensors on the host and
    detached.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    result = eval(expression, _shell.user_ns)
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), result)


def hlo_texts() -> list[str]:
    """The graphs that this rank has run, the newest last; none where they cannot be had."""
    if (xla_cpu := sys.modules.get("tutorial_lib.xla_cpu")) is None or not xla_cpu.is_started():
        return []
    return [xla_cpu.hlo_text(graph) for graph in range(xla_cpu.graphs())]


def assign(values: dict) -> None:
    """Sets variables in the rank's namespace."""
    _shell.user_ns.update(values)


def report(error: BaseException) -> dict:
    """An exception as plain data: its text, the reader's frames, and the collective that waited in
    vain, if one did.
    """
    described = _describe(list(traceback.walk_tb(error.__traceback__)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and _is_cell(error.filename or ""):
        line = (error.text or "").strip()
        text = f"{type(error).__name__}: {error.msg}"
        described |= {"frames": [f"cell, line {error.lineno}: {line}"], "line": line}
    if not any(sign in str(error) for sign in _WAITING):
        described["waited_in"] = None
    if error.__cause__ is not None:
        described["frames"].append(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    return described | {"error": text}


def _describe(stack: list[tuple[FrameType, int]]) -> dict:
    """Where a stack is: the reader's frames, the last line of a cell, the collective that it is
    inside, its tensor.
    """
    frames = traceback.StackSummary.extract(stack)
    in_cells = [i for i, frame in enumerate(frames) if _is_cell(frame.filename)]
    first = in_cells[0] if in_cells else len(frames) - 1
    waited_in = tensor = None
    # An asynchronous collective waits in C++, with no frame of torch.distributed: the one of `comm`
    # tells.
    places = (os.path.join(PACKAGE_DIR, "parallel_layers", "comm.py"), "/torch/distributed/")
    for (frame, _), shown in zip(stack[first:], frames[first:]):
        if shown.name != "wrapper" and any(place in shown.filename for place in places):
            waited_in, tensor = shown.name, _tensor_in(frame)
            break
    own = os.path.join(PACKAGE_DIR, "xla_cpu", "")
    xla = [os.path.basename(f.filename) for f in frames[first:] if f.filename.startswith(own)]
    if "client.py" in xla and "compiler.py" not in xla:  # in the graph, with the other ranks
        waited_in = waited_in or "mark_step"
    return {
        "error": None,
        "frames": _lines(frames[first:]),
        "line": frames[in_cells[-1]].line.strip() if in_cells else None,
        "waited_in": waited_in,
        "tensor": tensor,
    }


def _tensor_in(frame: FrameType) -> str | None:
    """The shape and type of the first tensor that a function was given."""
    torch = sys.modules["torch"]
    for value in frame.f_locals.values():
        if isinstance(value, torch.Tensor):
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return None


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    """The frames that are the reader's or this package's, and the last one; what else was between
    is counted.
    """
    lines, skipped = [], 0
    for frame in frames:
        own = _is_cell(frame.filename) or frame.filename.startswith(PACKAGE_DIR)
        if not own and frame is not frames[-1]:
            skipped += 1
            continue
        if not frame.line:
            continue
        if skipped:
            lines.append(f"… {skipped} frame{'s' * (skipped > 1)} inside libraries")
            skipped = 0
        where = "cell" if _is_cell(frame.filename) else _short(frame.filename)
        function = "" if frame.name == "<module>" else f" in {frame.name}"
        lines.append(f"{where}, line {frame.lineno}{function}: {frame.line.strip()}")
    if len(lines) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        lines[half:-half] = [f"… {len(lines) - 2 * half} more frames"]
    return lines


def _is_cell(filename: str) -> bool:
    return filename.startswith("<ipython-input")


def _short(filename: str) -> str:
    """A path without what is particular to this machine."""
    if filename.startswith(PACKAGE_DIR):
        return os.path.relpath(filename, os.path.dirname(PACKAGE_DIR))
    _, found, below = filename.rpartition("site-packages/")
    return below if found else os.path.basename(filename)


def _stack_of(thread: int) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_stack(sys._current_frames()[thread]))[::-1]


def _attend(control: Connection, outbox: Outbox) -> None:
    """Answers the kernel, in a thread of its own, as the main thread may be stuck in a collective.
    Sends output on time.
    """
    main_thread = threading.main_thread().ident
    with contextlib.suppress(EOFError, OSError):  # the kernel closed the connection, or is gone
        while True:
            if not control.poll(FLUSH):
                outbox.flush()
                continue
            asked = json.loads(control.recv_bytes())
            answer = {}
            if asked["do"] == "where":
                # In no variable: until the next question, a frame would keep all that its callers
                # had in theirs.
                answer = _describe(_stack_of(main_thread))
            elif asked["do"] == "cut":
                _cut(asked["places"], asked["kernel_address"])
            elif asked["do"] == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            control.send_bytes(json.dumps(answer | {"number": asked["number"]}).encode())


def _cut(places: list[dict], kernel_address: str) -> int:
    """Shuts every connection between this rank and the others, so that whoever waits in a
    collective is told at once.

    A TCP connection between two ranks can only belong to a collective. Destroying the process group
    would not do: a group that a variable still refers to stays open.
    """
    own = address_towards(kernel_address)
    elsewhere = {place["address"] for place in places} - {own, kernel_address}
    theirs = set()
    for place in places:
        if place["address"] != own or place["pid"] == os.getpid():
            continue
        try:
            theirs |= {
                tuple(c.laddr)
                for c in psutil.Process(place["pid"]).net_connections("tcp")
                if c.raddr
            }
        except psutil.Error:
            continue
    connections = [c for c in psutil.Process().net_connections("tcp") if c.raddr]
    mine = [c for c in connections if tuple(c.raddr) in theirs or c.raddr.ip in elsewhere]
    for connection in mine:
        try:
            with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                if duplicate.getpeername()[:2] == tuple(
                    connection.raddr
                ):  # the descriptor may serve another by now
                    duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile
            continue
    return len(mine)
