"""The autograd pairs of tensor and sequence parallelism: what a region does forward, and what backward.

Each pair is a collective and its adjoint, so a gradient is right wherever the pair stands (Shoeybi
et al., 2019, section 3; Korthikanti et al., 2022, section 4.2). Its backward is the other region of
the pair, with a gradient of its own, so that second derivatives are right too. Names are those of
`neuronx_distributed.parallel_layers.mappings`. Where `process_group` is None it is the
tensor-parallel one; in a group of one rank every pair is the identity.
"""

from typing import NamedTuple

import torch
from torch.autograd import Function

from . import comm, parallel_state
from .utils import divide

Group = comm.Groups


class Features(NamedTuple):
    """What is noted about the last dimension of a tensor: see `note_features`."""

    whole: int  # features in all, without padding
    shard: int  # features of one rank, with padding
    gathered: bool  # the tensor holds them all, or one rank's shard


def note_features(output: torch.Tensor, whole: int, shard: int, gathered: bool) -> torch.Tensor:
    """Notes on `output`, and in its autograd graph, whether it holds a shard of the features."""
    output.parallel_features = Features(whole, shard, gathered)
    if output.grad_fn is not None:
        output.grad_fn.metadata["parallel_features"] = output.parallel_features
    return output


def noted_features(x: torch.Tensor) -> Features | None:
    """The note on `x`, or on what `x` was computed from by functions of one tensor (views, casts,
    activations, but neither a multiplication by a matrix nor a reduction); None if there is none.

    Without an autograd graph only the tensor that a region or a layer returned has its note.
    """
    if hasattr(x, "parallel_features"):
        return x.parallel_features
    node = x.grad_fn
    while node is not None:
        if "parallel_features" in node.metadata:
            return node.metadata["parallel_features"]
        inputs = [source for source, _ in node.next_functions if source is not None]
        mixes = any(word in node.name().lower() for word in ("mm", "linear", "reduce"))
        node = None if mixes or len(inputs) != 1 else inputs[0]
    return None


def holds_shard(x: torch.Tensor) -> bool | None:
    """True if the features of `x` are one rank's shard, False if they are whole, None if unknown."""
    noted = noted_features(x)
    if noted is None:
        return None
    return not noted.gathered or x.size(-1) < min(noted.whole, noted.shard + 1)


def _size(group: Group) -> int:
    return parallel_state.axis_of(group).size


def _reduce(x: torch.Tensor, process_group: Group = None) -> torch.Tensor:
    return x if _size(process_group) == 1 else comm.all_reduce("sum", x, process_group)


def _split(x: torch.Tensor, dim: int, process_group: Group = None) -> torch.Tensor:
    axis = parallel_state.axis_of(process_group)
    if axis.size == 1:
        return x
    chunk = divide(x.size(dim), axis.size, f"dimension {dim} of a tensor of shape {tuple(x.shape)}")
    # A copy: a view would keep the whole tensor alive.
    return x.narrow(dim, axis.rank * chunk, chunk).clone(memory_format=torch.contiguous_format)


def _gather(x: torch.Tensor, dim: int, process_group: Group = None) -> torch.Tensor:
    return x if _size(process_group) == 1 else comm.all_gather(x, dim, process_group)


def _reduce_scatter(x: torch.Tensor, dim: int, process_group: Group = None) -> torch.Tensor:
    return (
        x if _size(process_group) == 1 else comm.reduce_scatter("sum", x, 1.0, dim, process_group)
    )


class _CopyToRegion(Function):
    """forward: identity / backward: all-reduce."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _ReduceFromRegion.apply(grad, ctx.group), None


class _ReduceFromRegion(Function):
    """forward: all-reduce / backward: identity."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        reduced = _reduce(x, group)
        return x.view_as(x) if reduced is x else reduced

    @staticmethod
    def backward(ctx, grad):
        return _CopyToRegion.apply(grad, ctx.group), None


class _ScatterToRegion(Function):
    """forward: keep this rank's chunk of `dim` / backward: all-gather along `dim`."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        chunk = _split(x, dim, group)
        return x.view_as(x) if chunk is x else chunk

    @staticmethod
    def backward(ctx, grad):
        return _GatherFromRegion.apply(grad, ctx.dim, ctx.group), None, None


class _GatherFromRegion(Function):
    """forward: all-gather along `dim` / backward: keep this rank's chunk, as what follows is replicated."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        gathered = _gather(x, dim, group)
        return x.view_as(x) if gathered is x else gathered

    @staticmethod
    def backward(ctx, grad):
        return _ScatterToRegion.apply(grad, ctx.dim, ctx.group), None, None


