"""The parent of the ranks on the kernel's machine: it forks them, and ends whatever they started.

It imports torch once, before it forks, so that four ranks start as fast as one. Everything that a
rank starts stays
below this process, even if the process between them ends or the environment is cleared: on Linux
the nursery is the "subreaper" that orphans are handed to (prctl(2)). It has no threads. When the
kernel closes its channel or dies, the nursery ends all processes below it and removes the mesh's
folder.

For ranks on other machines it starts nothing, and runs a command at the end that stops them there.
"""

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil

import tutorial_lib

SETTLE = 2.0  # seconds that processes get to end by themselves
TICK = 0.05  # seconds between looks at the ranks
LINUX = sys.platform == "linux"
PRELOAD = ("torch.distributed", "tutorial_lib.parallel_layers.parallel_state")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# The ranks import what the kernel would, wherever the notebook's folder is: a `random.py` there
# must not be found first.
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tutorial_lib.lab.mesh.{module} import main
main(*sys.argv[2:])
"""


def python(module: str, *arguments: str) -> list[str]:
    """A command that calls `main(*arguments)` of a module of this package, with the kernel's own
    search path.
    """
    here = os.path.dirname(os.path.dirname(tutorial_lib.__file__))
    path = json.dumps([os.path.abspath(place or here) for place in sys.path])
    return [sys.executable, "-P", "-c", START.format(module=module), path, *arguments]


def main(settings: str) -> None:
    """Starts the ranks and watches over them until the kernel is gone.

    Args:
        settings: JSON of `channel`, the descriptor of the connection to the kernel; `ranks`, a pair
            of descriptors for each; `fork`, or None; `directory`, to be removed at the end; `end`,
            a command to be run then.
    """
    given = json.loads(settings)
    kernel, parent = Connection(given["channel"]), os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # as long as this process is too busy to look
    try:
        ranks = _start(given)
        _prctl(_PR_SET_PDEATHSIG, 0)
        while not kernel.poll(TICK) and os.getppid() == parent:
            for rank, status in _changes(ranks):
                kernel.send_bytes(json.dumps([rank, status]).encode())
    except Exception as error:  # the system starts no more processes, say
        with contextlib.suppress(OSError):  # the kernel is gone, too
            kernel.send_bytes(json.dumps([None, f"{type(error).__name__}: {error}"]).encode())
    finally:
        if given["end"]:
            subprocess.run(given["end"], check=False)
        _end_descendants()
        shutil.rmtree(given["directory"], ignore_errors=True)
        sys.stderr.flush()
        os._exit(0)  # taking torch down in order takes two seconds


def _start(given: dict) -> dict[int, int]:
    """Starts the ranks; the rank of each process id."""
    if given["fork"] and given["ranks"]:
        for name in PRELOAD:
            __import__(name)
        from tutorial_lib.lab.mesh import worker  # noqa: F401
    ranks = {}
    for rank, (task, control) in enumerate(given["ranks"]):
        arguments = (str(task), str(control), given["directory"])
        if not given["fork"]:
            started = subprocess.Popen(python("worker", *arguments), pass_fds=(task, control))
            ranks[started.pid] = rank
        elif pid := os.fork():
            ranks[pid] = rank
        else:
            _become_rank(given, rank, arguments)
    for pair in given["ranks"]:
        for descriptor in pair:
            os.close(descriptor)
    return ranks


def _become_rank(given: dict, rank: int, arguments: tuple[str, str, str]) -> None:
    """What a forked process does; it never returns."""
    status = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other, pair in enumerate(given["ranks"]):
            for descriptor in pair if other != rank else ():
                os.close(descriptor)
        os.close(given["channel"])
        from tutorial_lib.lab.mesh import worker

        worker.main(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        sys.__stderr__.flush()
        os._exit(status)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(option, value)


def _changes(ranks: dict[int, int]) -> list[tuple[int, int | str]]:
    """The ranks that have ended, with their exit status, and those that were stopped or go on."""
    found = []
    for pid, status in _collect(os.WNOHANG | os.WUNTRACED | os.WCONTINUED):
        if os.WIFSTOPPED(status):
            news = "stopped"
        elif os.WIFCONTINUED(status):
            news = "running"
        else:
            news = os.waitstatus_to_exitcode(status)
        if pid in ranks:
            found.append((ranks[pid], news))
    return found


def _collect(flags: int) -> Iterator[tuple[int, int]]:
    """The children of this process that have changed; orphans that were handed to it are among
    them.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _end_descendants() -> None:
    """Ends all processes below this one. They are asked first, so that device drivers can let go,
    then killed.
    """
    for blow in itertools.chain([psutil.Process.terminate], itertools.repeat(psutil.Process.kill)):
        if not (below := _descendants()):
            return
        # Helpers that unlink shared memory end by themselves once the processes that they serve are
        # gone.
        targets = [process for process in below if not _is_tracker(process)] or below
        for process in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                blow(process)
        deadline = time.monotonic() + SETTLE
        while _descendants() and time.monotonic() < deadline:
            time.sleep(0.02)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _descendants() -> list[psutil.Process]:
    """The processes below this one."""
    for _ in _collect(os.WNOHANG):
        pass
    return psutil.Process().children(recursive=True)
