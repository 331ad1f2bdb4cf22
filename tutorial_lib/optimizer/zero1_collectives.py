"""The bucketed collectives between whole parameters and the shards of `flat_shards`.

In a bucket the parameters lie side by side, as columns of a matrix with a row for each rank: row r
is what rank r holds. A large parameter is a bucket of its own, which is not copied.
"""

import torch

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.buckets import buckets_of, one_ahead
from tutorial_lib.parallel_layers.flat_shards import as_rows


def reduce_scatter_mean(
    tensors: list[torch.Tensor], dtypes: list[torch.dtype], groups: comm.Groups
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's shard of the mean of each tensor over the group.

    Args:
        tensors: the same shapes in the same order on every rank of the group; summed in their own
            dtype.
        dtypes: of the results.

    Returns:
        The flat buffers, and a view into one of them for each tensor.
    """
    size = parallel_state.axis_of(groups).size
    buffers, shards = [], [None] * len(tensors)

    def start(places: list[int]) -> tuple[list[int], list[int], comm.Pending]:
        rows = [as_rows(tensors[place], size) for place in places]
        alone = len(rows) == 1
        matrix = rows[0] if alone else torch.cat(rows, dim=1)
        pending = comm.reduce_scatter_start("sum", matrix, 1.0 / size, 0, groups, reuse=not alone)
        return places, [row.size(1) for row in rows], pending

    def finish(places: list[int], lengths: list[int], pending: comm.Pending) -> None:
        buffer = pending.wait().reshape(-1)
        # One dtype, unless gradients of one have results of several.
        for dtype in dict.fromkeys(dtypes[place] for place in places):
            buffers.append(buffer.to(dtype))
            for place, shard in zip(places, buffers[-1].split(lengths)):
                if dtypes[place] == dtype:
                    shards[place] = shard

    one_ahead(buckets_of(tensors), start, finish)
    return buffers, shards


def all_gather_into(
    parameters: list[torch.Tensor], shards: list[torch.Tensor], groups: comm.Groups
) -> None:
    """Writes into each parameter the shards of all ranks, rounded to its dtype before they
    travel.
    """
    size = parallel_state.axis_of(groups).size

    def rows_of(parameter: torch.Tensor, length: int) -> torch.Tensor | None:
        """The parameter as rows of that length, if it is such rows and nothing else."""
        exact = parameter.is_contiguous() and parameter.numel() == size * length
        return parameter.view(size, length) if exact else None

    def start(places: list[int]) -> tuple[list[int], list[int], comm.Pending]:
        own = [shards[place].to(parameters[place].dtype) for place in places]
        lengths = [shard.numel() for shard in own]
        if len(own) > 1:
            return places, lengths, comm.all_gather_start(torch.cat(own), 0, groups)
        rows = rows_of(parameters[places[0]], lengths[0])
        into = None if rows is None else rows.view(-1)
        return places, lengths, comm.all_gather_start(own[0], 0, groups, into)

    def finish(places: list[int], lengths: list[int], pending: comm.Pending) -> None:
        for place, columns in zip(places, pending.wait().view(size, -1).split(lengths, dim=1)):
            parameter = parameters[place]
            rows = rows_of(parameter, columns.size(1))
            if rows is not None:
                rows.copy_(columns)  # nothing, where they are the same memory
            else:
                parameter.copy_(columns.reshape(-1)[: parameter.numel()].view(parameter.shape))

    one_ahead(buckets_of(parameters), start, finish)