class _GatherToShardedRegion(_GatherFromRegion):
    """forward: all-gather along `dim` / backward: reduce-scatter, as what follows is sharded and
    each rank holds a part.
    """

    @staticmethod
    def backward(ctx, grad):
        return _ReduceScatterToRegion.apply(grad, ctx.dim, ctx.group, None), None, None


class _ReduceScatterToRegion(Function):
    """forward: reduce-scatter along `dim` / backward: all-gather along `dim`."""

    @staticmethod
    def forward(ctx, x, dim, group, dtype):
        ctx.dim, ctx.group, ctx.dtype = dim, group, x.dtype
        scattered = _reduce_scatter(x if dtype is None else x.to(dtype), dim, group).to(x.dtype)
        return x.view_as(x) if scattered is x else scattered

    @staticmethod
    def backward(ctx, grad):
        return (
            _GatherToShardedRegion.apply(grad, ctx.dim, ctx.group).to(ctx.dtype),
            None,
            None,
            None,
        )


def copy_to_tensor_model_parallel_region(
    x: torch.Tensor, process_group: Group = None
) -> torch.Tensor:
    """forward: identity / backward: all-reduce."""
    return _CopyToRegion.apply(x, process_group)


def reduce_from_tensor_model_parallel_region(
    x: torch.Tensor, process_group: Group = None
) -> torch.Tensor:
    """forward: all-reduce / backward: identity."""
    return _ReduceFromRegion.apply(x, process_group)


def scatter_to_tensor_model_parallel_region(
    x: torch.Tensor, process_group: Group = None
) -> torch.Tensor:
    """forward: keep this rank's chunk of the last dim / backward: all-gather along it."""
    chunk = _ScatterToRegion.apply(x, -1, process_group)
    return note_features(chunk, x.size(-1), chunk.size(-1), gathered=False)


def gather_from_tensor_model_parallel_region(
    x: torch.Tensor, process_group: Group = None
) -> torch.Tensor:
    """forward: all-gather along the last dim / backward: keep this rank's chunk."""
    gathered = _GatherFromRegion.apply(x, -1, process_group)
    return note_features(gathered, gathered.size(-1), x.size(-1), gathered=True)


def gather_from_tensor_model_parallel_region_with_dim(
    x: torch.Tensor, gather_dim: int, process_group: Group = None
) -> torch.Tensor:
    """forward: all-gather along `gather_dim` / backward: keep this rank's chunk."""
    return _GatherFromRegion.apply(x, gather_dim, process_group)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    x: torch.Tensor, partition_dim: int, process_group: Group = None
) -> torch.Tensor:
    """forward: reduce-scatter along `partition_dim` / backward: all-gather along it."""
    return _ReduceScatterToRegion.apply(x, partition_dim, process_group, None)


def scatter_input_channels_to_tensor_model_parallel_region(
    x: torch.Tensor, process_group: Group = None
) -> torch.Tensor:
    """forward: keep this rank's chunk of dim 1 / backward: all-gather along it."""
    return _ScatterToRegion.apply(x, 1, process_group)


def scatter_to_sequence_parallel_region(
    x: torch.Tensor, sequence_dimension: int = 0, process_group: Group = None
) -> torch.Tensor:
    """forward: keep this rank's chunk of the sequence / backward: all-gather along it."""
    return _ScatterToRegion.apply(x, sequence_dimension, process_group)


def gather_from_sequence_parallel_region(
    x: torch.Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: Group = None,
    tile_cc: bool = False,
) -> torch.Tensor:
    """forward: all-gather along the sequence / backward: reduce-scatter, or keep the chunk if not `to_model_parallel`.

    `tile_cc` is for a compiler's sake; it changes no result here.
    """
    region = _GatherToShardedRegion if to_model_parallel else _GatherFromRegion
    return region.apply(x, sequence_dimension, process_group)


def reduce_scatter_to_sequence_parallel_region(
    x: torch.Tensor,
    sequence_dimension: int = 0,
    process_group: Group = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """forward: reduce-scatter along the sequence, in `dtype` if given / backward: all-gather along it."""
    return _ReduceScatterToRegion.apply(x, sequence_dimension, process_group, dtype)
