"""How ZeRO-1 cuts a parameter, and the bucketed collectives between whole parameters and shards.

A parameter of n elements over a group of R ranks is flattened, padded with zeros to R · ⌈n / R⌉ and
cut into R equal runs; rank r holds run r. So a shard is at most R - 1 elements longer than n / R,
whatever the shape, and the shards of all ranks, one behind the other, are the parameter. In a
bucket the parameters lie side by side, as columns of a matrix of R rows: row r is what rank r
holds.
"""

import torch
import torch.nn.functional as F

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.buckets import buckets_of, one_ahead


def shard_length(numel: int, size: int) -> int:
    """Elements in each of `size` shards."""
    return -(-numel // size)


def as_rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """`tensor` as a matrix of its shards, `(size, shard length)`; a view if it needs no padding and
    is contiguous.
    """
    length = shard_length(tensor.numel(), size)
    flat, padding = tensor.reshape(-1), size * length - tensor.numel()
    if padding:  # F.pad copies even where there is nothing to add
        flat = F.pad(flat, (0, padding))
    return flat.view(size, length)


def take_shard(tensor: torch.Tensor, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy, in `dtype`, of the shard of `tensor` that `rank` holds; flat."""
    return as_rows(tensor.detach(), size)[rank].to(dtype, copy=True)


def join_shards(shards: list[torch.Tensor], shape: tuple[int, ...] | list[int]) -> torch.Tensor:
    """The tensor of that shape that the shards of all ranks, in rank order, were taken from."""
    return torch.cat(shards)[: torch.Size(shape).numel()].view(shape)


def reduce_scatter_mean(
    tensors: list[torch.Tensor],
    dtypes: list[torch.dtype],
    groups: comm.Groups,
    cap_mb: float | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's shard of the mean of each tensor over the group.

    Args:
        tensors: the same shapes in the same order on every rank of the group; summed in their own
            dtype.
        dtypes: of the results.
        cap_mb: size of one collective, see `buckets_of`; 0 for one collective a tensor.

    Returns:
        The flat buffers, and a view into one of them for each tensor.
    """
    size = parallel_state.axis_of(groups).size
    buffers, shards = [], [None] * len(tensors)

    def start(places: list[int]) -> tuple[list[int], list[int], comm.Pending]:
        rows = [as_rows(tensors[place], size) for place in places]
        matrix = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
        lengths = [row.size(1) for row in rows]
        return (
            places,
            lengths,
            comm.reduce_scatter_start("sum", matrix, 1.0 / size, 0, groups, reuse=len(rows) > 1),
        )

    def finish(places: list[int], lengths: list[int], pending: comm.Pending) -> None:
        buffer = pending.wait().reshape(-1)
        # One dtype, unless gradients of one have results of several.
        cast = {dtype: buffer.to(dtype) for dtype in dict.fromkeys(dtypes[p] for p in places)}
        buffers.extend(cast.values())
        cuts = {dtype: whole.split(lengths) for dtype, whole in cast.items()}
        for index, place in enumerate(places):
            shards[place] = cuts[dtypes[place]][index]

    one_ahead(buckets_of(tensors, cap_mb), start, finish)
    return buffers, shards


def all_gather_into(
    parameters: list[torch.Tensor],
    shards: list[torch.Tensor],
    groups: comm.Groups,
    cap_mb: float | None,
) -> None:
    """Writes into each parameter the shards of all ranks, rounded to its dtype before they travel.

    Args:
        cap_mb: see `reduce_scatter_mean`.
    """
    size = parallel_state.axis_of(groups).size

    def start(places: list[int]) -> tuple[list[int], list[int], comm.Pending]:
        own = [shards[place].to(parameters[place].dtype) for place in places]
        lengths = [shard.numel() for shard in own]
        return (
            places,
            lengths,
            comm.all_gather_start(torch.cat(own) if len(own) > 1 else own[0], 0, groups),
        )

    def finish(places: list[int], lengths: list[int], pending: comm.Pending) -> None:
        for place, columns in zip(places, pending.wait().view(size, -1).split(lengths, dim=1)):
            parameter = parameters[place]
            if parameter.is_contiguous() and parameter.numel() == columns.numel():
                parameter.view(size, -1).copy_(columns)
            else:
                parameter.copy_(columns.reshape(-1)[: parameter.numel()].view(parameter.shape))

    one_ahead(buckets_of(parameters, cap_mb), start, finish)
