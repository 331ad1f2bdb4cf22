"""Dropout of an activation that is sharded over the tensor-parallel ranks."""

import torch
from torch import nn

from tutorial_lib.parallel_layers.random import get_xla_rng_tracker


class ShardedDropout(nn.Dropout):
    """Dropout where each tensor-parallel rank draws a mask of its own, for its shard."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        with get_xla_rng_tracker().fork():
            return super().forward(input)


def dropout(rate: float, sharded: bool) -> nn.Dropout:
    """Of an activation that is sharded, or whole on every rank."""
    return ShardedDropout(rate) if sharded else nn.Dropout(rate)
