"""The parent of the ranks on the kernel's machine: it forks them, and ends whatever they started.

It imports torch once, before it forks, so that four ranks start as fast as one. Everything that a
rank starts stays below this process, even if the process between them ends or the environment is
cleared: on Linux the nursery is the "subreaper" that orphans are handed to (prctl(2)). It has no
threads. When the kernel closes the nursery's input or dies, it ends all processes below it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir

import psutil

import tutorial_lib

MEETING = "TUTORIAL_MESH"  # variable of the ranks: the kernel's address, its port, and a key
SETTLE = 2.0  # seconds that processes get to end by themselves
TICK = 0.05  # seconds between looks at the ranks
LINUX = sys.platform == "linux"
PRELOAD = ("torch.distributed", "tutorial_lib.parallel_layers.parallel_state")
PRELOAD_XLA = (*PRELOAD, "tutorial_lib.xla_cpu.step")
LONGEST_LOG = 20_000  # characters of what a rank has printed outside of Python
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


def main(count: str, *preload: str) -> None:
    """Forks `count` ranks, and writes a line of JSON for each that ends: its process id, its exit
    status, and what it has printed outside of Python.

    Args:
        preload: modules to be imported before.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    logs, folder = {}, get_temp_dir()  # of multiprocessing, for the ranks too
    try:
        gc.disable()  # looking for garbage takes a third of the time of these imports
        for name in preload:
            importlib.import_module(name)
        from tutorial_lib.lab.mesh import worker

        worker.shell()
        gc.enable()
        for _ in range(int(count)):
            log = tempfile.TemporaryFile()  # noqa: SIM115
            rank = multiprocessing.get_context("fork").Process(target=_be_rank, args=(log,))
            rank.start()
            logs[rank] = log
        while not wait([sys.stdin], TICK):
            for rank in [one for one in logs if one.exitcode is not None]:
                log = logs.pop(rank)
                said = os.pread(log.fileno(), 1 << 24, 0).decode(errors="replace")
                print(json.dumps([rank.pid, rank.exitcode, said[-LONGEST_LOG:]]), flush=True)
    except Exception:  # the system starts no more processes, say
        traceback.print_exc()
    finally:
        _end_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.flush()
        os._exit(0)  # taking torch down in order takes two seconds


def _be_rank(log) -> None:
    from tutorial_lib.lab.mesh import worker

    redirect(log)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker.serve(worker.connect())


def redirect(log) -> None:
    """Lets C++ and other processes print to a file."""
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(option, value)


def _end_descendants() -> None:
    """Ends all processes below this one. They are asked first, so that device drivers can let go,
    then killed.

    Helpers that unlink shared memory ignore the request, and end by themselves once the processes
    that they serve are gone.
    """
    blow = psutil.Process.terminate
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                blow(process)
        psutil.wait_procs(below, timeout=SETTLE)
        blow = psutil.Process.kill
