"""What runs on a rank: a loop that takes a task from the kernel, runs it, and sends back what it
prints and returns.

A task is a cell, run by IPython, or one of the functions of this module. The main thread does
nothing else: one thread receives, and answers while the task is stuck in a collective that a peer
never enters; another sends, so that an interrupt leaves no message half sent. torch is imported
only after `join` has put the rank's environment in place, unless the nursery has done so: torch-xla
reads it once.
"""

import contextlib
import faulthandler
import functools
import io
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue

import psutil
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tutorial_lib.lab.mesh import nursery, reports

MAX_OUTPUT = 1_000_000  # characters of a cell that a reader is shown
_busy = False  # whether a task runs, which SIGINT ends


class Outbox(io.TextIOBase):
    """What a rank sends, and its `sys.stdout` and `sys.stderr`.

    In processes that it forks these are the file that C++ prints to.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(self, connection: Connection):
        self._queue, self._pid = SimpleQueue(), os.getpid()  # its `put` cannot be interrupted
        self.begin()
        threading.Thread(target=self._send_on, args=(connection,), daemon=True).start()

    def begin(self) -> None:
        """A task begins: its output is counted from here."""
        self._count = self._left_out = 0

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:
            os.write(1, text.encode(errors="replace"))
            return len(text)
        kept = text[: max(MAX_OUTPUT - self._count, 0)]
        self._left_out += len(text) - len(kept)
        if "\r" not in text:  # a progress bar overwrites itself
            self._count += len(text)
        if kept:
            self.send("output", kept)
        return len(text)

    def end(self, kind: str, content) -> None:
        """A task has ended, with this result."""
        if self._left_out:
            self.send("output", f"\n… {self._left_out} more characters are not shown\n")
        self.send(kind, content)

    def send(self, kind: str, content) -> None:
        self._queue.put(pickle.dumps((kind, content)))

    def _send_on(self, connection: Connection) -> None:
        with contextlib.suppress(OSError):  # the kernel is gone
            while True:
                messages = [self._queue.get()]
                while not self._queue.empty():
                    messages.append(self._queue.get())
                connection.send_bytes(pickle.dumps(messages))

    def fileno(self) -> int:
        return 1

    def writable(self) -> bool:
        return True


def main() -> None:
    """The main function of a rank that a SLURM job started."""
    connection = connect()
    nursery.redirect(tempfile.TemporaryFile())  # noqa: SIM115
    serve(connection)


def connect() -> Connection:
    """Connects to the kernel, which learns where this rank runs and numbers the ranks by that."""
    address, port, key = os.environ.pop(nursery.MEETING).split()
    connection = Client((address, int(port)), authkey=bytes.fromhex(key))
    place = {
        "node": int(os.environ.get("SLURM_NODEID", 0)),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "pid": os.getpid(),
    }
    connection.send_bytes(pickle.dumps(place))
    return connection


def serve(connection: Connection) -> None:
    """Runs what the kernel sends until it closes the connection. Standard output is a file."""
    faulthandler.enable()
    outbox, tasks = Outbox(connection), SimpleQueue()
    sys.stdout = sys.stderr = outbox
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forked ranks would all draw the same numbers
    shell().display_pub.publish = lambda data, metadata=None, **_: outbox.send(
        "display", (data, metadata or {})
    )
    threading.Thread(target=attend, args=(connection, tasks, outbox), daemon=True).start()
    signal.signal(signal.SIGINT, _on_sigint)
    while True:
        kind, content = tasks.get()
        signal.signal(signal.SIGINT, _on_sigint)
        outbox.begin()
        printed = os.fstat(1).st_size
        answer = _perform(kind, content)
        outbox.write(os.pread(1, MAX_OUTPUT, printed).decode(errors="replace"))
        outbox.end(*answer)


def attend(connection: Connection, tasks: SimpleQueue, outbox: Outbox) -> None:
    """Receives what the kernel sends: `cell` and `call` are tasks, the rest is done in this thread.

    `where` asks what the main thread runs. `release` ends its task: the connections to the machines
    named are shut, and it is interrupted.
    """
    main_thread = threading.main_thread().ident
    with contextlib.suppress(EOFError, OSError):  # the kernel has closed the connection, or is gone
        while True:
            kind, content = pickle.loads(connection.recv_bytes())
            if kind == "where":
                # In no variable: until the next question, a frame would keep all that its callers
                # had in theirs.
                outbox.send("answer", reports.describe_thread(main_thread))
            elif kind == "release":
                _cut(connection, content)
                if _busy:
                    signal.pthread_kill(main_thread, signal.SIGINT)
            else:
                tasks.put((kind, content))
    os._exit(0)


def _on_sigint(*_) -> None:
    if _busy:
        raise KeyboardInterrupt


def _perform(kind: str, content: bytes) -> tuple[str, object]:
    """Runs a task; `("done", its pickled value)` or `("failed", a report)`."""
    global _busy
    try:
        try:
            _busy = True
            content = pickle.loads(content)
            if kind == "call":
                function, *arguments = content
                return "done", pickle.dumps(function(*arguments))
            shell().run_cell(*content).raise_error()
            return "done", pickle.dumps(None)
        finally:
            _busy = False
    except BaseException as error:
        _busy = False
        return "failed", reports.report(error)


@functools.cache
def shell() -> InteractiveShell:
    """IPython, which runs the cells; errors are in the task's answer."""
    config = Config()
    config.HistoryManager.enabled = False
    one = InteractiveShell.instance(config=config, colors="nocolor")
    one.showtraceback = one.showsyntaxerror = lambda *_, **__: None
    one.displayhook.write_output_prompt = lambda: None
    one.displayhook.prompt_end_newline = True
    return one


