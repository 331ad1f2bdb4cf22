"""Cross entropy over a vocabulary that is cut over the ranks: no rank ever holds all logits of a
token.

The vocabulary is cut as a `ColumnParallelLinear` head leaves it. Per token the ranks exchange three
numbers, in one all-gather, where gathered logits would take V.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import comm, mappings, parallel_state
from .utils import ids_outside


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Of the last dimension; of none it is −∞."""
    if logits.size(-1) == 0:
        return logits.new_full(logits.shape[:-1], float("-inf"))
    # torch.logsumexp takes half as long again. The bound keeps −∞ − (−∞) out of a row of nothing
    # but −∞.
    peak = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return (logits - peak).exp_().sum(-1).log_() + peak.squeeze(-1)


class _CrossEntropy(Function):
    """Saves the logits as they are and one number a token; the softmax is formed where its gradient
    will lie.
    """

    @staticmethod
    def forward(ctx, logits, target, owned, valid, real, vocabulary, smoothing, groups):
        inside = logits[..., :real].to(torch.promote_types(logits.dtype, torch.float32))
        reduced = [_log_sum_exp(inside)]
        picked = (
            inside.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            if real
            else torch.zeros_like(reduced[0])
        )
        reduced.append(torch.where(owned, picked, 0))
        if smoothing:
            reduced.append(inside.sum(-1))
        del inside
        parts = comm.all_gather(torch.stack(reduced)[None], 0, groups)  # [T, 2 or 3, …]
        total = torch.logsumexp(parts[:, 0], 0)
        loss = total - parts[:, 1].sum(0)
        if smoothing:
            mean = parts[:, 2].sum(0) / vocabulary
            loss = (1 - smoothing) * loss + smoothing * (total - mean)
        ctx.save_for_backward(logits, target, owned, valid, total)
        ctx.real, ctx.vocabulary, ctx.smoothing = real, vocabulary, smoothing
        return torch.where(valid, loss, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, target, owned, valid, total = ctx.saved_tensors
        inside = logits[..., : ctx.real].to(total.dtype)
        softmax = (inside - total.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            softmax -= ctx.smoothing / ctx.vocabulary
        if ctx.real:
            softmax.scatter_add_(
                -1,
                target.unsqueeze(-1),
                (ctx.smoothing - 1.0) * owned.unsqueeze(-1).to(total.dtype),
            )
        softmax *= torch.where(valid, grad, 0).unsqueeze(-1)
        softmax = softmax.masked_fill_(~valid.unsqueeze(-1), 0).to(logits.dtype)
        if ctx.real < logits.size(-1):
            softmax = torch.nn.functional.pad(softmax, (0, logits.size(-1) - ctx.real))
        return softmax, None, None, None, None, None, None, None


def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    groups: comm.Groups = None,
) -> torch.Tensor:
    """The loss of each token; the caller takes the mean (over those that count).

    Args:
        vocab_parallel_logits: `[…, V/T]`, this rank's part of the vocabulary. Not modified.
        target: `[…]`, ids of the whole vocabulary in any integer dtype, the same on every rank.
        label_smoothing: α as in `F.cross_entropy`: the target is `(1 − α)` of the id's own and α
            spread evenly over all V classes, the right one included (not over the V − 1 others).
        ignore_index: the target of a token whose loss and gradient are exactly 0.
        vocab_size: V where the logits carry padding behind it, which then takes no part; by default
            `output_size` of the column-parallel layer that they come from, otherwise all of them.
        groups: the ranks that the vocabulary is cut over; by default the tensor-parallel group.

    Returns:
        `[…]`, equal on every rank, in float32 (float64 for such logits), whatever dtype the logits
        have.

    Raises:
        ValueError: logits that were gathered, as far as their autograd graph (or, without one, the
            tensor itself) shows it; shapes that do not fit, a target outside of the vocabulary, a smoothing outside
            of [0, 1) or a `vocab_size` larger than the logits; on every rank. On an accelerator
            such a target's loss is NaN instead.
    """
    logits = vocab_parallel_logits
    axis = parallel_state.axis_of(groups)
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
                         f"not {tuple(target.shape)}")  # fmt: skip
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in [0, 1)")
    local = logits.size(-1)
    if axis.size > 1 and mappings.holds_shard(logits) is False:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} were gathered: each of {axis.size} ranks holds "
            "the whole vocabulary, and this loss takes its shard (gather_output=False)"
        )
    noted = mappings.noted_features(logits)
    if vocab_size is None and noted is not None and local == noted.shard:
        vocab_size = noted.whole
    vocabulary = local * axis.size if vocab_size is None else vocab_size
    if not 0 < vocabulary <= local * axis.size:
        raise ValueError(
            f"vocab_size {vocabulary} is not in [1, {local * axis.size}], {axis.size} ranks of {local} logits"
        )
    outside = ids_outside(target, vocabulary, "target", ignore_index)
    target = target.to(torch.int64)

    start = axis.rank * local
    real = min(max(vocabulary - start, 0), local)
    valid = target != ignore_index
    owned = (target >= start) & (target < start + real) & valid
    inner = torch.where(owned, target - start, 0)
    loss = _CrossEntropy.apply(
        logits, inner, owned, valid, real, vocabulary, label_smoothing, groups
    )
    return loss if outside is None else loss.masked_fill(outside, float("nan"))


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    inference: bool = True,
    *,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """The log-probability of each next token.

    Args:
        vocab_parallel_logits: `[B, S, V/T]`.
        target: `[B, S]`, the tokens that the logits were computed from; −100 has log-probability 0.
        inference: without gradient.
        vocab_size: V where the logits carry padding, as in `parallel_cross_entropy`.

    Returns:
        `[B, S − 1]`: entry s is that of token s + 1, given the tokens up to s.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference):
        losses = parallel_cross_entropy(
            vocab_parallel_logits[:, :-1], target[:, 1:], vocab_size=vocab_size
        )
        return -losses
