"""Layer normalisation that knows whether it sees the whole sequence or this rank's shard of it."""

import torch
from torch import nn
from torch.nn import functional as F

from .marks import KeepsParameterMarks


class LayerNorm(KeepsParameterMarks, nn.LayerNorm):
    """`nn.LayerNorm` whose parameters are marked `sequence_parallel_enabled`.

    Under sequence parallelism each rank sees its share of the positions, so that the parameters'
    gradients are shares, to be summed over the tensor-parallel group once a step. That is what the
    mark is for.

    Where the input is of another dtype than the parameters, the wider of both computes and the
    input's comes out.
    """

    def __init__(self, *args, sequence_parallel_enabled: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel_enabled = sequence_parallel_enabled

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is None or self.weight.dtype is input.dtype:
            return super().forward(input)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        exact = F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return exact.to(input.dtype)