def _cut(connection: Connection, addresses: list[str]) -> None:
    """Shuts the TCP connections to the machines of other ranks, so that whoever waits in a
    collective is told at once.

    Destroying the process group would not do: a group that a variable still refers to stays open.
    The connections to the kernel, this one and that to its store, stay.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        kept = {duplicate.getpeername()[1], int(os.environ["MASTER_PORT"])}
    for other in psutil.Process().net_connections("tcp"):
        if other.raddr and other.raddr.ip in addresses and other.raddr.port not in kept:
            with contextlib.suppress(OSError):  # closed meanwhile
                with socket.socket(fileno=os.dup(other.fd)) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)


# ---- what the kernel calls ----


def join(
    environment: dict[str, str], backend: str, timeout: float, tp_size: int | None, key: str
) -> None:
    """Joins the process group over the kernel's store; torch, dist, rank, … become variables.

    Whoever lacks the key can connect to the store, but not read or change what the ranks write
    there.
    """
    os.environ.update(environment)  # before torch-xla is imported
    import torch
    import torch.distributed as dist

    from tutorial_lib import backends

    # Ranks forked from one process share its random stream; those of other nodes do not.
    torch.manual_seed(int(key[:8], 16))
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
    backends.init_distributed(backend, timeout, dist.PrefixStore(key, store))
    if tp_size is not None:
        from tutorial_lib.parallel_layers.parallel_state import initialize_model_parallel

        initialize_model_parallel(tensor_model_parallel_size=tp_size)
    shell().user_ns.update(
        torch=torch,
        dist=dist,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=backends.get_device(backend),
    )


def leave() -> None:
    """Closes the process group, if there is one, and deletes the reader's variables that are groups
    of it.

    They would go on over connections that a failure may have cut, or left with half a message.
    """
    import torch.distributed as dist

    from tutorial_lib.parallel_layers.parallel_state import destroy_model_parallel

    variables = shell().user_ns
    for name in [n for n, value in variables.items() if isinstance(value, dist.ProcessGroup)]:
        del variables[name]
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def probe() -> tuple[int, float]:
    """This rank and the sum of all ranks by an all-reduce on its device."""
    import torch
    import torch.distributed as dist

    from tutorial_lib import backends

    device = shell().user_ns["device"]
    total = torch.tensor([float(dist.get_rank())], device=device)
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        groups = [list(range(dist.get_world_size()))]
        total = xm.all_reduce("sum", total, groups=groups, pin_layout=False)
    else:
        dist.all_reduce(total)
    backends.mark_step()  # on XLA the value is there only then
    return dist.get_rank(), total.item()


def value(expression: str):
    """The value of an expression in the rank's namespace, with its tensors on the host and
    detached.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    result = eval(expression, shell().user_ns)
    return tree_map_only(torch.Tensor, lambda t: t.cpu().detach(), result)


def assign(values: dict) -> None:
    """Sets variables in the rank's namespace."""
    shell().user_ns.update(values)
