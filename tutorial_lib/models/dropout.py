"""Dropout of an activation that is cut over the tensor-parallel ranks."""

import torch
from torch import nn

from tutorial_lib.parallel_layers.random import get_xla_rng_tracker


class ShardedDropout(nn.Dropout):
    """Dropout of an activation that is cut over the tensor-parallel ranks: each draws a mask of its
    own.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        with get_xla_rng_tracker().fork():
            return super().forward(input)
