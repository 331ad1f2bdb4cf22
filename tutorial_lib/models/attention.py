"""Attention for given query, key and value heads, without the projections.

It is a module of its own, and has no parameters, so that selective activation checkpointing can
pick it: its `[S, S]` matrices are most of what a layer keeps for backward, and among the cheapest
to compute again (Korthikanti et al., 2022, section 5).
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from tutorial_lib.parallel_layers.random import get_xla_rng_tracker


def causal_mask(
    length: int,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys are hidden from a query: `[S, S]`, the same for every batch, so that a compiler
    sees a constant.

    Args:
        attention_mask: `[B, S]`, 0 for padding, which then is hidden too: `[B, 1, S, S]`.
        position_ids: `[B, S]`. Without an `attention_mask`, a new document begins where they do not
            continue, and documents do not see each other, as in Hugging Face without a cache.

    Raises:
        ValueError: one of them has another shape.
    """
    later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    for name, given in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if given is not None and (given.dim() != 2 or given.size(1) != length):
            shape = tuple(given.shape)
            raise ValueError(f"{name} of shape {shape} is not [B, S], S = {length}")
    if attention_mask is not None:
        return later | ~attention_mask.bool()[:, None, None, :]
    if position_ids is not None:
        jumps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
        document = jumps.cumsum(-1)
        return later | (document[:, None, :, None] != document[:, None, None, :])
    return later


def heads_first(features: torch.Tensor, size: int, sequence_first: bool) -> torch.Tensor:
    """`[B, heads, S, D]` of `[B, S, heads · D]`, or of `[S, B, heads · D]`; D is `size`."""
    heads = features.unflatten(-1, (-1, size))
    return heads.permute(1, 2, 0, 3) if sequence_first else heads.transpose(1, 2)


def heads_last(context: torch.Tensor, sequence_first: bool) -> torch.Tensor:
    """The other way round."""
    order = (2, 0, 1, 3) if sequence_first else (0, 2, 1, 3)
    return context.permute(order).flatten(2)


def core_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`softmax(q kᵀ · scaling) v`, with every step written out.

    Query heads that share a key and value head are rows of one multiplication, so that nothing is
    repeated.

    Args:
        query: `[B, N, S, D]`.
        key, value: `[B, KV, S, D]`, query head n belongs to head n // (N / KV) of them.
        hidden: True where a query does not see a key; `[S, S]` or `[B, 1, S, S]`.
        dropout: share of the probabilities that is dropped, drawn from the current stream.

    Returns:
        `[B, N, S, D]`. Backward keeps q, k, v and the probabilities, and with dropout also its mask
        and its result.
    """
    batch, heads, length, size = query.shape
    groups = batch * key.size(1)
    rows = query.reshape(groups, -1, size)
    columns = key.reshape(groups, length, size).transpose(1, 2)
    scores = torch.baddbmm(query.new_zeros(1, 1, 1), rows, columns, beta=0, alpha=scaling)
    scores = scores.view(batch, heads, length, length)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    # Elsewhere softmax computes in float32 by itself, and rounds once.
    wide = torch.promote_types(scores.dtype, torch.float32) if scores.is_xla else None
    probabilities = F.softmax(scores, -1, dtype=wide).to(scores.dtype)
    if dropout:  # its mask has a byte an element
        probabilities, _ = torch.native_dropout(probabilities, dropout, True)
    context = probabilities.view(groups, -1, length) @ value.reshape(groups, length, size)
    return context.view(batch, heads, length, size)


class CoreAttention(nn.Module):
    """`core_attention` over this rank's heads, or PyTorch's fused kernel for the same.

    Args:
        dropout: of the probabilities, in training. Each rank draws for its own heads, from the
            model-parallel stream.
        use_flash_attention: `scaled_dot_product_attention`, which keeps no `[S, S]` matrix to begin
            with.

    Raises:
        ValueError: a `dropout` outside of [0, 1].
    """

    def __init__(self, scaling: float, dropout: float = 0.0, use_flash_attention: bool = False):
        super().__init__()
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout {dropout} is not in [0, 1]")
        self.scaling, self.dropout, self.use_flash_attention = scaling, dropout, use_flash_attention

    def forward(self, query, key, value, hidden: torch.Tensor | None) -> torch.Tensor:
        """`[B, N, S, D]` from q, k, v and the hidden keys; None hides what comes later and needs
        the fused kernel.
        """
        dropout = self.dropout if self.training else 0.0
        with get_xla_rng_tracker().fork() if dropout else nullcontext():
            if not self.use_flash_attention:
                return core_attention(query, key, value, hidden, self.scaling, dropout)
            seen = None if hidden is None else ~hidden
            return F.scaled_dot_product_attention(
                query, key, value, seen, dropout, is_causal=seen is None, scale=self.scaling,
                enable_gqa=query.size(1) != key.size(1),
            )  # fmt: skip
