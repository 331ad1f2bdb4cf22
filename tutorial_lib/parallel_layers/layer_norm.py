"""Layer normalisation that knows whether it sees the whole sequence or this rank's chunk of it."""

import torch
from torch import nn
from torch.nn import functional as F

from .utils import KeepsParameterMarks


class LayerNorm(KeepsParameterMarks, nn.LayerNorm):
    """`nn.LayerNorm` whose parameters are marked `sequence_parallel_enabled`.

    Under sequence parallel each rank sees a part of the positions, so that the parameters'
    gradients are shares, to be summed over the tensor-parallel group once a step. That is what the
    mark is for.

    Where the input is of another dtype than the parameters, the wider of both computes and the
    input's comes out.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.sequence_parallel_enabled = sequence_parallel_enabled

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is None or self.weight.dtype is input.dtype:
            return super().forward(input)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(
            input.dtype
        )
