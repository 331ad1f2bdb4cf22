"""The two sharded matrix multiplications and their backward, with communication overlapped and
nothing saved gathered.

Column: `Y = X [A_1 … A_T]`, `X` on every rank. Row: `Y = Σ X_i A_i`, `X_i` and `A_i` on rank i
(Shoeybi et al., 2019, section 3). With sequence parallelism the ranks hold shards of the sequence
outside of the pair: an all-gather before the column layer and a reduce-scatter behind the row layer
take the place of the two all-reduces (Korthikanti et al., 2022, section 4.2).

Sums over the ranks are computed in float32 (float64 for float64), even for narrower tensors.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import comm, parallel_state


def _summed(tensor: torch.Tensor, sequence_parallel: bool) -> comm.Pending:
    """Begins the sum over the ranks, of which this rank keeps all or its shard of the sequence."""
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    start = comm.reduce_scatter_start if sequence_parallel else comm.all_reduce_start
    return start("sum", exact, reuse=True)


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    """`[…, n]` as `[rows, n]`, n = 0 included."""
    return x.unsqueeze(0).flatten(0, -2)


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[out, in]` from the gradient `[…, out]` and the input `[…, in]`."""
    return _as_matrix(grad).t() @ _as_matrix(x)


def _sum_copies(grad: torch.Tensor, rows: int) -> torch.Tensor:
    """`grad` with its last `rows` rows summed over the ranks of the kv group."""
    if not rows:
        return grad
    own, copies = grad.split([grad.size(0) - rows, rows])
    groups = parallel_state.get_kv_shared_replica_groups()
    return torch.cat([own, comm.all_reduce("sum", copies, groups)])


class _ColumnLinear(Function):
    """forward: [all-gather the sequence,] multiply / backward: all-reduce [reduce-scatter] the
    input's gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, sequence_parallel, copied_rows):
        ctx.save_for_backward(x, weight)
        ctx.sequence_parallel, ctx.copied_rows = sequence_parallel, copied_rows
        whole = comm.all_gather(x) if sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = gathering = None
        if ctx.sequence_parallel and needs_weight:
            gathering = comm.all_gather_start(x)
        if needs_x:
            summing = _summed(grad @ weight, ctx.sequence_parallel)
        if needs_weight:
            grad_weight = _weight_gradient(grad, gathering.wait() if gathering else x)
            grad_weight = _sum_copies(grad_weight, ctx.copied_rows)
        if needs_bias:
            grad_bias = _sum_copies(_as_matrix(grad).sum(0), ctx.copied_rows)
        if needs_x:
            grad_x = summing.wait().to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None


class _RowLinear(Function):
    """forward: multiply, all-reduce [reduce-scatter], add the bias once / backward: [all-gather the
    gradient].
    """

    @staticmethod
    def forward(ctx, x, weight, bias, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.sequence_parallel = sequence_parallel
        out = _summed(F.linear(x, weight), sequence_parallel).wait().to(x.dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Each rank adds the bias to its own shard of the sequence: its share of the gradient.
        grad_bias = _as_matrix(grad).sum(0) if needs_bias else None
        if ctx.sequence_parallel:
            grad = comm.all_gather(grad)
        grad_x = grad @ weight if needs_x else None
        grad_weight = _weight_gradient(grad, x) if needs_weight else None
        return grad_x, grad_weight, grad_bias, None


def _apply(function: type[Function], x, weight, bias, *args) -> torch.Tensor:
    """Runs a sharded multiplication, under autocast in its dtype, as a plain one would."""
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return F.linear(x, weight, bias)
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):
        return function.apply(x, weight, bias, *args)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = (
            t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in (x, weight, bias)
        )
    with torch.autocast(kind, enabled=False):
        return function.apply(x, weight, bias, *args)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sequence_parallel: bool = False,
    copied_rows: int = 0,
) -> torch.Tensor:
    """`x @ weight.T + bias` with this rank's rows of the weight.

    Args:
        x: `[…, in]`, the same on every rank; or its shard `[S/T, …, in]` of the sequence.
        weight, bias: `[out/T, in]` and `[out/T]`.
        copied_rows: how many of the last rows the ranks of the kv group hold copies of; their
            gradients are summed.

    Returns:
        `[…, out/T]`, of the whole sequence.
    """
    return _apply(_ColumnLinear, x, weight, bias, sequence_parallel, copied_rows)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias` with this rank's columns of the weight, summed over the ranks.

    Args:
        x: `[…, in/T]`.
        weight, bias: `[out, in/T]`, and `[out]` on every rank.
        sequence_parallel: keep this rank's shard of the first dimension of the sum.

    Returns:
        `[…, out]`, or `[S/T, …, out]`.
    """
    return _apply(_RowLinear, x, weight, bias, sequence_parallel)
