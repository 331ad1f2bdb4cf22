"""Machines, as far as they bound a training step: peaks that are published, which no program
exceeds.
"""

from dataclasses import dataclass, fields

import torch

from tutorial_lib.parallel_layers.utils import ensure_positive

GIGABIT = 1e9 / 8  # bytes


@dataclass(frozen=True)
class Instance:
    """One node. Rates are per second, and for each direction where there are two."""

    name: str
    cores: int
    memory: float  # bytes of a core
    half_operations: float  # of a core in 2-byte numbers
    single_operations: float  # in float32
    memory_bandwidth: float  # bytes, of a core
    network: float  # bytes, of the node
    # Bytes that a core sends to others of its node; None where that is not published.
    link: float | None = None

    def __post_init__(self):
        ensure_positive(cores=self.cores)
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} {value} of {self.name} is not above 0")

    def operations(self, dtype: torch.dtype) -> float:
        """Of a core in a second."""
        return self.half_operations if dtype.itemsize == 2 else self.single_operations


def _trainium(name: str, chips: int, cores: int, memory: int, rates, network: float) -> Instance:
    """By the vendor's pages on the architecture of these chips and instances
    (awsdocs-neuron.readthedocs-hosted.com, about-neuron/arch/neuron-hardware).

    Args:
        cores: of a chip; from trn2 on logical ones, of two physical cores each.
        memory: GiB of a chip.
        rates: of a chip: operations in 2 bytes, in float32, bytes of its memory.
        network: of all chips.
    """
    rates = (rate / cores for rate in rates)
    # NeuronLink's rates are published for a chip and not for a direction, so they bound nothing.
    return Instance(name, chips * cores, memory * 2**30 / cores, *rates, network * GIGABIT)


INSTANCES = {
    machine.name: machine
    for machine in (
        _trainium("trn1.32xlarge", 16, 2, 32, (190e12, 47.5e12, 820e9), 800),
        _trainium("trn1n.32xlarge", 16, 2, 32, (190e12, 47.5e12, 820e9), 1600),
        _trainium("trn2.48xlarge", 16, 4, 96, (667e12, 181e12, 2.9e12), 3200),
        # A server of an UltraServer, Gen1 (16 chips) and Gen2 (4), with its share of the network.
        _trainium("trn3-gen1", 16, 4, 144, (671e12, 183e12, 4.9e12), 12800 / 4),
        _trainium("trn3-gen2", 4, 4, 144, (671e12, 183e12, 4.9e12), 28800 / 36),
        # Eight H100 SXM, without sparsity: NVIDIA's white paper "H100 Tensor Core GPU
        # Architecture", and for the memory's 3.35 TB/s the data sheet. NVLink's 900 GB/s are of
        # both directions. A DGX H100 has a 400 Gb/s adapter for each.
        Instance("h100x8", 8, 80 * 2**30, 989.4e12, 66.9e12, 3.35e12, 3200 * GIGABIT, 450e9),
    )
}
