"""The processes behind a mesh: ipyparallel's controller, one engine a rank, and the reaper that outlives the kernel."""

import logging
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import ipyparallel as ipp
import psutil
from traitlets.config import Config

from tutorial_lib.lab.mesh import engine, reaper
from tutorial_lib.lab.mesh.report import MeshError

START_TIMEOUT = 120.0  # seconds that all engines together get to start


class LocalProcess:
    """The process of a rank on this machine."""

    def __init__(self, process: psutil.Popen):
        self.pid = process.pid
        self._process = process

    def is_alive(self) -> bool:
        try:
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        self._process.kill()

    def cause_of_death(self) -> str:
        time.sleep(
            0.2
        )  # ipyparallel waits for the process, too, and one of the two gets its status
        status = self._process.wait(timeout=2)
        if status is None:
            return "the process is gone"
        if status < 0:
            hint = ": the usual reason is that memory ran out" if -status == signal.SIGKILL else ""
            return f"the process was killed by {signal.Signals(-status).name}{hint}"
        return f"the process exited with status {status}"


class LocalLauncher:
    """Starts the engines on the kernel's own machine; `tutorial_lib.lab.mesh.slurm` does on others."""

    address = (
        "127.0.0.1"  # where the ranks reach the kernel: a laptop's own name often does not resolve
    )
    directory = None  # the engines' files are in the system's temporary folder

    def prepare(
        self, cluster_id: str, count: int, directory: str, config: Config
    ) -> tuple[str, list[str]]:
        """Sets what ipyparallel has to know; its name for the launcher, and a command that ends what it started."""
        # The engines' nannies would only tell ipyparallel of deaths that `Watch` sees by itself.
        config.EngineLauncher.engine_args = ["--IPEngine.enable_nanny=False"]
        return "local", []

    def started(self, cluster: ipp.Cluster) -> None:
        """Called once they are on their way. Of an engine that this process started ipyparallel has the exit status."""
        sets = cluster.engines.values()
        self._processes = {
            one.pid: LocalProcess(one.process) for s in sets for one in s.launchers.values()
        }

    def is_waiting(self) -> bool:
        """Whether they have not begun to start, and nobody knows when they will."""
        return False

    def failure(self) -> str | None:
        """Why they will never be up; None if they may."""
        dead = [process for process in self._processes.values() if not process.is_alive()]
        return dead[0].cause_of_death() if dead else None

    def process(self, client: ipp.Client, engine_id: int, place: dict) -> LocalProcess:
        """The process of an engine, given what `engine.whoami` says there."""
        return self._processes[place["pid"]]


class Engines:
    """`count` engines that are up.

    Everything they leave on disk is in one temporary directory, and every process carries the id of
    the cluster: the reaper ends the ones and removes the other when the kernel closes the engines,
    and also when it dies.

    Attributes:
        cluster_id: unique to these engines.
        views: of one engine each, in the order of the ranks: by node, then by process, never by the engine's id.
        processes, places: in the same order; a place is what `engine.whoami` says.
    """

    def __init__(self, count: int, launcher):
        self.cluster_id = f"mesh-{uuid.uuid4().hex[:12]}"
        self._launcher = launcher
        if launcher.directory is not None:
            launcher.directory.mkdir(parents=True, exist_ok=True)
        self._directory = tempfile.mkdtemp(prefix=f"{self.cluster_id}-", dir=launcher.directory)
        self._client: ipp.Client | None = None
        config = Config()
        name, end = launcher.prepare(self.cluster_id, count, self._directory, config)
        self._reaper = subprocess.Popen(
            [sys.executable, reaper.__file__, self.cluster_id, self._directory, *end],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for the kernel
        )
        try:
            self._start(count, name, config)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int, launcher_name: str, config: Config) -> None:
        launcher = self._launcher
        self._cluster = ipp.Cluster(
            n=count,
            engines=launcher_name,
            cluster_id=self.cluster_id,
            profile_dir=self._directory,
            load_profile=False,
            controller_ip=launcher.address,
            controller_location=launcher.address,
            delay=0,
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
            config=config,
        )
        self._cluster.start_cluster_sync()
        launcher.started(self._cluster)
        self._client = self._cluster.connect_client_sync()
        deadline = time.monotonic() + START_TIMEOUT
        while len(self._client.ids) < count:
            if launcher.is_waiting():
                deadline = time.monotonic() + START_TIMEOUT
            failure = launcher.failure()
            if failure is None and time.monotonic() > deadline:
                failure = f"not within {START_TIMEOUT:.0f} s"
            if failure is not None:
                raise MeshError(
                    f"{len(self._client.ids)} of {count} engines started: {failure}. {self._log_tail()}"
                )
            time.sleep(0.05)
        whoami = {
            i: self._client[i].apply_sync(engine.whoami, launcher.address) for i in self._client.ids
        }
        by_place = sorted(
            whoami, key=lambda i: (whoami[i]["node"], whoami[i]["host"], whoami[i]["pid"])
        )
        self.views = [self._client[i] for i in by_place]
        self.places = [whoami[i] for i in by_place]
        self.processes = [launcher.process(self._client, i, whoami[i]) for i in by_place]

    def _log_tail(self) -> str:
        """The last lines that the processes of ipyparallel logged."""
        logs = sorted(Path(self._directory, "log").glob("*.log"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return "\n".join(["The last lines of their logs:", *lines[-10:]])

    def close(self) -> None:
        """Ends all of it and returns when it is gone."""
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        self._reaper.stdin.close()
        self._reaper.wait()
