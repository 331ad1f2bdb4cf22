"""The reader's side of several ranks in one notebook: start them, run cells on them, stop them, whatever happens.

    mesh = Mesh(world_size=4, tp_size=2)
    mesh.start()

    %%px                     # the cell runs on every rank; its output comes in the order of the ranks
    print(rank, device)

    mesh.gather("rank")      # [0, 1, 2, 3]

One ipyparallel engine is one rank. Engines inherit the kernel's environment, less what a launcher
left in it, and get what `torchrun` would give them. The kernel itself never touches a device and
never imports torch-xla. Ranks run on the kernel's own machine (`tutorial_lib.lab.mesh.engines`) or on
nodes that SLURM gives (`tutorial_lib.lab.mesh.slurm`). They are assigned by where an engine runs, never
by its id.

What goes wrong, and then: a rank that raises, dies or never enters a collective ends the cell on all of them with a
`RankError`, which begins with the guilty rank's own error. Ranks that still wait for it are released by closing the
connections between the ranks; `mesh.reset()` makes new ones. What cannot be released is killed; then `mesh.restart()`.
"""

import atexit
import os
import time
from numbers import Real

import ipyparallel as ipp
import torch
from IPython import get_ipython

from tutorial_lib.backends import LAUNCH_VARIABLES, check_backend, on_trainium, rank_environment
from tutorial_lib.lab.mesh import engine, magics
from tutorial_lib.lab.mesh.engines import Engines, LocalLauncher
from tutorial_lib.lab.mesh.report import MeshError, RankError, describe_failure
from tutorial_lib.lab.mesh.slurm import SlurmLauncher, check_slurm
from tutorial_lib.lab.mesh.watch import Rendezvous, Watch

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
        tp_size: tensor-parallel size. If given, `initialize_model_parallel` has been called on every rank.
        backend: `cpu`, `cuda` or `xla`.
        timeout: seconds that a collective waits for its peers before it raises. By default 20; with XLA, which
            compiles meanwhile, 120 on CPUs and 3600 on Trainium.
        threads: threads each rank computes with.
        launcher: `local`, or `slurm` for ranks on `nodes` nodes, as many on each.
        slurm_options: further options of `sbatch`, such as `"--partition=trn1 --time=8:00:00 --exclusive"`.

    Raises:
        ValueError: sizes that do not fit, or a backend or launcher that cannot work here; before anything is started.
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
                f"nodes {nodes} and slurm_options {slurm_options!r} need launcher 'slurm', not 'local'"
            )
        if world_size % nodes:
            raise ValueError(f"world_size {world_size} is not divisible by nodes {nodes}")
        if launcher == "slurm":
            check_slurm()
        elif backend == "cuda" and world_size > torch.cuda.device_count():
            raise ValueError(
                f"world_size {world_size} needs as many GPUs, and torch sees {torch.cuda.device_count()}"
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
        self._engines: Engines | None = None
        self._rendezvous: Rendezvous | None = None
        self._remedy = (
            "start"  # what has to be called before the ranks can talk again; empty if nothing
        )

    # ---- life ----

    def start(self) -> None:
        """Starts the ranks, lets them reduce a number together and prints one line. Replaces a mesh that is up."""
        global _current
        began = time.perf_counter()
        if _current is not None:
            _current.close()
        _current = self
        atexit.register(self.close)
        try:
            local = self.launcher == "local"
            launcher = (
                LocalLauncher()
                if local
                else SlurmLauncher(self.nodes, self.threads, self.slurm_options)
            )
            self._engines = Engines(self.world_size, launcher)
            self._address = launcher.address
            self.pids = [process.pid for process in self._engines.processes]
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
        if get_ipython() is not None:
            magics.register(self)
        print(f"{self}, up in {time.perf_counter() - began:.1f} s")

    def __str__(self) -> str:
        axes = ""
        if self.tp_size is not None:
            axes = f" = {self.world_size // self.tp_size} data × {self.tp_size} tensor parallel"
        nodes = f" on {self.nodes} node{'s' * (self.nodes > 1)}" if self.launcher != "local" else ""
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}{nodes}{axes}, backend {self.backend}"

    def _boot(self) -> None:
        """Engines become ranks: each gets what `torchrun` would give it, before torch is imported there."""
        places = self._engines.places
        hosts = [place["host"] for place in places]
        stale = [
            name
            for name in os.environ
            if name in LAUNCH_VARIABLES or name.startswith("TORCHELASTIC_")
        ]
        booting = {}
        for rank, host in enumerate(hosts):
            environment = rank_environment(
                self.backend,
                rank,
                self.world_size,
                master_addr=self._address,
                master_port=0,  # `_join` sets it
                local_rank=hosts[:rank].count(host),
                local_world_size=hosts.count(host),
                threads=self.threads,
                root_addr=places[0]["address"],
            )
            # The kernel serves the rendezvous, as torchrun's agent does: its port is bound before a rank hears of it.
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            booting[rank] = self._engines.views[rank].apply_async(engine.boot, environment, stale)
        self._wait(booting)

    def _join(self) -> None:
        """All ranks join a new process group, and show that they hear one another."""
        self._call(engine.leave)
        self._rendezvous = there = Rendezvous(self._address, self._engines.places)
        ports = there.port, there.control_port
        self._call(engine.join, self.backend, self.timeout, self.tp_size, self._address, *ports)
        self._remedy = ""
        self.check(quiet=True)

    def check(self, quiet: bool = False) -> None:
        """Raises unless every rank answers and an all-reduce over all of them is right."""
        self._require_group()
        began = time.perf_counter()
        answers = self._call(engine.probe)
        expected = sum(range(self.world_size))
        if answers != [(rank, expected) for rank in range(self.world_size)]:
            raise MeshError(
                f"all-reduce of the ranks gave {answers}, not {expected} on each in rank order"
            )
        if not quiet:
            print(f"{self}: all answer, all-reduce is right, {time.perf_counter() - began:.2f} s")

    def reset(self) -> None:
        """A new process group on the same ranks. Their variables stay, but for groups made before.

        A tensor that was being reduced in place when a collective failed may hold a part of the sum.

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
        self._rendezvous = None
        if self._engines is not None:
            self._engines.close()
            self._engines = None

    def __enter__(self) -> "Mesh":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- work ----

    def run(self, cell: str, ranks: list[int] | None = None) -> None:
        """Runs a cell on the ranks (all by default) and prints what they print; `%%px` calls it."""
        self._require_ranks()
        ranks = list(range(self.world_size)) if ranks is None else ranks
        if not ranks:
            raise ValueError("no rank was named to run the cell on")
        for rank in ranks:
            if not 0 <= rank < self.world_size:
                raise ValueError(
                    f"rank {rank} is not one of the {self.world_size} ranks 0 to {self.world_size - 1}"
                )
        tasks = {
            rank: self._engines.views[rank].execute(cell, silent=False, block=False)
            for rank in ranks
        }
        shown = magics.LiveOutput(tasks)
        try:
            self._wait(tasks, shown.tick)
        finally:
            shown.finish(self.world_size)

    def push(self, **values) -> None:
        """Sets variables on every rank."""
        self._call(engine.assign, values)

    def gather(self, expression: str) -> list:
        """The value of a variable (or expression) on each rank, in rank order; tensors are copied to the host."""
        return self._call(engine.value, expression)

    def compilations(self) -> int:
        """How many graphs the ranks have compiled since they started, all together; 0 on a backend that traces none."""
        return sum(self._call(engine.compilations))

    def hlo_texts(self) -> list[str]:
        """Rank 0's graphs as the compiler got them, for `tutorial_lib.xla_cpu.graphs`, in the order of their first use.

        None on Trainium, where torch-xla keeps them to itself, and on backends that trace nothing.
        """
        return self._call(engine.hlo_texts)[0]

    def _call(self, function, *args) -> list:
        self._require_ranks()
        tasks = {
            rank: view.apply_async(function, *args) for rank, view in enumerate(self._engines.views)
        }
        self._wait(tasks)
        return [task.get() for task in tasks.values()]

    def _wait(self, tasks: dict[int, ipp.AsyncResult], on_tick=lambda: None) -> None:
        """Waits for all ranks, and raises what went wrong on any."""
        watch = Watch(tasks, self._engines.processes, self._rendezvous, self.timeout)
        try:
            watch.wait(on_tick)
        except KeyboardInterrupt:
            self._after(watch)
            raise MeshInterrupted(self._advice()) from None
        if watch.reports:
            self._after(watch)
            finished = tasks.keys() - watch.reports.keys()
            text = "\n".join([describe_failure(watch.reports, finished), self._advice()])
            raise RankError(text.strip(), watch.reports)

    def _after(self, watch: Watch) -> None:
        """Decides what the ranks need now, and closes a process group whose ranks may be out of step."""
        if watch.dead:
            self._remedy = "restart"
            return
        if self._remedy or (not watch.released and watch.in_step(self.world_size)):
            return
        self._remedy = "restart" if self.backend == "xla" else "reset"
        tasks = {
            rank: view.apply_async(engine.leave) for rank, view in enumerate(self._engines.views)
        }
        leaving = Watch(tasks, self._engines.processes, self._rendezvous, self.timeout)
        leaving.wait()
        if leaving.dead or leaving.reports:
            self._remedy = "restart"

    def _advice(self) -> str:
        return {
            "": "",
            "start": "",
            "reset": "The ranks may be out of step, so their process group is closed: "
            "mesh.reset() makes a new one and keeps their variables.",
            "restart": "mesh.restart() starts new ranks.",
        }[self._remedy]

    def _require_ranks(self) -> None:
        if self._engines is None or self._remedy == "restart":
            raise MeshError(f"no ranks are up: call mesh.{self._remedy}()")

    def _require_group(self) -> None:
        if self._remedy:
            raise MeshError(f"the process group is closed: call mesh.{self._remedy}()")
