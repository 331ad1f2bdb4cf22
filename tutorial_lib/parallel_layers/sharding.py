"""How a tensor is sharded over the tensor-parallel ranks, and put together again: arithmetic
without communication.

Initial weights, gathered outputs and checkpoints all follow the same `Partition`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import parallel_state
from .marks import set_tensor_model_parallel_attributes
from .utils import ensure_divisibility


@dataclass(frozen=True)
class Partition:
    """How a tensor, in which one or several matrices are concatenated, is sharded along one
    dimension.

    Each matrix (q, k, v; gate, up) is sharded by itself, so that every rank holds matching rows of
    all of them. With two matrices of 4 rows and 2 ranks, rank 0 holds rows 0, 1 of both and rank 1
    rows 2, 3 of both.

    Attributes:
        dim: the sharded dimension.
        sizes: the size of each matrix along it, in the full tensor and without padding.
        parts: how many ranks share the tensor.
        replicas: for each matrix, how many neighbouring ranks hold the same shard of it (where
            there are fewer key and value heads than ranks); 1 by default.
        pad: zeros behind each matrix, so that all shards have one size.
        multiple: with padding, the rows of each shard are a multiple of it, at any number of ranks.

    Raises:
        ValueError: a size is not divisible, with the numbers.
    """

    dim: int
    sizes: tuple[int, ...]
    parts: int
    replicas: tuple[int, ...] = ()
    pad: int = 0
    multiple: int = 1

    def __post_init__(self):
        object.__setattr__(self, "replicas", self.replicas or (1,) * len(self.sizes))
        for size, replicas in zip(self.sizes, self.replicas, strict=True):
            ensure_divisibility(self.parts, replicas, "ranks over ranks that share a shard")
            ensure_divisibility(size + self.pad, self.parts // replicas, "size over ranks")

    @property
    def trivial(self) -> bool:
        """True if the shards in rank order are the tensor as it stands."""
        return len(self.sizes) == 1 and self.replicas == (1,) and not self.pad

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The size of each matrix's shard on one rank, padding included."""
        return tuple(
            (size + self.pad) * r // self.parts for size, r in zip(self.sizes, self.replicas)
        )

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """`(start in the full tensor, start in the shard, length)` of each matrix's rows on `rank`,
        without padding.
        """
        first = local = 0
        for size, rows, replicas in zip(self.sizes, self.local_sizes, self.replicas):
            start = min(rank // replicas * rows, size)
            if length := min(size - start, rows):
                yield first + start, local, length
            first += size
            local += rows

    def real_size(self, rank: int) -> int:
        """How many rows of the shard of `rank` are not padding."""
        return sum(length for _, _, length in self.pieces(rank))

    def shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of `rank`, as a copy.

        Raises:
            ValueError: `full` has another size.
        """
        shape = list(full.shape)
        if shape[self.dim] != sum(self.sizes):
            raise ValueError(
                f"dimension {self.dim} of a tensor of shape {tuple(shape)} has size "
                f"{shape[self.dim]}, not {sum(self.sizes)}"
            )
        shape[self.dim] = sum(self.local_sizes)
        shard = full.new_zeros(shape)
        for start, local, length in self.pieces(rank):
            shard.narrow(self.dim, local, length).copy_(full.narrow(self.dim, start, length))
        return shard

    def merge(self, shards: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The full tensor, without padding, from the shards in rank order. Differentiable."""
        matrices = zip(*(shard.split(self.local_sizes, self.dim) for shard in shards), strict=True)
        return torch.cat(
            [
                torch.cat(held[::replicas], self.dim).narrow(self.dim, 0, size)
                for held, replicas, size in zip(matrices, self.replicas, self.sizes)
            ],
            self.dim,
        )


def full_shape(parameter: torch.Tensor) -> list[int]:
    """The shape of the tensor that a marked parameter is a shard of, without padding."""
    shape, partition = list(parameter.shape), partition_of(parameter)
    if partition is not None:
        shape[partition.dim] = sum(partition.sizes)
    return shape


def mark_partition(parameter: torch.Tensor, partition: Partition | None) -> None:
    """Marks a parameter as sharded in this way, or as replicated: what `partition_of` reads."""
    if partition is None:
        set_tensor_model_parallel_attributes(parameter, False, -1, 1)
        return
    uneven = max(partition.replicas) > 1 or len(set(partition.sizes)) > 1
    stride = 1 if uneven else len(partition.sizes)
    set_tensor_model_parallel_attributes(parameter, True, partition.dim, stride, partition.parts)
    if uneven:
        parameter.partition_sizes = partition.sizes
        parameter.partition_replicas = partition.replicas
    if partition.pad:
        parameter.pad_size = partition.pad
    if partition.multiple > 1:
        parameter.pad_multiple = partition.multiple


def partition_of(parameter: torch.Tensor) -> Partition | None:
    """How a marked parameter is sharded; None for a replicated one."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim, parts = parameter.partition_dim, parameter.num_partitions
    parts = parallel_state.get_tensor_model_parallel_size() if parts < 1 else parts
    pad = getattr(parameter, "pad_size", 0)
    sizes = getattr(parameter, "partition_sizes", None)
    if sizes is None:
        stride = parameter.partition_stride
        ensure_divisibility(parameter.size(dim), stride, "size of a shard over its stride")
        sizes = (parameter.size(dim) // stride * parts - pad,) * stride
    replicas = getattr(parameter, "partition_replicas", ())
    return Partition(
        dim, tuple(sizes), parts, tuple(replicas), pad, getattr(parameter, "pad_multiple", 1)
    )
