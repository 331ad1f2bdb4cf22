"""The autograd pairs of tensor and sequence parallelism: what each does forward and backward.

Each pair is a collective and its adjoint, so a gradient is right wherever the pair stands (Shoeybi
et al., 2019, section 3; Korthikanti et al., 2022, section 4.2). Its backward is the other region of
the pair, with a gradient of its own, so that second derivatives are right too. Names are those of
`neuronx_distributed.parallel_layers.mappings`. On one tensor-parallel rank every pair is the
identity.
"""

import torch
from torch.autograd import Function

from . import comm, parallel_state
from .features import note_features
from .utils import divide


def _own_chunk(x: torch.Tensor, dim: int) -> torch.Tensor:
    size = parallel_state.get_tensor_model_parallel_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    chunk = divide(x.size(dim), size, f"dimension {dim} of a tensor of shape {tuple(x.shape)}")
    # A copy: a view would keep the whole tensor alive.
    return x.narrow(dim, rank * chunk, chunk).clone(memory_format=torch.contiguous_format)


class _CopyToRegion(Function):
    """forward: identity / backward: all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _ReduceFromRegion.apply(grad)


class _ReduceFromRegion(Function):
    """forward: all-reduce / backward: identity."""

    @staticmethod
    def forward(ctx, x):
        return comm.all_reduce("sum", x)

    @staticmethod
    def backward(ctx, grad):
        return _CopyToRegion.apply(grad)


class _ScatterToRegion(Function):
    """forward: keep this rank's chunk of `dim` / backward: all-gather along `dim`."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return _own_chunk(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return _GatherFromRegion.apply(grad, ctx.dim), None


class _GatherFromRegion(Function):
    """forward: all-gather along `dim` / backward: keep this rank's chunk, as what follows is
    replicated.
    """

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return comm.all_gather(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return _ScatterToRegion.apply(grad, ctx.dim), None


class _GatherToShardedRegion(_GatherFromRegion):
    """forward: all-gather along `dim` / backward: reduce-scatter, as what follows is sharded and
    each rank has its share of the gradient.
    """

    @staticmethod
    def backward(ctx, grad):
        return _ReduceScatterToRegion.apply(grad, ctx.dim), None


class _ReduceScatterToRegion(Function):
    """forward: reduce-scatter along `dim` / backward: all-gather along `dim`."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return comm.reduce_scatter("sum", x, scatter_dim=dim)

    @staticmethod
    def backward(ctx, grad):
        return _GatherToShardedRegion.apply(grad, ctx.dim), None


def _apply(region: type[Function], x: torch.Tensor, *args) -> torch.Tensor:
    return x if parallel_state.get_tensor_model_parallel_size() == 1 else region.apply(x, *args)


def copy_to_tensor_model_parallel_region(x: torch.Tensor) -> torch.Tensor:
    """forward: identity / backward: all-reduce."""
    return _apply(_CopyToRegion, x)


def reduce_from_tensor_model_parallel_region(x: torch.Tensor) -> torch.Tensor:
    """forward: all-reduce / backward: identity."""
    return _apply(_ReduceFromRegion, x)


def scatter_to_tensor_model_parallel_region(x: torch.Tensor) -> torch.Tensor:
    """forward: keep this rank's chunk of the last dim / backward: all-gather along it."""
    chunk = _apply(_ScatterToRegion, x, -1)
    return note_features(chunk, x.size(-1), chunk.size(-1), gathered=False)


def gather_from_tensor_model_parallel_region(x: torch.Tensor) -> torch.Tensor:
    """forward: all-gather along the last dim / backward: keep this rank's chunk."""
    gathered = _apply(_GatherFromRegion, x, -1)
    return note_features(gathered, gathered.size(-1), x.size(-1), gathered=True)


def scatter_to_sequence_parallel_region(
    x: torch.Tensor, sequence_dimension: int = 0
) -> torch.Tensor:
    """forward: keep this rank's chunk of the sequence / backward: all-gather along it."""
    return _apply(_ScatterToRegion, x, sequence_dimension)


def gather_from_sequence_parallel_region(
    x: torch.Tensor, sequence_dimension: int = 0, to_model_parallel: bool = True
) -> torch.Tensor:
    """forward: all-gather along the sequence / backward: reduce-scatter, or keep this rank's chunk
    if not `to_model_parallel`.
    """
    region = _GatherToShardedRegion if to_model_parallel else _GatherFromRegion
    return _apply(region, x, sequence_dimension)


def reduce_scatter_to_sequence_parallel_region(
    x: torch.Tensor, sequence_dimension: int = 0
) -> torch.Tensor:
    """forward: reduce-scatter along the sequence / backward: all-gather along it."""
    return _apply(_ReduceScatterToRegion, x, sequence_dimension)
