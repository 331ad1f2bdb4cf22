"""Parallel linear layers whose weight is stored as in Hugging Face's `Conv1D`: `[in, out]`.

GPT-2's checkpoints have it that way round. Only the storage differs: the full weight is drawn,
sharded, saved and converted as Hugging Face's is, and multiplied through a transposed view.
"""

from dataclasses import replace

import torch
from torch import nn

from ..parallel_layers.layers import ColumnParallelLinear, RowParallelLinear


class _Transposed:
    """Transposes the weight of a parallel linear layer, and its partition."""

    def _declare(self, name, shape, partition=None, **marks):
        if name == "weight":
            shape, partition = shape[::-1], replace(partition, dim=1 - partition.dim)
        super()._declare(name, shape, partition, **marks)

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight.t()

    def reset_parameters(self) -> None:
        """The weight by `init_method`, all its matrices as one; a bias of zeros."""
        self.draw_("weight", self.init_method)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ColumnParallelConv1D(_Transposed, ColumnParallelLinear):
    """`Y = X A + b`, `A` `[in, out]` with its columns sharded; see `ColumnParallelLinear`."""


class RowParallelConv1D(_Transposed, RowParallelLinear):
    """`Y = X A + b`, `A` `[in, out]` with its rows sharded; see `RowParallelLinear`."""
