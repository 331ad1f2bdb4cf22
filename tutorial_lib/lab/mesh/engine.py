"""What runs inside an engine of the mesh: joining the process group, reporting errors, answering while it is stuck.

The kernel calls these functions on the engines (`tutorial_lib.lab.mesh`). torch is imported only after `boot` has put the
rank's environment in place: OpenMP, gloo and torch-xla read it once.
"""

import json
import os
import signal
import socket
import sys
import threading
import traceback

import psutil

from tutorial_lib.network import address_towards

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_WAITING = (  # what a collective says when a peer is missing; gloo, NCCL and the store have no exception class for it
    "Connection closed by peer", "Connection reset", "Timed out waiting", "wait timeout", "Broken pipe",
    "Socket closed", "failed to recv", "Watchdog caught collective operation timeout", "could not finish its step",
)  # fmt: skip
MAX_FRAMES = 12  # lines of a traceback that a reader is shown
_shell = None


def whoami(kernel_address: str) -> dict:
    """Where this engine runs; the kernel assigns the ranks by it."""
    return {
        "node": int(os.environ.get("SLURM_NODEID", 0)),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "address": address_towards(kernel_address),  # at which the others reach it
        "pid": os.getpid(),
    }


def boot(environment: dict[str, str], stale: list[str]) -> None:
    """Makes this engine one rank: its environment, plain error reports, no colours."""
    global _shell
    from IPython import get_ipython

    for name in stale:
        os.environ.pop(name, None)
    os.environ.update(environment)
    _shell = get_ipython()
    _shell.colors = "nocolor"
    _shell.InteractiveTB.set_mode(
        "Minimal"
    )  # `report` says more; IPython's own traceback takes seconds to format
    show = _shell._showtraceback
    _shell._showtraceback = lambda etype, error, stb: show(
        etype, error, [json.dumps(report(error))]
    )


def join(
    backend: str, timeout: float, tp_size: int | None, address: str, port: int, control_port: int
) -> None:
    """Joins the process group whose store the kernel serves at `address:port`; torch, dist, rank …
    become variables.
    """
    import torch
    import torch.distributed as dist

    from tutorial_lib import backends

    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    threading.Thread(
        target=_attend, args=(address, control_port, int(os.environ["RANK"])), daemon=True
    ).start()
    backends.init_distributed(backend, timeout)
    if tp_size is not None:
        from tutorial_lib.parallel_layers.parallel_state import initialize_model_parallel

        initialize_model_parallel(tensor_model_parallel_size=tp_size)
    _shell.user_ns.update(
        torch=torch, dist=dist, rank=dist.get_rank(), world_size=dist.get_world_size(),
        device=backends.get_device(backend),
    )  # fmt: skip


def leave() -> None:
    """Closes the process group, if there is one, and deletes the reader's variables that are groups of it.

    They are void from now on. And a gloo group that lives on in a variable is closed at some later moment, while others
    connect; with torch 2.9 the next join then took five seconds longer in 8 cases of 112, against 1 of 196 without.
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
    """This rank and the sum of all ranks by an all-reduce on its device: shows that the ranks hear one another."""
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
    """The value of an expression in the engine's namespace, with its tensors on the host and detached."""
    import torch
    from torch.utils._pytree import tree_map_only

    result = eval(expression, _shell.user_ns)
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), result)


def compilations() -> int:
    """How many graphs this rank has compiled."""
    from tutorial_lib import backends

    return backends.compilations()


def hlo_texts() -> list[str]:
    """The graphs that this rank has run, the newest last; none where they cannot be had."""
    if (xla_cpu := sys.modules.get("tutorial_lib.xla_cpu")) is None or not xla_cpu.is_started():
        return []
    return [xla_cpu.hlo_text(graph) for graph in range(xla_cpu.graphs())]


def assign(values: dict) -> None:
    """Sets variables in the engine's namespace."""
    _shell.user_ns.update(values)


def report(error: BaseException) -> dict:
    """An exception as plain data: its text, the reader's frames, and the collective that waited in vain, if one did."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    described = _describe(frames)
    if isinstance(error, SyntaxError) and _is_cell(error.filename or ""):
        line = (error.text or "").strip()
        text = f"{type(error).__name__}: {error.msg}"
        described |= {"frames": [f"cell, line {error.lineno}: {line}"], "line": line}
    if not any(sign in str(error) for sign in _WAITING):
        described["waited_in"] = None
    if error.__cause__ is not None:
        described["frames"].append(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    return {"error": text} | described


def _describe(frames: list[traceback.FrameSummary]) -> dict:
    """The frames as far as they are the reader's or this package's, and the last one; what else was
    between is counted.
    """
    cells = [i for i, frame in enumerate(frames) if _is_cell(frame.filename)]
    frames = frames[cells[0] :] if cells else frames[-1:]
    lines, skipped = [], 0
    for i, frame in enumerate(frames):
        own = _is_cell(frame.filename) or frame.filename.startswith(PACKAGE_DIR)
        if not own and i < len(frames) - 1:
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
    own = [frame for frame in frames if _is_cell(frame.filename)]
    # An asynchronous collective waits in C++, with no frame of torch.distributed: the one of `comm` tells.
    collectives = (os.path.join(PACKAGE_DIR, "parallel_layers", "comm.py"), "/torch/distributed/")
    waits = (
        f.name
        for f in frames
        if any(place in f.filename for place in collectives) and f.name != "wrapper"
    )
    collective = next(waits, None)
    xla = [
        os.path.basename(f.filename)
        for f in frames
        if f.filename.startswith(os.path.join(PACKAGE_DIR, "xla_cpu"))
    ]
    if "client.py" in xla and "compiler.py" not in xla:  # in the graph, with the other ranks
        collective = collective or "mark_step"
    return {
        "frames": lines,
        "line": (own[-1].line or "").strip() if own else None,
        "waited_in": collective,
    }


def _is_cell(filename: str) -> bool:
    return f"ipykernel_{os.getpid()}" in filename or filename.startswith("<ipython-input")


def _short(filename: str) -> str:
    """A path without what is particular to this machine."""
    if filename.startswith(PACKAGE_DIR):
        return os.path.relpath(filename, os.path.dirname(PACKAGE_DIR))
    return (
        filename.rpartition("site-packages/")[2]
        if "site-packages/" in filename
        else os.path.basename(filename)
    )


def _attend(address: str, port: int, rank: int) -> None:
    """Answers the kernel through the store, in a thread of its own, as the main thread may be stuck in a collective."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    main = threading.main_thread().ident
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(days=365))
        for number in range(sys.maxsize):
            command = json.loads(store.get(f"mesh/{number}/{rank}"))
            if command["do"] == "where":
                # In no variable: until the next question, a frame would keep all that its callers had in theirs.
                answer = _describe(traceback.extract_stack(sys._current_frames().get(main)))
            elif command["do"] == "cut":
                answer = _cut(command["places"], address)
            elif command["do"] == "interrupt":
                answer = os.kill(os.getpid(), signal.SIGINT)
            store.set(f"mesh/{number}/{rank}/answer", json.dumps(answer))
    except RuntimeError:  # the kernel closed the store
        return


def _cut(places: list[dict], kernel_address: str) -> int:
    """Shuts every connection between this rank and the others, so that whoever waits in a collective is told at once.

    A TCP connection between two ranks can only belong to a collective. Destroying the process group would not do: a
    group that a variable still refers to stays open.
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
