"""How a full tensor is cut into the parts of the tensor-parallel ranks, and put together again:
arithmetic, no talking.

Initial weights, outputs that are gathered, and checkpoints all go by the same `Partition`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import parallel_state
from .utils import ensure_divisibility


@dataclass(frozen=True)
class Partition:
    """The cut of a tensor along one dimension, in which one or several fused matrices lie one
    behind the other.

    Each matrix (q, k, v; gate, up) is cut for itself, so that every rank holds matching rows of all
    of them. With two matrices of 4 rows and 2 ranks, rank 0 holds rows 0, 1 of both and rank 1 rows
    2, 3 of both.

    Attributes:
        dim: the dimension that is cut.
        sizes: the size of each fused matrix along it, in the full tensor and without padding.
        parts: how many ranks share the tensor.
        replicas: for each matrix, how many neighbouring ranks hold the same part of it (key and
            value heads that are fewer than ranks); by default 1.
        pad: zeros that lie behind each matrix so that the cut comes out even.
        order: the place of each rank's part, where that is not the rank.
        multiple: with padding, each part has a multiple of so many rows, at every number of parts.

    Raises:
        ValueError: a size that does not divide, or an order that is no permutation, with the
            numbers.
    """

    dim: int
    sizes: tuple[int, ...]
    parts: int
    replicas: tuple[int, ...] = ()
    pad: int = 0
    order: tuple[int, ...] | None = None
    multiple: int = 1

    def __post_init__(self):
        object.__setattr__(self, "replicas", self.replicas or (1,) * len(self.sizes))
        for size, replicas in zip(self.sizes, self.replicas, strict=True):
            ensure_divisibility(self.parts, replicas, "ranks over ranks that share a part")
            ensure_divisibility(size + self.pad, self.parts // replicas, "size over parts")
        if self.order is not None and sorted(self.order) != list(range(self.parts)):
            raise ValueError(
                f"rank_ordering {self.order} is no permutation of the {self.parts} ranks"
            )

    @property
    def trivial(self) -> bool:
        """True if the parts in rank order are the tensor as it stands."""
        return (
            len(self.sizes) == 1 and self.replicas == (1,) and not self.pad and self.order is None
        )

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The size of each matrix's part on one rank, padding included."""
        return tuple(
            (size + self.pad) * r // self.parts for size, r in zip(self.sizes, self.replicas)
        )

    def place(self, rank: int) -> int:
        """The number of the part that `rank` holds."""
        return rank if self.order is None else self.order[rank]

    def real_size(self, rank: int) -> int:
        """How much of the part of `rank` is not padding, where that lies at its end; of fused
        matrices, all of it.
        """
        total = sum(self.local_sizes)
        if not self.pad or len(self.sizes) > 1:
            return total
        return min(max(self.sizes[0] - self.place(rank) * total, 0), total)

    def _runs(self, rank: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """For each matrix, where the part of `rank` begins in a full tensor of matrices of `sizes`,
        and how much of it is there: less than its local size where padding is missing.
        """
        first = 0
        for size, rows, replicas in zip(sizes, self.local_sizes, self.replicas, strict=True):
            start = min(self.place(rank) // replicas * rows, size)
            yield first + start, min(size - start, rows)
            first += size

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """`(start in the full tensor, start in the part, length)` along the cut, of what is no
        padding in the part of `rank`.
        """
        local = 0
        for (start, length), rows in zip(self._runs(rank, self.sizes), self.local_sizes):
            if length:
                yield start, local, length
            local += rows

    def shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of `rank`, as a copy. `full` may come with its padding or without.

        Raises:
            ValueError: `full` has another size.
        """
        padding = self.pad if self._has_padding(full) else 0
        runs = self._runs(rank, tuple(size + padding for size in self.sizes))
        pieces = []
        for (start, length), rows in zip(runs, self.local_sizes):
            pieces.append(full.narrow(self.dim, start, length))
            if length < rows:
                pieces.append(self._zeros(full, rows - length))
        return torch.cat(pieces, self.dim)

    def merge(self, shards: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The full tensor, without padding, from the parts of all ranks in rank order.
        Differentiable.
        """
        by_place = sorted(range(self.parts), key=self.place)
        columns = zip(
            *(shards[rank].split(self.local_sizes, self.dim) for rank in by_place), strict=True
        )
        return torch.cat(
            [
                torch.cat(pieces[::replicas], self.dim).narrow(self.dim, 0, size)
                for pieces, replicas, size in zip(columns, self.replicas, self.sizes)
            ],
            self.dim,
        )

    def padded(self, full: torch.Tensor) -> torch.Tensor:
        """`full` with the zeros behind each of its matrices, or as it is where it has them.

        Raises:
            ValueError: `full` has neither the padded size nor the real one.
        """
        if self._has_padding(full):
            return full
        zeros = self._zeros(full, self.pad)
        return torch.cat(
            [piece for m in full.split(self.sizes, self.dim) for piece in (m, zeros)], self.dim
        )

    def _zeros(self, like: torch.Tensor, size: int) -> torch.Tensor:
        shape = list(like.shape)
        shape[self.dim] = size
        return like.new_zeros(shape)

    def _has_padding(self, full: torch.Tensor) -> bool:
        """True if there is nothing to add to a full tensor, as it has its padding or needs none."""
        real, found = sum(self.sizes), full.size(self.dim)
        with_padding = real + self.pad * len(self.sizes)
        if found not in (real, with_padding):
            raise ValueError(
                f"dimension {self.dim} of a tensor of shape {tuple(full.shape)} has size {found}, "
                f"not {real}" + (f" (or {with_padding} with padding)" if self.pad else "")
            )
        return found == with_padding


def partition_of(parameter: torch.Tensor) -> Partition | None:
    """How a marked parameter is cut; None for a replicated one."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim, parts, order = parameter.partition_dim, parameter.num_partitions, parameter.rank_ordering
    parts = parallel_state.get_tensor_model_parallel_size() if parts < 1 else parts
    pad = getattr(parameter, "pad_size", 0)
    sizes = getattr(parameter, "partition_sizes", None)
    if sizes is None:
        stride = parameter.partition_stride
        ensure_divisibility(parameter.size(dim), stride, "size of a part over its stride")
        sizes = (parameter.size(dim) // stride * parts - pad,) * stride
    replicas = getattr(parameter, "partition_replicas", ())
    order = None if order is None else tuple(order)
    multiple = getattr(parameter, "pad_multiple", 1)
    return Partition(dim, tuple(sizes), parts, tuple(replicas), pad, order, multiple)
