"""What a run holds, computes and sends on an instance, and how fast it can be at most."""

from dataclasses import dataclass
from functools import cached_property

from tutorial_lib.backends import BACKENDS
from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.parallel_layers.comm import Collective
from tutorial_lib.parallel_layers.flat_shards import shard_length
from tutorial_lib.parallel_layers.utils import ensure_divisibility

from .activations import saved_bytes
from .communication import collectives
from .instances import INSTANCES, Instance
from .operations import operations, useful_operations_a_sequence
from .parameters import parameters


@dataclass(frozen=True)
class Plan:
    """A run on nodes of an instance, one rank a core.

    The three times are bounds from below: each is what one resource needs if it is never idle, at
    its published peak. A step takes at least the longest of them, and about their sum if nothing
    overlaps.

    Args:
        backend: what the ranks compute with; `xla` has no fused attention.

    Raises:
        ValueError: tensor parallelism and cores that do not fit each other, a part of a second
            node, or an unknown backend.
    """

    run: Run
    instance: Instance = INSTANCES["trn1.32xlarge"]
    backend: str = "xla"

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is not one of {', '.join(BACKENDS)}")
        if self.run.family == "bert" and not self.run.config.tie_word_embeddings:
            raise ValueError(
                "no closed form for tie_word_embeddings=False of bert: its head has a bias "
                "without a gradient"
            )
        cores, tp = self.instance.cores, self.run.tp
        fitting = "cores of a node and tensor-parallel ranks"
        ensure_divisibility(max(cores, tp), min(cores, tp), fitting)
        if self.run.world_size > cores:
            ensure_divisibility(self.run.world_size, cores, "ranks over the cores of a node")

    @property
    def nodes(self) -> int:
        return -(-self.run.world_size // self.instance.cores)

    # --- what a rank holds ------------------------------------------------------------------------

    @cached_property
    def nbytes(self) -> dict[str, float]:
        """At the end of a micro-batch's forward pass, by kind; what is needed for a moment is not
        in it.
        """
        run, held = self.run, parameters(self.run)
        count, wide = sum(p.numel() for p in held), run.wide.itemsize
        state = 2 * wide * count
        if run.zero:  # a master and two moments of this rank's shard
            state = sum(3 * wide * shard_length(p.numel(), run.dp) for p in held)
        return {
            "weights": count * run.dtype.itemsize,
            "gradients": count * (wide if run.float32_gradients else run.dtype.itemsize),
            "optimizer": state + 4 * len(held),  # and AdamW's step counters
            "saved activations": saved_bytes(run, self.backend),
        }

    @property
    def total_bytes(self) -> float:
        return sum(self.nbytes.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.instance.memory

    # --- what it does in a step -------------------------------------------------------------------

    @cached_property
    def operations(self) -> int:
        """FLOPs of a rank's matrix multiplications."""
        return operations(self.run)

    @cached_property
    def collectives(self) -> list[Collective]:
        return collectives(self.run, self.backend)

    @cached_property
    def bytes_sent(self) -> float:
        """By a rank in a step."""
        return sum(c.bytes_sent for c in self.collectives)

    @cached_property
    def moved_bytes(self) -> float:
        """Bytes that a core must at least read from and write to its memory.

        Weights are read forward and backward, gradients added to, activations written and read, all
        once a micro-batch; at the step the optimizer reads and writes its state. What is sent is
        read, what comes is written.
        """
        held = self.nbytes
        passes = 3 if self.run.checkpointing == "full" else 2
        each = passes * held["weights"] + 2 * held["gradients"] + 2 * held["saved activations"]
        step = held["gradients"] + 2 * held["optimizer"] + held["weights"]
        return self.run.accumulation * each + step + 2 * self.bytes_sent

    # --- how fast at most -------------------------------------------------------------------------

    def _spread(self, axis: str, size: int) -> tuple[int, int]:
        """Ranks of a group on one node, and nodes that it lies on."""
        cores, tp = self.instance.cores, self.run.tp
        within = max(1, min(size, cores // tp if axis == "dp" else cores))
        return within, -(-size // within)

    def _network(self) -> tuple[float, float]:
        """Bytes that leave a node, and that a core sends within its node, if every byte goes the
        shortest way.

        A collective is done in two stages, within nodes and between them, so that a node says
        nothing twice.
        """
        leaving = within = 0.0
        ranks = min(self.run.world_size, self.instance.cores)
        for c in self.collectives:
            local, nodes = self._spread(c.axis, c.group_size)
            inside = c._replace(group_size=local).bytes_sent
            between = c._replace(group_size=nodes).bytes_sent
            if c.kind == "all_gather":
                inside, between = inside * nodes, between * local
            within += inside
            leaving += between * (ranks // local)
        return leaving, within

    @cached_property
    def times(self) -> dict[str, float]:
        """Seconds of a step that each resource needs at least."""
        leaving, within = self._network()
        network = leaving / self.instance.network
        if self.instance.link is not None:
            network = max(network, within / self.instance.link)
        return {
            "arithmetic": self.operations / self.instance.operations(self.run.dtype),
            "memory": self.moved_bytes / self.instance.memory_bandwidth,
            "network": network,
        }

    @property
    def bound(self) -> str:
        """The resource that a step waits for even if all work at once."""
        return max(self.times, key=self.times.get)

    @property
    def step_time(self) -> float:
        """Seconds, at least."""
        return max(self.times.values())

    @property
    def throughput(self) -> float:
        """Sequences a second, at most."""
        return self.run.sequences / self.step_time

    @property
    def throughput_in_turn(self) -> float:
        """Sequences a second if no resource works while another does."""
        return self.run.sequences / sum(self.times.values())

    def utilisation(self, throughput: float) -> float:
        """The share of the cores' peak that so many sequences a second use for the model itself."""
        peak = self.instance.operations(self.run.dtype) * self.run.world_size
        return throughput * useful_operations_a_sequence(self.run) / peak
