"""A SLURM cluster of two nodes on this machine, for the tests: real daemons, in a folder of their
own.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

DAEMONS = ["munged", "slurmctld", "slurmd"]
DAEMONS += ["sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue"]
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])  # where Debian has the daemons
NODES = ("n1", "n2")
CONF = """
ClusterName=tutorial
SlurmctldHost=localhost
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n1} CPUs=4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n2} CPUs=4
PartitionName=main Nodes=n[1-2] Default=YES State=UP
"""


def missing() -> list[str]:
    """The commands that this machine lacks."""
    return [name for name in DAEMONS if shutil.which(name, path=PATH) is None]


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_for(condition, seconds: float, what: str = "the condition", pause: float = 0.1):
    """The first true value of `condition()`; TimeoutError if there is none in so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(pause)
    return value


class Cluster:
    """`with Cluster() as cluster:` it is up, and `cluster.environment` makes SLURM's commands use
    it.
    """

    def __enter__(self) -> "Cluster":
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        control, *nodes = _free_ports(3)
        (self.folder / "state").mkdir()
        settings = dict(
            zip(NODES, nodes), control=control, user=getpass.getuser(), folder=self.folder
        )
        (self.folder / "slurm.conf").write_text(CONF.format(**settings))
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o600)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
        self._daemons: dict[str, subprocess.Popen] = {}
        try:
            files = ("socket", "pid-file", "log-file", "seed-file")
            munge = [f"--{what}={self.folder}/munge.{what}" for what in files]
            munge += ["--foreground", "--force", f"--key-file={self.folder}/key"]
            self._start("munged", "munged", *munge)
            self._wait(lambda: (self.folder / "munge.socket").exists(), "munged's socket")
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        if "slurmctld" in self._daemons:
            self.command("scancel", f"--user={getpass.getuser()}")
            self._wait(lambda: not self.jobs(), "the end of all jobs", 30)
        for process in reversed(self._daemons.values()):
            process.terminate()
        for process in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        shutil.rmtree(self.folder)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=os.environ | self.environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def _wait(self, condition, what: str, seconds: float = 20) -> None:
        try:
            wait_for(condition, seconds, what)
        except TimeoutError as error:
            logs = {p.name: p.read_text(errors="replace")[-500:] for p in self.folder.glob("*.out")}
            raise TimeoutError(f"{error} {logs}") from None

    def command(self, *words: str) -> str:
        """What a command of SLURM prints."""
        environment = os.environ | self.environment
        result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
        return result.stdout

    def jobs(self) -> list[str]:
        """The jobs that are queued, run, or are being ended."""
        return self.command("squeue", "--noheader", "--format=%i").split()

    def start_node(self, node: str) -> None:
        """Starts the node's daemon and waits until jobs may run there."""
        self._start(node, "slurmd", "-D", "-N", node)

        def is_idle() -> bool:
            options = ("--noheader", "--Node", f"--nodes={node}", "--format=%T")
            state = self.command("sinfo", *options).strip()
            if state.startswith(("drain", "down")) and not state.endswith("*"):
                self.command("scontrol", "update", f"nodename={node}", "state=resume")
            return state == "idle"

        self._wait(is_idle, f"node {node} idle", 40)

    def kill_node(self, node: str) -> None:
        """Ends everything that runs on the node at once, as if its power had failed."""
        victims = [psutil.Process(self._daemons.pop(node).pid)]
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURMD_NODENAME") == node:
                    victims.append(process)
                    if process.parent() is not None and "slurmstepd" in process.parent().name():
                        victims.append(process.parent())
            except psutil.Error:
                continue
        # Suspended first: slurmstepd could still report the end of its task.
        for blow in (psutil.Process.suspend, psutil.Process.kill):
            for process in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    blow(process)
        psutil.wait_procs(victims, timeout=5)

    def mend(self) -> None:
        """Starts the nodes that a failed test left dead."""
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
