"""Layer normalisation that knows whether it sees the whole sequence or this rank's shard of it."""

import torch
from torch import nn
from torch.nn import functional as F

from .marks import KeepsParameterMarks


class LayerNorm(KeepsParameterMarks, nn.LayerNorm):
    """`nn.LayerNorm` whose parameters are marked `sequence_parallel_enabled`.

    Under sequence parallelism each rank sees its share of the positions, so the parameters'
    gradients are shares: the mark has them summed over the tensor-parallel group once a step.

    If the dtypes of input and parameters differ, it computes in the wider one and returns the
    input's.
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
