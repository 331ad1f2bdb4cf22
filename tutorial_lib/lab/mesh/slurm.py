"""Ranks on the nodes of a SLURM cluster: one job is one mesh.

The notebook's kernel runs where `sbatch` does, on a head node say, and needs no accelerator. Node
and kernel have to share the folder of the repository. The ranks connect to the kernel, which
listens on the network that it shares with them. What is known of a rank's process comes from its
connection and from the state of the job: SLURM ends the job if a node fails, if somebody cancels it
or if its time is over, and then all of its ranks are gone.
"""

import getpass
import re
import secrets
import shlex
import shutil
import subprocess
import time

from tutorial_lib.lab.mesh import nursery
from tutorial_lib.lab.mesh.failures import MeshError
from tutorial_lib.lab.mesh.ranks import START_TIMEOUT, Ranks
from tutorial_lib.lab.paths import resolve
from tutorial_lib.network import address_towards

POLL = 1.0  # seconds between looks at the job
NODE_DOWN = 45.0  # seconds after which SLURM has noticed that a node is gone
ENDING = 20.0  # seconds that SLURM gets to say why a job ends
GOING_ON = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING")
BATCH_TEMPLATE = """#!/bin/sh
#SBATCH --job-name={{name}}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={{ranks}}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --cpus-per-task=1
#SBATCH --output={{log}}
#SBATCH --export=ALL
#SBATCH --no-requeue

# A rank that dies is reported; the others are not killed with it.
exec srun --kill-on-bad-exit=0 {{command}}
"""


def batch_file(nodes: int, ranks_per_node: int) -> str:
    """The file of a mesh's job; what stands in braces is filled in when it is submitted."""
    return BATCH_TEMPLATE.format(nodes=nodes, per_node=ranks_per_node)


def check_slurm() -> None:
    """Raises ValueError where SLURM's commands are missing."""
    commands = ("sbatch", "srun", "scancel", "scontrol", "sinfo")
    if missing := [name for name in commands if shutil.which(name) is None]:
        raise ValueError(f"launcher 'slurm' needs {', '.join(missing)}: not found on this machine")


def _run(*command: str, **options) -> str:
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode:
        raise MeshError(
            f"{shlex.join(command)} failed: {result.stderr.strip() or result.stdout.strip()}"
        )
    return result.stdout


class SlurmRanks(Ranks):
    """Ranks in a job of `nodes` nodes, equally many on each.

    Args:
        count: how many.
        environment: what they start with.
        nodes: how many.

    Raises:
        MeshError: SLURM does not answer, or the ranks did not come up.
    """

    def __init__(self, count: int, environment: dict[str, str], nodes: int):
        if not (names := _run("sinfo", "--noheader", "--Node", "--format=%N").split()):
            raise MeshError("sinfo lists no nodes")
        described = _run("scontrol", "--oneliner", "show", "node", names[0])
        # Of this machine, on the network that it shares with the nodes.
        self.address = address_towards(re.search(r"NodeAddr=(\S+)", described)[1])
        self._script = batch_file(nodes, count // nodes)
        self._looked_at, self._said = 0.0, None
        self.state, self.reason = "PENDING", "None"
        super().__init__(count, environment)

    def _launch(self, count: int, environment: dict[str, str]) -> None:
        name = f"mesh-{secrets.token_hex(6)}"
        folder = resolve("build/mesh")  # the nodes have to see it
        folder.mkdir(parents=True, exist_ok=True)
        self._job_log = folder / f"{name}.log"
        # Waits until the kernel closes its end, or is gone. By name, as the job may have no number
        # yet.
        cancel = shlex.join(["scancel", f"--name={name}", f"--user={getpass.getuser()}"])
        clean = f"head -c1; {cancel}; rm -f {shlex.quote(str(self._job_log))}"
        self._start(["sh", "-c", clean], environment)
        command = shlex.join(nursery.python("worker"))
        script = self._script.format(name=name, ranks=count, log=self._job_log, command=command)
        printed = _run("sbatch", "--parsable", input=script, env=environment)
        self.job_id = printed.strip().partition(";")[0]

    def _look(self) -> bool:
        """Whether the job goes on; looks once a second at most."""
        if self.state in ("COMPLETING", *GOING_ON) and time.monotonic() - self._looked_at > POLL:
            command = ["scontrol", "--oneliner", "show", "job", self.job_id]
            shown = subprocess.run(command, capture_output=True, text=True)
            if shown.returncode == 0:
                self.state = re.search(r"JobState=(\S+)", shown.stdout)[1]
                self.reason = re.search(r"Reason=(\S+)", shown.stdout)[1]
            elif "Invalid job id" in shown.stderr:  # forgotten some minutes after its end
                self.state = "COMPLETED"
            # Otherwise the controller does not answer at the moment, which does not end a job.
            self._looked_at = time.monotonic()
        return self.state in GOING_ON

    def _end(self) -> str:
        """Why the job ended, the same for all ranks; with a node that is gone it may stay
        COMPLETING for minutes, but the reason is there.
        """
        deadline = time.monotonic() + ENDING
        while self.state == "COMPLETING" and self.reason == "None" and time.monotonic() < deadline:
            time.sleep(POLL / 4)
            self._look()
        because = "" if self.reason == "None" else f", {self.reason}"
        return f"SLURM's job {self.job_id} ended: {self.state}{because}"

    def _trouble(self) -> str:
        if not self._look():
            return self._end()
        if self.state in ("PENDING", "CONFIGURING"):
            self._deadline = time.monotonic() + START_TIMEOUT
            said = f"SLURM's job {self.job_id} is {self.state.lower()}: {self.reason}"
            if said != self._said and self.reason not in ("None", "Priority"):
                print(said)
            self._said = said
        return ""

    def _read_log(self) -> str:
        return self._job_log.read_text(errors="replace") if self._job_log.exists() else ""

    def pump(self, timeout: float) -> None:
        super().pump(timeout)
        if not self._look():
            for one in self.members:
                one.lose()

    def is_stopped(self, rank: int) -> bool:
        return False  # cannot be seen from here

    def kill(self, rank: int) -> None:
        """Ends the job, and so all ranks: once one has to be killed, the others cannot go on."""
        _run("scancel", "--signal=KILL", self.job_id)

    def cause_of_death(self, rank: int) -> str:
        one = self.members[rank]
        host = [other for other in self.members if other.place["host"] == one.place["host"]]
        node_is_up = any(other.is_alive for other in host)
        # A job ends a moment after its processes, and a while after its node.
        deadline = one.lost_at + (POLL + 0.1 if node_is_up else NODE_DOWN)
        while self._look() and time.monotonic() < deadline:
            time.sleep(POLL / 4)
        if not self._look():
            return self._end()
        return f"process {one.place['pid']} on {one.place['host']} is gone"
