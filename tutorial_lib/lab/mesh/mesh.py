"""The reader's side of several ranks in one notebook: start them, run cells on them, stop them,
whatever happens.

    mesh = Mesh(world_size=4, tp_size=2)
    mesh.start()

    %%px                     # the cell runs on every rank; the outputs come in the order of ranks
    print(rank, device)

    mesh.gather("rank")      # [0, 1, 2, 3]

One process is one rank. Ranks inherit the kernel's environment and get what `torchrun` would give
them. The kernel itself never touches a device and never imports torch-xla.

A rank that raises, dies or never enters a collective ends the cell on all of them with a
`RankError`, which begins with the guilty rank's own error. If the ranks may be out of step then,
the next cell makes a new process group. Ranks that cannot be released are killed; `mesh.restart()`
starts new ones.
"""

import atexit
import os
import pickle
import secrets
import socket
import time
from numbers import Real

from torch.distributed import TCPStore

from tutorial_lib import backends, xla_cpu
from tutorial_lib.lab.mesh import magics, nursery, worker
from tutorial_lib.lab.mesh.failures import MeshError, MeshInterrupted, RankError, describe_failure
from tutorial_lib.lab.mesh.output import LiveOutput
from tutorial_lib.lab.mesh.ranks import Ranks
from tutorial_lib.lab.mesh.slurm import SlurmRanks, check_slurm
from tutorial_lib.lab.mesh.watch import Watch
from tutorial_lib.parallel_layers.utils import ensure_divisibility, ensure_positive

# Seconds a collective waits for its peers. With XLA and on Trainium they may be compiling.
TIMEOUT, TIMEOUT_XLA_CPU, TIMEOUT_TRAINIUM = 20.0, 120.0, 3600.0
LONGEST = 1e9  # that torch can count
ADVICE = {
    "reset": "The ranks may be out of step: the next cell, or mesh.reset(), makes a new process "
    "group and keeps their variables.",
    "restart": "mesh.restart() starts new ranks.",
}
_current: "Mesh | None" = None  # one mesh a kernel, as there is one %%px


