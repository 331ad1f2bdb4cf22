"""Ends every process of a mesh, whoever started it and however its kernel died.

All processes of a mesh (engines, controller, their helpers, data-loader workers) inherit the environment variable
IPP_CLUSTER_ID, which ipyparallel sets and which is unique to the mesh. What carries it belongs to the mesh. So there is
nothing to register, and nothing is missed that was started a moment before the kernel was killed.

Run as a script, `reaper.py CLUSTER_ID DIRECTORY [COMMAND…]`, it is a small process that outlives
its parent, the notebook's kernel, just long enough to clean up after it. COMMAND ends what runs on
other machines.
"""

import os
import select
import shutil
import subprocess
import sys
import time

import psutil

SETTLE = 2.0  # seconds that processes get to end themselves


def processes(cluster_id: str) -> list[psutil.Process]:
    """The living processes that carry this cluster id."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("IPP_CLUSTER_ID") == cluster_id
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def reap(cluster_id: str) -> list[int]:
    """Ends all processes with this cluster id and returns the pids that are still there afterwards: normally none.

    They are asked first (SIGTERM), so that device drivers can let go, and get `SETTLE` seconds.
    """
    _send(processes(cluster_id), "terminate")
    # Helpers that unlink shared memory end by themselves once the processes that they serve are gone.
    _send([p for p in processes(cluster_id) if not _is_tracker(p)], "kill")
    _send(processes(cluster_id), "wait")
    _send(processes(cluster_id), "kill")
    return [p.pid for p in processes(cluster_id)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _send(targets: list[psutil.Process], how: str) -> None:
    for process in targets:
        try:
            getattr(process, how)() if how != "wait" else None
        except psutil.Error:
            continue
    psutil.wait_procs(targets, timeout=SETTLE)


def main(cluster_id: str, directory: str, *command: str) -> None:
    """Waits until the parent process is gone or its pipe is closed, then ends the mesh and removes its files."""
    parent = os.getppid()
    while os.getppid() == parent:
        if (
            select.select([0], [], [], 1.0)[0] and os.read(0, 1) == b""
        ):  # end of file: the kernel closed it, or died
            break
    if command:
        subprocess.run(command, check=False)
    while reap(cluster_id):
        time.sleep(0.3)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
