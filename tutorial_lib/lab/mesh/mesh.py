"""The reader's side of several ranks in one notebook: start them, run cells on them, stop them,
whatever happens.

    mesh = Mesh(world_size=4, tp_size=2)
    mesh.start()

    %%px                     # the cell runs on every rank; the outputs come in the order of ranks
    print(rank, device)

    mesh.gather("rank")      # [0, 1, 2, 3]

One process is one rank. Ranks inherit the kernel's environment, less what a launcher left in it,
and get what `torchrun` would give them. The kernel itself never touches a device and never imports
torch-xla. Ranks run on the kernel's own machine (`tutorial_lib.lab.mesh.ranks`) or on nodes that
SLURM gives (`tutorial_lib.lab.mesh.slurm`).

What goes wrong, and then: a rank that raises, dies or never enters a collective ends the cell on
all of them with a `RankError`, which begins with the guilty rank's own error. Ranks that still wait
for it are released by closing the connections between the ranks; the next cell makes new ones. What
cannot be released is killed; then `mesh.restart()`.
"""

import atexit
import os
import pickle
import secrets
import socket
import time
from numbers import Real

import torch
from torch.distributed import TCPStore

from tutorial_lib import backends
from tutorial_lib.backends import LAUNCH_VARIABLES, check_backend, on_trainium, rank_environment
from tutorial_lib.lab.mesh import magics, worker
from tutorial_lib.lab.mesh.failures import MeshError, RankError, describe_failure
from tutorial_lib.lab.mesh.output import LiveOutput
from tutorial_lib.lab.mesh.ranks import Ranks, Task
from tutorial_lib.lab.mesh.slurm import SlurmRanks, check_slurm
from tutorial_lib.lab.mesh.watch import Watch

__all__ = ["Mesh", "MeshError", "RankError"]

# Seconds a collective waits for its peers. With XLA they may be compiling.
TIMEOUT, TIMEOUT_XLA_CPU, TIMEOUT_TRAINIUM = 20.0, 120.0, 3600.0
LONGEST = 1e9  # that torch can count
LAUNCHERS = ("local", "slurm")
_current: "Mesh | None" = None  # one mesh a kernel, as there is one %%px


class MeshInterrupted(KeyboardInterrupt):
    """The reader interrupted a cell that ran on the ranks."""

    def _render_traceback_(self) -> list[str]:
        return f"KeyboardInterrupt: {self}".splitlines()


