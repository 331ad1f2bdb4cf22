"""What models that predict the next token share: the loss over a cut vocabulary, and what it is averaged over."""

import torch
from torch import nn

from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens of labels `[B, S]` are predicted: not the first of a row, and none that is −100."""
    return (labels[:, 1:] != -100).sum()


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The sum of the cross entropies of a batch over the number of predicted tokens.

    Args:
        logits: `[B, S, V/T]`, this rank's; position s predicts label s + 1.
        labels: `[B, S]`.
        vocab_size: V, without padding.
        num_items_in_batch: predicted tokens of the whole global batch; by default those of this one.
    """
    targets = nn.functional.pad(
        labels[:, 1:], (0, 1), value=-100
    )  # not a cut of the logits: that would copy them
    return targets_loss(logits, targets, vocab_size, num_items_in_batch)


def targets_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """`causal_lm_loss` with what position s predicts at `targets[:, s]`, shifted already."""
    if num_items_in_batch is None:
        num_items_in_batch = (targets != -100).sum()
    count = torch.as_tensor(num_items_in_batch).clamp(min=1)
    return parallel_cross_entropy(logits, targets, vocab_size=vocab_size).sum() / count