class Mesh:
    """`world_size` ranks that run the `%%px` cells of this notebook.

    Args:
        world_size: number of ranks, one process each.
        tp_size: tensor-parallel size. If given, `start` calls `initialize_model_parallel` on
            every rank.
        backend: one of `backends.BACKENDS`, or `auto` for the best that works here.
        timeout: seconds that a collective waits for its peers before it raises. By default 20;
            where a compiler runs meanwhile, 120 with XLA on CPUs and 3600 on Trainium.
        launcher: `local`, or `slurm` for ranks on `nodes` nodes, equally many on each. Further
            options of `sbatch` are variables, such as `SBATCH_PARTITION`.

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
        launcher: str = "local",
        nodes: int = 1,
    ):
        replica = 1 if tp_size is None else tp_size
        ensure_positive(world_size=world_size, tp_size=replica, nodes=nodes)
        ensure_divisibility(world_size, replica, "world_size over tp_size")
        ensure_divisibility(world_size, nodes, "world_size over nodes")
        if launcher == "slurm":
            check_slurm()
        elif launcher != "local":
            raise ValueError(f"launcher {launcher!r} is not one of local, slurm")
        elif nodes > 1:
            raise ValueError(f"nodes {nodes} needs launcher 'slurm', not 'local'")
        backend = backends.check_backend(backend, world_size if launcher == "local" else 1)
        if timeout is None and backends.on_trainium(backend):
            timeout = TIMEOUT_TRAINIUM
        elif timeout is None:
            timeout = TIMEOUT_XLA_CPU if backend == "xla" else TIMEOUT
        if not isinstance(timeout, Real) or not 0 < timeout <= LONGEST:
            raise ValueError(f"timeout {timeout!r} is not between 0 and {LONGEST:.0e} seconds")
        self.world_size, self.tp_size, self.backend = world_size, tp_size, backend
        self.timeout, self.launcher, self.nodes = timeout, launcher, nodes
        self.pids: list[int] = []  # of the ranks, in their order
        self._ranks: Ranks | None = None
        # What has to be called before the ranks can communicate; empty if nothing.
        self._remedy = "start"

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
        # Whenever torch connects to a store, it asks the name server for the address's name. One
        # that drops the question costs 5 to 10 s by default: longer than some time-outs.
        os.environ.setdefault("RES_OPTIONS", "timeout:1")
        # What a launcher left would mislead torch-xla; the other variables are set by `join`.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        try:
            if self.launcher == "local":
                preload = nursery.PRELOAD_XLA if self.backend == "xla" else nursery.PRELOAD
                self._ranks = Ranks(self.world_size, environment, preload)
            else:
                self._ranks = SlurmRanks(self.world_size, environment, self.nodes)
            self.pids = [rank.place["pid"] for rank in self._ranks.members]
            self._join()
        except BaseException as error:
            self.close()
            if isinstance(error, KeyboardInterrupt):
                error = MeshInterrupted(
                    "the ranks were not up yet, and are ended: mesh.start() starts them"
                )
            raise error from None
        print(f"{self}, up in {time.perf_counter() - began:.1f} s")

    restart = start

    def __str__(self) -> str:
        axes = ""
        if self.tp_size is not None:
            axes = f" = {self.world_size // self.tp_size} data × {self.tp_size} tensor parallel"
        nodes = f" on {self.nodes} node{'s' * (self.nodes > 1)}" if self.launcher != "local" else ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f"{ranks}{nodes}{axes}, backend {self.backend}"

    def _join(self) -> None:
        """All ranks join a new process group, and show that they receive from one another."""
        address, key = self._ranks.address, secrets.token_hex(16)
        # The kernel serves the store at which the ranks meet: its port is bound before a rank hears
        # of it.
        server = socket.create_server((address, 0))
        port = server.getsockname()[1]
        self._ranks.store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        places = [one.place for one in self._ranks.members]
        hosts = [place["host"] for place in places]
        for rank, one in enumerate(self._ranks.members):
            before, together = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
            environment = backends.rank_environment(
                self.backend, rank, self.world_size, master_addr=address, master_port=port,
                local_rank=before, local_world_size=together,
                root_addr=places[0]["address"],
            )  # fmt: skip
            join = worker.join, environment, self.backend, self.timeout, self.tp_size, key
            one.start("call", *join)
        self._wait(range(self.world_size))
        self._probe()
        self._remedy = ""

    def check(self) -> None:
        """Raises unless every rank answers and an all-reduce over all of them is right."""
        self._make_ready()
        began = time.perf_counter()
        self._probe()
        print(f"{self}: all answer, all-reduce is right, {time.perf_counter() - began:.2f} s")

    def _probe(self) -> None:
        answers, expected = self._call(worker.probe), sum(range(self.world_size))
        if answers != [(rank, expected) for rank in range(self.world_size)]:
            raise MeshError(
                f"all-reduce of the ranks gave {answers}, not {expected} on each in rank order"
            )

    def reset(self) -> None:
        """Makes a new process group on the same ranks. Their variables stay, except earlier groups.

        A tensor that was being reduced in place when a collective failed may hold a part of the
        sum.

        Raises:
            MeshError: a rank is dead, or the backend is XLA, which keeps its connections for as
                long as its process lives: `restart` is needed.
        """
        if self.backend == "xla" or self._remedy in ("start", "restart"):
            needed = "start" if self._remedy == "start" else "restart"
            raise MeshError(f"a reset is not enough here: call mesh.{needed}()")
        began = time.perf_counter()
        self._remedy = "reset"
        self._call(worker.leave)
        self._join()
        print(f"{self}, reset in {time.perf_counter() - began:.1f} s")

    def recover(self) -> None:
        """Does what the ranks need after a cell that failed: nothing, `reset` or `restart`."""
        if self._remedy:
            getattr(self, self._remedy)()

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

    # ---- work ----

    def run(self, cell: str, ranks: list[int] | None = None) -> None:
        """Runs a cell on the ranks (all by default) and prints what they print; `%%px` calls it."""
        everyone = range(self.world_size)
        ranks = list(everyone) if ranks is None else ranks
        if not ranks or not set(ranks) <= set(everyone):
            raise ValueError(f"ranks {ranks}: give one or more of 0 to {everyone[-1]}")
        self._make_ready()
        running = {rank: self._ranks.members[rank] for rank in ranks}
        for one in running.values():
            one.start("cell", cell)
        shown = LiveOutput(running)
        try:
            self._wait(running, shown.tick)
        finally:
            shown.finish(self.world_size)

    def push(self, **values) -> None:
        """Sets variables on every rank."""
        self._make_ready()
        self._call(worker.assign, values)

    def gather(self, expression: str) -> list:
        """The value of an expression on each rank, in rank order; tensors come to the host."""
        self._make_ready()
        return self._call(worker.value, expression)

    def compilations(self) -> int:
        """How many graphs all ranks together have compiled; 0 on a backend that traces none."""
        self._make_ready()
        return sum(self._call(backends.compilations))

    def hlo_texts(self) -> list[str]:
        """Rank 0's graphs as the compiler got them, in the order of their first use; none on
        Trainium, where torch-xla keeps them to itself, and on backends that trace nothing.
        """
        self._make_ready()
        return self._call(xla_cpu.hlo_texts)[0]

    def _make_ready(self) -> None:
        """Resets the ranks if an earlier failure requires it; raises if a reset is not enough."""
        if self._remedy == "reset":
            self.reset()
        if self._remedy:
            raise MeshError(f"no ranks are up: call mesh.{self._remedy}()")

    def _call(self, function, *arguments) -> list:
        for one in self._ranks.members:
            one.start("call", function, *arguments)
        self._wait(range(self.world_size))
        return [pickle.loads(one.value) for one in self._ranks.members]

    def _wait(self, busy, on_tick=lambda: None) -> None:
        """Returns when the ranks that are busy have ended their task; raises what went wrong."""
        before, self._remedy = self._remedy, "restart"  # should anything end this early
        watch = Watch(self._ranks, list(busy))
        watch.wait(on_tick)
        if not watch.dead:
            self._remedy = before
            if not before and (watch.released or not watch.in_step(self.world_size)):
                self._remedy = "restart" if self.backend == "xla" else "reset"
        advice = ADVICE.get(self._remedy, "")
        if watch.interrupted:
            raise MeshInterrupted(advice)
        if watch.reports:
            finished = set(busy) - watch.reports.keys()
            text = f"{describe_failure(watch.reports, finished)}\n{advice}"
            raise RankError(text.strip())


def _mesh_that_is_up() -> Mesh:
    if _current is None:
        raise MeshError("no ranks are up: call mesh.start()")
    return _current


magics.register(_mesh_that_is_up)
