"""Cross entropy over a sharded vocabulary: no rank ever holds all logits of a token.

The vocabulary is sharded as a `ColumnParallelLinear` head leaves it. Per token the ranks exchange
two numbers (three with label smoothing), in one all-gather, where gathered logits would take V.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import comm, parallel_state
from .features import holds_shard, noted_features
from .utils import ids_outside

IGNORED = -100  # the target of a token that does not count, as in torch and Hugging Face


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the last dimension; −∞ if it is empty."""
    if logits.size(-1) == 0:
        return logits.new_full(logits.shape[:-1], float("-inf"))
    # torch.logsumexp takes 1.5 × as long. The bound keeps −∞ − (−∞) out of a row of nothing but −∞.
    peak = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return (logits - peak).exp_().sum(-1).log_() + peak.squeeze(-1)


class _CrossEntropy(Function):
    """Saves the logits as they are and one number a token; the softmax is formed in the memory of
    its gradient.
    """

    @staticmethod
    def forward(ctx, logits, target, owned, valid, real, vocabulary, smoothing):
        inside = logits[..., :real].to(torch.promote_types(logits.dtype, torch.float32))
        exponents = _log_sum_exp(inside)
        picked = torch.zeros_like(exponents)
        if real:
            picked = torch.where(owned, inside.gather(-1, target.unsqueeze(-1)).squeeze(-1), 0)
        own = [exponents, picked, inside.sum(-1)] if smoothing else [exponents, picked]
        del inside
        shares = comm.all_gather(torch.stack(own)[None])  # [T, 2 or 3, …]
        total = torch.logsumexp(shares[:, 0], 0)
        loss = total - shares[:, 1].sum(0)
        if smoothing:
            mean = shares[:, 2].sum(0) / vocabulary
            loss = (1 - smoothing) * loss + smoothing * (total - mean)
        ctx.save_for_backward(logits, target, owned, valid, total)
        ctx.real, ctx.vocabulary, ctx.smoothing = real, vocabulary, smoothing
        return torch.where(valid, loss, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, target, owned, valid, total = ctx.saved_tensors
        softmax = (logits[..., : ctx.real].to(total.dtype) - total.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            softmax -= ctx.smoothing / ctx.vocabulary
        if ctx.real:
            hit = (ctx.smoothing - 1) * owned.unsqueeze(-1).to(total.dtype)
            softmax.scatter_add_(-1, target.unsqueeze(-1), hit)
        softmax *= torch.where(valid, grad, 0).unsqueeze(-1)
        softmax = softmax.masked_fill_(~valid.unsqueeze(-1), 0).to(logits.dtype)
        if ctx.real < logits.size(-1):
            softmax = torch.nn.functional.pad(softmax, (0, logits.size(-1) - ctx.real))
        return softmax, None, None, None, None, None, None


def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """The loss of each token; the caller takes the mean (over those that count).

    Args:
        vocab_parallel_logits: `[…, V/T]`, this rank's shard of the vocabulary. Not modified.
        target: `[…]`, ids of the whole vocabulary in any integer dtype, the same on every rank.
            The loss and the gradient of a token with target −100 are exactly 0.
        label_smoothing: α in [0, 1), as in `F.cross_entropy`: 1 − α of the target distribution is
            on the target, and α is spread evenly over all V classes.
        vocab_size: V where the logits carry padding behind it, which then takes no part; by default
            `output_size` of the column-parallel layer that they come from, otherwise all of them.

    Returns:
        `[…]`, equal on every rank, in float32 (float64 for such logits), whatever dtype the logits
        have.

    Raises:
        ValueError: logits that were gathered, as far as their autograd graph (or, without one, the
            tensor itself) shows it; shapes that do not fit, a target outside of the vocabulary, a
            smoothing outside of [0, 1), or a `vocab_size` larger than the logits; on every rank. On
            an accelerator such a target's loss is NaN instead.
    """
    logits, local = vocab_parallel_logits, vocab_parallel_logits.size(-1)
    size = parallel_state.get_tensor_model_parallel_size()
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of shape "
            f"{tuple(logits.shape[:-1])}, not {tuple(target.shape)}"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in [0, 1)")
    if size > 1 and holds_shard(logits) is False:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} were gathered: each of {size} ranks holds the "
            "whole vocabulary, and this loss takes its shard (gather_output=False)"
        )
    noted = noted_features(logits)
    if vocab_size is None and noted is not None and local == noted.shard:
        vocab_size = noted.whole
    vocabulary = local * size if vocab_size is None else vocab_size
    if not 0 < vocabulary <= local * size:
        raise ValueError(
            f"vocab_size {vocabulary} is not in [1, {local * size}], {size} ranks of {local} logits"
        )
    outside = ids_outside(target, vocabulary, "target", IGNORED)
    target = target.to(torch.int64)
    start = parallel_state.get_tensor_model_parallel_rank() * local
    real = min(max(vocabulary - start, 0), local)
    valid = target != IGNORED
    owned = (target >= start) & (target < start + real) & valid
    inner = torch.where(owned, target - start, 0)
    loss = _CrossEntropy.apply(logits, inner, owned, valid, real, vocabulary, label_smoothing)
    return loss if outside is None else loss.masked_fill(outside, float("nan"))
