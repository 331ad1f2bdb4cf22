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


def _trainium(name: str, network: float) -> Instance:
    """16 chips with two cores each, by AWS's description of the architecture of trn1 and trn1n."""
    return Instance(name, 32, 16 * 2**30, 95e12, 23.75e12, 410e9, network)


INSTANCES = {
    machine.name: machine
    for machine in (
        _trainium("trn1.32xlarge", 800 * GIGABIT),
        _trainium("trn1n.32xlarge", 1600 * GIGABIT),
        # Eight H100 SXM, without sparsity: NVIDIA's white paper "H100 Tensor Core GPU
        # Architecture", and for the memory's 3.35 TB/s the data sheet. NVLink's 900 GB/s are of
        # both directions. A DGX H100 has a 400 Gb/s adapter for each.
        Instance("h100x8", 8, 80 * 2**30, 989.4e12, 66.9e12, 3.35e12, 3200 * GIGABIT, 450e9),
    )
}