class Mesh:
    """`world_size` ranks that run the `%%px` cells of this notebook.

    Args:
        world_size: number of ranks, one process each.
        tp_size: tensor-parallel size. If given, `initialize_model_parallel` has been called on
            every rank.
        backend: `cpu`, `cuda` or `xla`.
        timeout: seconds that a collective waits for its peers before it raises. By default 20; with
            XLA, which compiles meanwhile, 120 on CPUs and 3600 on Trainium.
        threads: threads each rank computes with.
        launcher: `local`, or `slurm` for ranks on `nodes` nodes, as many on each.
        slurm_options: further options of `sbatch`, such as `"--partition=trn1 --time=8:00:00
            --exclusive"`.

    Raises:
        ValueError: sizes that do not fit, or a backend or launcher that cannot work here; before
            anything is started.
    """

    def __init__(
        self,
        world_size: int,
        tp_size: int | None = None,
        backend: str = "cpu",
        *,
        timeout: float | None = None,
        threads: int = 1,
        launcher: str = "local",
        nodes: int = 1,
        slurm_options: str = "",
    ):
        sizes = {"world_size": world_size, "tp_size": tp_size, "threads": threads, "nodes": nodes}
        for name, size in sizes.items():
            if (name, size) != ("tp_size", None) and (
                isinstance(size, bool) or not isinstance(size, int) or size < 1
            ):
                raise ValueError(f"{name} {size!r} is not a positive whole number")
        if tp_size is not None and world_size % tp_size:
            raise ValueError(f"world_size {world_size} is not divisible by tp_size {tp_size}")
        if timeout is not None and (not isinstance(timeout, Real) or not 0 < timeout <= LONGEST):
            raise ValueError(
                f"timeout {timeout!r} is not a number of seconds between 0 and {LONGEST:.0e}"
            )
        check_backend(backend)
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher {launcher!r} is not one of {', '.join(LAUNCHERS)}")
        if launcher == "local" and (nodes > 1 or slurm_options):
            raise ValueError(
                f"nodes {nodes} and slurm_options {slurm_options!r} need launcher 'slurm', not "
                f"'local'"
            )
        if world_size % nodes:
            raise ValueError(f"world_size {world_size} is not divisible by nodes {nodes}")
        if launcher == "slurm":
            check_slurm()
        elif backend == "cuda" and world_size > torch.cuda.device_count():
            raise ValueError(
                f"world_size {world_size} needs as many GPUs, and torch sees "
                f"{torch.cuda.device_count()}"
            )
        if timeout is None:
            timeout = (
                TIMEOUT
                if backend != "xla"
                else TIMEOUT_TRAINIUM
                if on_trainium()
                else TIMEOUT_XLA_CPU
            )
        self.world_size, self.tp_size, self.backend = world_size, tp_size, backend
        self.timeout, self.threads = timeout, threads
        self.launcher, self.nodes, self.slurm_options = launcher, nodes, slurm_options
        self.pids: list[int] = []  # of the ranks, in their order
        self._ranks: Ranks | None = None
        self._remedy = (
            "start"  # what has to be called before the ranks can communicate; empty if nothing
        )

    # ---- life ----

    def start(self) -> None:
        """Starts the ranks, lets them reduce a number together and prints one line. Replaces a mesh
        that is up.
        """
        global _current
        began = time.perf_counter()
        if _current is not None:
            _current.close()
        _current = self
        atexit.register(self.close)
        try:
            self._ranks = self._start_ranks()
            self.pids = [rank.place["pid"] for rank in self._ranks.members]
            self._boot()
            self._join()
        except KeyboardInterrupt:
            self.close()
            raise MeshInterrupted(
                "the ranks were not up yet, and are ended: mesh.start() starts them"
            ) from None
        except BaseException:
            self.close()
            raise
        print(f"{self}, up in {time.perf_counter() - began:.1f} s")

    def _start_ranks(self) -> Ranks:
        stale = {
            *LAUNCH_VARIABLES,
            *(name for name in os.environ if name.startswith("TORCHELASTIC_")),
        }
        environment = {name: text for name, text in os.environ.items() if name not in stale}
        environment |= rank_environment(
            self.backend, 0, self.world_size, master_port=0, threads=self.threads
        )
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        if self.launcher == "local":
            return Ranks(self.world_size, environment)
        return SlurmRanks(
            self.world_size, environment, self.nodes, self.threads, self.slurm_options
        )

    def __str__(self) -> str:
        axes = ""
        if self.tp_size is not None:
            axes = f" = {self.world_size // self.tp_size} data × {self.tp_size} tensor parallel"
        nodes = f" on {self.nodes} node{'s' * (self.nodes > 1)}" if self.launcher != "local" else ""
        return (
            f"{self.world_size} rank{'s' * (self.world_size > 1)}{nodes}{axes}, backend "
            f"{self.backend}"
        )

    def _boot(self) -> None:
        """Gives each rank what `torchrun` would give it, before torch-xla is imported there."""
        places = [rank.place for rank in self._ranks.members]
        hosts = [place["host"] for place in places]
        booting = {}
        for rank, host in enumerate(hosts):
            environment = rank_environment(
                self.backend,
                rank,
                self.world_size,
                master_addr=self._ranks.address,
                master_port=0,  # `_join` sets it
                local_rank=hosts[:rank].count(host),
                local_world_size=hosts.count(host),
                threads=self.threads,
                root_addr=places[0]["address"],
            )
            booting[rank] = self._ranks.members[rank].start("call", worker.boot, environment)
        self._wait(booting)

    def _join(self) -> None:
        """All ranks join a new process group, and show that they receive from one another."""
        self._call(worker.leave)
        address, key = self._ranks.address, secrets.token_hex(16)
        # The kernel serves the store at which the ranks meet: its port is bound before a rank hears
        # of it.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
        port = server.getsockname()[1]
        self._ranks.store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        self._call(worker.join, self.backend, self.timeout, self.tp_size, address, port, key)
        self._remedy = ""
        self.check(quiet=True)

    def check(self, quiet: bool = False) -> None:
        """Raises unless every rank answers and an all-reduce over all of them is right."""
        self._make_ready()
        began = time.perf_counter()
        answers = self._call(worker.probe)
        expected = sum(range(self.world_size))
        if answers != [(rank, expected) for rank in range(self.world_size)]:
            raise MeshError(
                f"all-reduce of the ranks gave {answers}, not {expected} on each in rank order"
            )
        if not quiet:
            print(f"{self}: all answer, all-reduce is right, {time.perf_counter() - began:.2f} s")

    def reset(self) -> None:
        """A new process group on the same ranks. Their variables stay, but for groups made before.

        A tensor that was being reduced in place when a collective failed may hold a part of the
        sum.

        Raises:
            MeshError: a rank is dead, or the backend cannot do it: `restart` is needed.
        """
        if self._remedy in ("start", "restart"):
            raise MeshError(f"a reset is not enough here: call mesh.{self._remedy}()")
        if self.backend == "xla":
            raise MeshError(
                "XLA keeps its connections for as long as its process lives: call mesh.restart()"
            )
        began = time.perf_counter()
        self._remedy = "reset"
        self._join()
        print(f"{self}, reset in {time.perf_counter() - began:.1f} s")

    def restart(self) -> None:
        """New ranks. All variables on them are lost."""
        self.start()

    def recover(self) -> None:
        """Does what the ranks need after a cell that failed: nothing, `reset`, or `restart` where
        that is not enough.
        """
        if self._remedy:
            {"start": self.start, "reset": self.reset, "restart": self.restart}[self._remedy]()

    def close(self) -> None:
        """Ends the ranks and removes every trace of them. May be called at any time, and again."""
        global _current
        if _current is self:
            _current = None
        atexit.unregister(self.close)
        self._remedy = "start"
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def __enter__(self) -> "Mesh":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- work ----

    def run(self, cell: str, ranks: list[int] | None = None) -> None:
        """Runs a cell on the ranks (all by default) and prints what they print; `%%px` calls it."""
        ranks = list(range(self.world_size)) if ranks is None else ranks
        if not ranks:
            raise ValueError("no rank was named to run the cell on")
        for rank in ranks:
            if not 0 <= rank < self.world_size:
                raise ValueError(
                    f"rank {rank} is not one of the {self.world_size} ranks 0 to "
                    f"{self.world_size - 1}"
                )
        self._make_ready()
        tasks = {rank: self._ranks.members[rank].start("cell", cell) for rank in ranks}
        shown = LiveOutput(tasks)
        try:
            self._wait(tasks, shown.tick)
        finally:
            shown.finish(self.world_size)

    def push(self, **values) -> None:
        """Sets variables on every rank."""
        self._make_ready()
        self._call(worker.assign, values)

    def gather(self, expression: str) -> list:
        """The value of a variable (or expression) on each rank, in rank order; tensors are copied
        to the host.
        """
        self._make_ready()
        return self._call(worker.value, expression)

    def compilations(self) -> int:
        """How many graphs the ranks have compiled since they started, all together; 0 on a backend
        that traces none.
        """
        self._make_ready()
        return sum(self._call(backends.compilations))

    def hlo_texts(self) -> list[str]:
        """Rank 0's graphs as the compiler got them, for `tutorial_lib.xla_cpu.graphs`, in the order
        of their first use.

        None on Trainium, where torch-xla keeps them to itself, and on backends that trace nothing.
        """
        self._make_ready()
        return self._call(worker.hlo_texts)[0]

    def _make_ready(self) -> None:
        """Resets the ranks if that is all they need after a failure; raises MeshError if they need
        more.
        """
        if self._remedy == "reset":
            self.reset()
        if self._remedy:
            raise MeshError(f"no ranks are up: call mesh.{self._remedy}()")

    def _call(self, function, *args) -> list:
        tasks = {
            rank: one.start("call", function, *args) for rank, one in enumerate(self._ranks.members)
        }
        self._wait(tasks)
        return [pickle.loads(task.value) for task in tasks.values()]

    def _wait(self, tasks: dict[int, Task], on_tick=lambda: None) -> None:
        """Waits for all ranks, and raises what went wrong on any."""
        before, self._remedy = self._remedy, "restart"  # should anything end this early
        watch = Watch(self._ranks, tasks, self.timeout)
        watch.wait(on_tick)
        if not watch.dead:
            self._remedy = before
            if not before and (watch.released or not watch.in_step(self.world_size)):
                self._remedy = "reset" if self._leave() else "restart"
        if watch.interrupted:
            raise MeshInterrupted(self._advice())
        if watch.reports:
            finished = tasks.keys() - watch.reports.keys()
            text = "\n".join([describe_failure(watch.reports, finished), self._advice()])
            raise RankError(text.strip(), watch.reports)

    def _leave(self) -> bool:
        """Closes a process group whose ranks may be out of step; whether a new one can be made."""
        if self.backend == "xla":  # it keeps its connections for as long as its process lives
            return False
        self._remedy = "restart"
        leaving = {
            rank: one.start("call", worker.leave) for rank, one in enumerate(self._ranks.members)
        }
        watch = Watch(self._ranks, leaving, self.timeout)
        watch.wait()
        return not watch.dead and not watch.reports

    def _advice(self) -> str:
        return {
            "": "",
            "start": "",
            "reset": "The ranks may be out of step, so their process group is closed: the next "
            "cell, or mesh.reset(), "
            "makes a new one and keeps their variables.",
            "restart": "mesh.restart() starts new ranks.",
        }[self._remedy]


def _mesh_that_is_up() -> Mesh:
    if _current is None:
        raise MeshError("no ranks are up: call mesh.start()")
    return _current


magics.register(_mesh_that_is_up)
