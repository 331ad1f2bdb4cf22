"""The two sharded matrix multiplications and their backward, with communication overlapped and
nothing saved gathered.

Column: `Y = X [A_1 … A_T]`, `X` on every rank. Row: `Y = Σ X_i A_i`, `X_i` and `A_i` on rank i
(Shoeybi et al., 2019, section 3). With sequence parallel the ranks hold chunks of the sequence outside of the pair: an
all-gather before the column layer and a reduce-scatter behind the row layer stand for the two
all-reduces (Korthikanti et al., 2022, section 4.2).
"""

from contextlib import nullcontext

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import comm, parallel_state


def wire_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a sum over ranks travels in: `reduce_dtype` if given; float64 stays as it is,
    never less exact.
    """
    return dtype if reduce_dtype is None or dtype is torch.float64 else reduce_dtype


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    """`[…, n]` as `[rows, n]`, n = 0 included."""
    return x.unsqueeze(0).flatten(0, -2)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[out, in]` from the gradient `[…, out]` and the input `[…, in]`."""
    return _as_matrix(grad).t() @ _as_matrix(x)


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """`[out]` from the gradient `[…, out]`."""
    return _as_matrix(grad).sum(0)


def _sum_shared(grad: torch.Tensor, rows: int, groups: comm.Groups) -> torch.Tensor:
    """`grad` with its last `rows` rows summed over the ranks that hold copies of them."""
    own, shared = grad.split([grad.size(0) - rows, rows])
    return torch.cat([own, comm.all_reduce("sum", shared, groups)])


class _ColumnLinear(Function):
    """forward: [all-gather the sequence,] multiply / backward: all-reduce [reduce-scatter] the
    input's gradient.
    """

    @staticmethod
    def forward(
        ctx, x, weight, bias, groups, sequence_dim, reduce_dtype, shared_rows, shared_groups
    ):
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.sequence_dim, ctx.reduce_dtype = groups, sequence_dim, reduce_dtype
        ctx.shared_rows, ctx.shared_groups = shared_rows, shared_groups
        total = x if sequence_dim is None else comm.all_gather(x, sequence_dim, groups)
        return F.linear(total, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = gathering = reducing = None
        if ctx.sequence_dim is not None and needs_weight:
            gathering = comm.all_gather_start(x, ctx.sequence_dim, ctx.groups)
        if needs_x:
            wire = (grad @ weight).to(wire_dtype(x.dtype, ctx.reduce_dtype))
            if ctx.sequence_dim is None:
                reducing = comm.all_reduce_start("sum", wire, ctx.groups, reuse=True)
            else:
                reducing = comm.reduce_scatter_start(
                    "sum", wire, 1.0, ctx.sequence_dim, ctx.groups, reuse=True
                )
            del wire
        if needs_weight:
            grad_weight = weight_gradient(grad, gathering.wait() if gathering else x)
        if needs_bias:
            grad_bias = bias_gradient(grad)
        if ctx.shared_rows:
            if needs_weight:
                grad_weight = _sum_shared(grad_weight, ctx.shared_rows, ctx.shared_groups)
            if needs_bias:
                grad_bias = _sum_shared(grad_bias, ctx.shared_rows, ctx.shared_groups)
        if needs_x:
            grad_x = reducing.wait().to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class _RowLinear(Function):
    """forward: multiply, all-reduce [reduce-scatter], add the bias once / backward: [all-gather the
    gradient].
    """

    @staticmethod
    def forward(ctx, x, weight, bias, groups, sequence_dim, reduce_dtype):
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.sequence_dim = groups, sequence_dim
        partial = F.linear(x, weight)
        wire = partial.to(wire_dtype(partial.dtype, reduce_dtype))
        if sequence_dim is None:
            reducing = comm.all_reduce_start("sum", wire, groups, reuse=True)
        else:
            reducing = comm.reduce_scatter_start("sum", wire, 1.0, sequence_dim, groups, reuse=True)
        out = reducing.wait().to(partial.dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Each rank adds the bias to its own chunk of the sequence, so this is its share of the
        # gradient.
        grad_bias = bias_gradient(grad) if needs_bias else None
        if ctx.sequence_dim is not None:
            grad = comm.all_gather(grad, ctx.sequence_dim, ctx.groups)
        grad_x = grad @ weight if needs_x else None
        grad_weight = weight_gradient(grad, x) if needs_weight else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in autocast's dtype where it is on: what it would do to a plain matrix
    multiplication.
    """
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in tensors)


def _no_autocast(kind: str):
    """Switches autocast off, on devices that have it; meta has not."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: comm.Groups = None,
    sequence_dim: int | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    shared_rows: int = 0,
    shared_groups: comm.Groups = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` with this rank's rows of the weight.

    Args:
        x: `[…, in]`, the same on every rank; or this rank's chunk of `sequence_dim`.
        weight, bias: `[out/T, in]` and `[out/T]`.
        sequence_dim: None for an input that every rank holds whole.
        reduce_dtype: the dtype of the sum in the backward.
        shared_rows: how many of the last rows the ranks of `shared_groups` hold copies of; their
            gradients are summed.

    Returns:
        `[…, out/T]`, of the whole sequence.
    """
    if parallel_state.axis_of(groups).size == 1:
        return F.linear(x, weight, bias)
    x, weight, bias = _autocast(x, weight, bias)
    with _no_autocast(x.device.type):
        return _ColumnLinear.apply(
            x, weight, bias, groups, sequence_dim, reduce_dtype, shared_rows, shared_groups
        )


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: comm.Groups = None,
    sequence_dim: int | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """`x @ weight.T + bias` with this rank's columns of the weight, summed over the ranks.

    Args:
        x: `[…, in/T]`.
        weight, bias: `[out, in/T]`, and `[out]` on every rank.
        sequence_dim: the dimension whose chunk each rank keeps of the sum; None keeps it all.
        reduce_dtype: the dtype of the sum.

    Returns:
        `[…, out]`, or this rank's chunk of the sequence of it.
    """
    if parallel_state.axis_of(groups).size == 1:
        return F.linear(x, weight, bias)
    x, weight, bias = _autocast(x, weight, bias)
    with _no_autocast(x.device.type):
        return _RowLinear.apply(x, weight, bias, groups, sequence_dim, reduce_dtype)
