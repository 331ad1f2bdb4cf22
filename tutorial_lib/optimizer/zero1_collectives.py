"""The bucketed collectives between whole parameters and the shards of `flat_shards`.

In a bucket the parameters lie side by side, as columns of a matrix with a row for each rank: row r
is what rank r holds.
"""

import torch

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.buckets import buckets_of, one_ahead
from tutorial_lib.parallel_layers.flat_shards import as_rows


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
