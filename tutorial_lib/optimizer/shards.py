"""How ZeRO-1 cuts a parameter, and the bucketed collectives between whole parameters and shards.

A parameter of n elements over a group of R ranks is flattened, padded with zeros to R · ⌈n / R⌉ and cut into R equal
runs; rank r holds run r. So a shard is at most R - 1 elements longer than n / R, whatever the shape, and the shards of
all ranks, one behind the other, are the parameter. In a bucket the parameters lie side by side, as columns of a matrix of
R rows: row r is what rank r holds.
"""

import torch
import torch.nn.functional as F

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.grads import buckets_of


def shard_length(numel: int, size: int) -> int:
    """Elements in each of `size` shards."""
    return -(-numel // size)


def as_rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """`tensor` as a matrix of its shards, `(size, shard length)`; a view if it needs no padding and is contiguous."""
    length = shard_length(tensor.numel(), size)
    return F.pad(tensor.reshape(-1), (0, size * length - tensor.numel())).view(size, length)


def take_shard(tensor: torch.Tensor, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy, in `dtype`, of the shard of `tensor` that `rank` holds; flat."""
    return as_rows(tensor.detach(), size)[rank].to(dtype, copy=True)


def join_shards(shards: list[torch.Tensor], shape: tuple[int, ...] | list[int]) -> torch.Tensor:
    """The tensor of that shape that the shards of all ranks, in rank order, were taken from."""
    return torch.cat(shards)[: torch.Size(shape).numel()].view(shape)


def reduce_scatter_mean(
    tensors: list[torch.Tensor], dtypes: list[torch.dtype], groups: comm.Groups, cap_mb: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's shard of the mean of each tensor over the group.

    Args:
        tensors: the same shapes in the same order on every rank of the group; summed in their own dtype.
        dtypes: of the results.
        cap_mb: bytes that one collective takes at most, in 10⁶; 0 for one collective a tensor.

    Returns:
        The flat buffers, and a view into one of them for each tensor.
    """
    size = parallel_state.axis_of(groups).size
    buffers, shards = [], [None] * len(tensors)
    for places in buckets_of(tensors, cap_mb):
        rows = [as_rows(tensors[place], size) for place in places]
        matrix = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
        buffer = comm.reduce_scatter("sum", matrix, 1.0 / size, 0, groups).reshape(-1).to(dtypes[places[0]])
        buffers.append(buffer)
        for place, shard in zip(places, buffer.split([row.size(1) for row in rows])):
            shards[place] = shard
    return buffers, shards


def all_gather_into(parameters: list[torch.Tensor], shards: list[torch.Tensor], groups: comm.Groups, cap_mb: float) -> None:
    """Writes into each parameter the shards of all ranks, rounded to its dtype before they travel.

    Args:
        cap_mb: see `reduce_scatter_mean`.
    """
    size = parallel_state.axis_of(groups).size
    for places in buckets_of(parameters, cap_mb):
        own = [shards[place].to(parameters[place].dtype) for place in places]
        matrix = comm.all_gather(torch.cat(own) if len(own) > 1 else own[0], 0, groups).view(size, -1)
        for place, columns in zip(places, matrix.split([shard.numel() for shard in own], dim=1)):
            parameter = parameters[place]
            if parameter.is_contiguous() and parameter.numel() == columns.numel():
                parameter.view(size, -1).copy_(columns)
            else:
                parameter.copy_(columns.reshape(-1)[: parameter.numel()].view(parameter.shape))
