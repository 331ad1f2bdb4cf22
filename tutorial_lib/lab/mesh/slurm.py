"""Ranks on the nodes of a SLURM cluster: one job is one mesh.

The notebook's kernel runs where `sbatch` does, on a head node say, and needs no accelerator. Node
and kernel have to share the folder of the repository. The ranks connect to the kernel, which
listens on the network that it shares with them and lets in whoever proves that he knows a key. What
is known of a rank's process comes from its connection and
from the state of the job: SLURM ends the job if a node fails, if somebody cancels it or if its time
is over, and then all of its ranks are gone.
"""

import getpass
import json
import os
import re
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import time
from functools import cached_property
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from tutorial_lib.lab.mesh import nursery
from tutorial_lib.lab.mesh.failures import MeshError
from tutorial_lib.lab.mesh.ranks import START_TIMEOUT, Rank, Ranks, limit
from tutorial_lib.lab.paths import resolve
from tutorial_lib.network import address_towards

POLL = 1.0  # seconds between looks at the job
NODE_DOWN = 45.0  # seconds after which SLURM has noticed that a node is gone
GOING_ON = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING")
BATCH_TEMPLATE = """#!/bin/sh
#SBATCH --job-name={{name}}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={{ranks}}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --cpus-per-task={threads}
#SBATCH --output={{directory}}/job.log
#SBATCH --export=ALL
#SBATCH --no-requeue
{options}
# A rank that dies is reported; the others are not killed with it.
exec srun --kill-on-bad-exit=0 {{command}}
"""


def batch_file(nodes: int, ranks_per_node: int, threads: int = 1, options: list[str] = ()) -> str:
    """The file of a mesh's job; what stands in braces is filled in when it is submitted.

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


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, env=env)
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
        if self.state in ("COMPLETING", *GOING_ON) and time.monotonic() - self._looked_at > POLL:
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
        """Why it ended, the same for all ranks; with a node that is gone it may stay COMPLETING for
        minutes, but the reason is there.
        """
        deadline = time.monotonic() + 20 * POLL
        while self.look() == "COMPLETING" and self.reason == "None" and time.monotonic() < deadline:
            time.sleep(POLL / 4)
        because = "" if self.reason == "None" else f", {self.reason}"
        return f"SLURM's job {self.job_id} ended: {self.state}{because}"


class SlurmRanks(Ranks):
    """Ranks in a job of `nodes` nodes, as many on each.

    Args:
        count: how many.
        environment: that they start with.
        nodes: how many.
        threads: cores for each rank.
        options: further ones of `sbatch`, such as `"--partition=trn1 --time=8:00:00 --exclusive"`.

    Raises:
        ValueError: SLURM is not there.
        MeshError: it does not answer, or the ranks did not come up.
    """

    def __init__(
        self,
        count: int,
        environment: dict[str, str],
        nodes: int,
        threads: int = 1,
        options: str = "",
    ):
        check_slurm()
        self.address = _address_for_nodes()
        self.members = []
        name = f"mesh-{secrets.token_hex(6)}"
        folder = resolve("build/mesh")  # the nodes have to see it
        folder.mkdir(parents=True, exist_ok=True)
        end = ["scancel", f"--name={name}", f"--user={getpass.getuser()}"]
        self._open(environment, folder=folder, end=end)
        try:
            self._key = secrets.token_bytes(32)
            with socket.create_server((self.address, 0), backlog=2 * count) as server:
                script = batch_file(nodes, count // nodes, threads, shlex.split(options))
                self.job = self._submit(script, name, count, environment, server.getsockname()[1])
                self._accept(server, count)
            self._wait_until_up()
            self.members.sort(key=lambda one: [one.place[of] for of in ("node", "host", "pid")])
        except BaseException:
            self.close()
            raise

    def _submit(
        self, script: str, name: str, count: int, environment: dict[str, str], port: int
    ) -> Job:
        meeting = Path(self.directory, "meeting.json")
        meeting.touch(mode=0o600)
        meeting.write_text(json.dumps([self.address, port, self._key.hex()]))
        command = nursery.python("slurm", str(meeting), self.directory)
        filled = script.format(
            name=name, ranks=count, directory=self.directory, command=shlex.join(command)
        )
        file = Path(self.directory, "job.sbatch")
        file.write_text(filled)
        return Job(
            _run("sbatch", "--parsable", str(file), env=environment).strip().partition(";")[0]
        )

    def _accept(self, server: socket.socket, count: int) -> None:
        """Lets the ranks in, each with two connections: it names itself by its job step's task
        number.
        """
        waiting: dict[str, Connection] = {}
        deadline, said = time.monotonic() + START_TIMEOUT, None
        while len(self.members) < count:
            state, reason = self.job.look(), self.job.reason
            if state in ("PENDING", "CONFIGURING"):
                deadline = time.monotonic() + START_TIMEOUT
                if (state, reason) != said and reason not in ("None", "Priority"):
                    print(f"SLURM's job {self.job.job_id} is {state.lower()}: {reason}")
                said = state, reason
            if not self.job.goes_on:
                raise MeshError(self._failure(len(self.members), self.job.end))
            if time.monotonic() > deadline:
                cause = f"not up in {START_TIMEOUT:.0f} s"
                raise MeshError(self._failure(len(self.members), cause))
            if not select.select([server], [], [], 0.1)[0]:
                continue
            connection = Connection(server.accept()[0].detach())
            limit(connection)
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                task = connection.recv_bytes(64).decode()
            except (AuthenticationError, EOFError, OSError):  # a stranger
                connection.close()
                continue
            if task in waiting:
                self.members.append(Rank(waiting.pop(task), connection))
            else:
                waiting[task] = connection

    def pump(self, timeout: float) -> None:
        super().pump(timeout)
        if not self.job.goes_on:
            for one in self.members:
                one.lose()

    def kill(self, rank: int) -> None:
        """Ends the job, and so all ranks: a rank that has to be killed leaves none that could go
        on.
        """
        _run("scancel", "--signal=KILL", self.job.job_id)

    def cause_of_death(self, rank: int) -> str:
        one = self.members[rank]
        host = [other for other in self.members if other.place["host"] == one.place["host"]]
        node_is_up = any(other.is_alive for other in host)
        # A job ends a moment after its processes, and a while after its node.
        deadline = one.lost_at + (POLL + 0.1 if node_is_up else NODE_DOWN)
        while self.job.goes_on and time.monotonic() < deadline:
            time.sleep(POLL / 4)
        if not self.job.goes_on:
            return self.job.end
        return f"process {one.place['pid']} on {one.place['host']} is gone"


def main(meeting: str, directory: str) -> None:
    """What a task of the job runs: a rank that connects to the kernel."""
    from tutorial_lib.lab.mesh import worker

    address, port, key = json.loads(Path(meeting).read_text())
    connections = []
    for _ in range(2):
        connection = Connection(socket.create_connection((address, port)).detach())
        answer_challenge(connection, bytes.fromhex(key))
        deliver_challenge(connection, bytes.fromhex(key))
        connection.send_bytes(os.environ["SLURM_PROCID"].encode())
        connections.append(connection)
    worker.serve(*connections, directory)
