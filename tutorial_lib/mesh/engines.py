"""The processes behind a mesh: ipyparallel's controller, one engine a rank, and the reaper that outlives the kernel."""

import logging
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import ipyparallel as ipp
from traitlets.config import Config

from tutorial_lib.mesh import engine, reaper
from tutorial_lib.mesh.report import MeshError
from tutorial_lib.mesh.watch import is_alive

ADDRESS = "127.0.0.1"  # where the ranks reach the kernel
START_TIMEOUT = 120.0  # seconds that all engines together get to start


class Engines:
    """`count` engines that are up.

    Everything they leave on disk is in one temporary directory, and every process carries the id of the cluster: the reaper
    ends the ones and removes the other when the kernel closes the engines, and also when it dies.

    Attributes:
        cluster_id: unique to these engines.
        views: of one engine each, in the order of the ranks: by host, then by process, never by the engine's id.
        processes, hosts: in the same order.
    """

    def __init__(self, count: int):
        self.cluster_id = f"mesh-{uuid.uuid4().hex[:12]}"
        self._directory = tempfile.mkdtemp(prefix=f"{self.cluster_id}-")
        self._client: ipp.Client | None = None
        self._reaper = subprocess.Popen(
            [sys.executable, reaper.__file__, self.cluster_id, self._directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for the kernel
        )
        try:
            self._start(count)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int) -> None:
        config = Config()
        # The engines' nannies would only tell ipyparallel of deaths that `Watch` sees by itself.
        config.EngineLauncher.engine_args = ["--IPEngine.enable_nanny=False"]
        self._cluster = ipp.Cluster(
            n=count,
            cluster_id=self.cluster_id,
            profile_dir=self._directory,
            load_profile=False,
            controller_ip=ADDRESS,
            controller_location=ADDRESS,
            delay=0,
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
            config=config,
        )
        self._cluster.start_cluster_sync()
        # Of an engine that this process started ipyparallel holds the process, and so its exit status.
        launched = {one.pid: one.process for group in self._cluster.engines.values() for one in group.launchers.values()}
        self._client = self._cluster.connect_client_sync()
        deadline = time.monotonic() + START_TIMEOUT
        while len(self._client.ids) < count:
            if time.monotonic() > deadline or not all(map(is_alive, launched.values())):
                raise MeshError(f"{len(self._client.ids)} of {count} engines started. {self._log_tail()}")
            time.sleep(0.05)
        places = {i: self._client[i].apply_sync(engine.whoami) for i in self._client.ids}
        by_place = sorted(places, key=lambda i: (places[i]["host"], places[i]["pid"]))
        self.views = [self._client[i] for i in by_place]
        self.processes = [launched[places[i]["pid"]] for i in by_place]
        self.hosts = [places[i]["host"] for i in by_place]

    def _log_tail(self) -> str:
        """The last lines that the processes of ipyparallel logged."""
        lines = [line for log in sorted(Path(self._directory, "log").glob("*.log")) for line in log.read_text().splitlines()]
        return "\n".join(["The last lines of their logs:", *lines[-10:]])

    def close(self) -> None:
        """Ends all of it and returns when it is gone."""
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        self._reaper.stdin.close()
        self._reaper.wait()
