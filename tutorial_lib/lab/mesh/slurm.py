"""Ranks on the nodes of a SLURM cluster: one job of ipyparallel's SLURM launcher is one mesh.

The notebook's kernel runs where `sbatch` does, on a head node say, and needs no accelerator. Node
and kernel have to share the folder of the repository. What is known of a rank's process comes from
its engine and from the state of the job: SLURM ends the job if a node fails, if somebody cancels it
or if its time is over, and then all of its ranks are gone.
"""

import getpass
import re
import shlex
import shutil
import subprocess
import time
from functools import cached_property

import ipyparallel as ipp
from traitlets.config import Config

from tutorial_lib.lab.mesh.report import MeshError
from tutorial_lib.lab.paths import resolve
from tutorial_lib.network import address_towards

POLL = 1.0  # seconds between looks at the job
GOING_ON = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "SUSPENDED",
    "REQUEUED",
    "RESIZING",
}  # states that are no end
BATCH_TEMPLATE = """#!/bin/sh
#SBATCH --job-name={{cluster_id}}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={{n}}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --cpus-per-task={threads}
#SBATCH --output={{profile_dir}}/log/job.log
#SBATCH --export=ALL
#SBATCH --no-requeue
{options}
# A rank that dies is reported; the others are not killed with it.
exec srun --kill-on-bad-exit=0 {{program_and_args}}
"""


def batch_file(nodes: int, ranks_per_node: int, threads: int = 1, options: list[str] = ()) -> str:
    """The file of a mesh's job, in which ipyparallel fills in what stands in braces.

    Args:
        nodes, ranks_per_node: how many.
        threads: cores for each rank.
        options: further ones of `sbatch`, such as `["--partition=trn1"]`.
    """
    return BATCH_TEMPLATE.format(
        nodes=nodes,
        per_node=ranks_per_node,
        threads=threads,
        options="".join(f"#SBATCH {option}\n" for option in options),
    )


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise MeshError(
            f"{shlex.join(command)} failed: {result.stderr.strip() or result.stdout.strip()}"
        )
    return result.stdout


def check_slurm() -> None:
    """Raises ValueError where SLURM's commands are missing."""
    missing = [
        name
        for name in ("sbatch", "srun", "scancel", "scontrol", "sinfo")
        if shutil.which(name) is None
    ]
    if missing:
        raise ValueError(f"launcher 'slurm' needs {', '.join(missing)}: not found on this machine")


def _address_for_nodes() -> str:
    """The address of this machine on the network that it shares with the nodes."""
    names = _run("sinfo", "--noheader", "--Node", "--format=%N").split()
    if not names:
        raise MeshError("sinfo lists no nodes")
    described = _run("scontrol", "--oneliner", "show", "node", names[0])
    return address_towards(re.search(r"NodeAddr=(\S+)", described)[1])


class Job:
    """A job's state, looked up once a second at most."""

    def __init__(self, job_id: str):
        self.job_id = job_id
        self._looked_at = 0.0
        self.state, self.reason = "PENDING", "None"

    def look(self) -> str:
        """`PENDING`, `RUNNING`, … or how it ended."""
        if self.state in {"COMPLETING", *GOING_ON} and time.monotonic() - self._looked_at > POLL:
            shown = subprocess.run(
                ["scontrol", "--oneliner", "show", "job", self.job_id],
                capture_output=True,
                text=True,
            )
            if shown.returncode == 0:
                self.state = re.search(r"JobState=(\S+)", shown.stdout)[1]
                self.reason = re.search(r"Reason=(\S+)", shown.stdout)[1]
            elif "Invalid job id" in shown.stderr:  # forgotten some minutes after its end
                self.state = "COMPLETED"
            # Otherwise the controller does not answer at the moment, which ends no job.
            self._looked_at = time.monotonic()
        return self.state

    @property
    def goes_on(self) -> bool:
        return self.look() in GOING_ON

    @cached_property
    def end(self) -> str:
        """Why it ended, the same for all ranks; with a node that is gone it may stay COMPLETING for minutes, but the
        reason is there.
        """
        deadline = time.monotonic() + 20 * POLL
        while self.look() == "COMPLETING" and self.reason == "None" and time.monotonic() < deadline:
            time.sleep(POLL / 4)
        because = "" if self.reason == "None" else f", {self.reason}"
        return f"SLURM's job {self.job_id} ended: {self.state}{because}"


class SlurmProcess:
    """The process of a rank on some node."""

    def __init__(self, job: Job, client: ipp.Client, engine_id: int, place: dict):
        self.pid, self._host = place["pid"], place["host"]
        self._job, self._client, self._engine_id = job, client, engine_id

    def is_alive(self) -> bool:
        # ipyparallel drops an engine when its nanny or its missing heartbeat says so.
        return self._engine_id in self._client.ids and self._job.goes_on

    def kill(self) -> None:
        self._client.send_signal("SIGKILL", targets=self._engine_id, block=False)

    def cause_of_death(self) -> str:
        time.sleep(POLL + 0.1)  # a job ends a moment after its processes
        if not self._job.goes_on:
            return self._job.end
        return f"process {self.pid} on {self._host} is gone"


class SlurmLauncher:
    """Starts the engines in a job of `nodes` nodes, as many on each.

    Args:
        nodes: how many.
        threads: cores for each rank.
        options: further ones of `sbatch`, such as `"--partition=trn1 --time=8:00:00 --exclusive"`.

    Raises:
        ValueError: SLURM is not there.
        MeshError: it does not answer.
    """

    def __init__(self, nodes: int, threads: int = 1, options: str = ""):
        check_slurm()
        self.nodes, self.threads, self.options = nodes, threads, shlex.split(options)
        self.address = _address_for_nodes()
        self.directory = resolve("build/mesh")  # the nodes have to see it
        self.job: Job | None = None
        self._said: tuple[str, str] | None = None  # the state and reason that were last printed

    def prepare(
        self, cluster_id: str, count: int, directory: str, config: Config
    ) -> tuple[str, list[str]]:
        """See `LocalLauncher.prepare`."""
        config.HeartMonitor.period = 1000  # milliseconds
        config.SlurmEngineSetLauncher.batch_file_name = f"{directory}/job.sbatch"
        config.SlurmEngineSetLauncher.batch_template = batch_file(
            self.nodes, count // self.nodes, self.threads, self.options
        )
        return "slurm", ["scancel", f"--name={cluster_id}", f"--user={getpass.getuser()}"]

    def started(self, cluster: ipp.Cluster) -> None:
        """See `LocalLauncher.started`."""
        (engine_set,) = cluster.engines.values()
        self.job = Job(engine_set.job_id)

    def is_waiting(self) -> bool:
        """Whether the job is queued; it says so once."""
        state = self.job.look()
        if state in ("PENDING", "CONFIGURING") and (state, self.job.reason) != self._said:
            self._said = state, self.job.reason
            if self.job.reason not in ("None", "Priority"):
                print(f"SLURM's job {self.job.job_id} is {state.lower()}: {self.job.reason}")
        return state in ("PENDING", "CONFIGURING")

    def failure(self) -> str | None:
        """Why the ranks will never be up; None if they may."""
        return None if self.job.goes_on else self.job.end

    def process(self, client: ipp.Client, engine_id: int, place: dict) -> SlurmProcess:
        """See `LocalLauncher.process`."""
        return SlurmProcess(self.job, client, engine_id, place)
