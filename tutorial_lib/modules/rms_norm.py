"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..parallel_layers.marks import KeepsParameterMarks


class _RMSNorm(Function):
    """Saves its input as it came and one number a row, not the float32 values in between."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (exact * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad * normed.to(x.dtype)).to(scale.dtype).unsqueeze(0)
            grad_weight = rows.flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            towards = (grad * weight).to(scale.dtype)
            along = (towards * normed).mean(-1, keepdim=True)
            grad_x = ((towards - normed * along) * scale).to(x.dtype)
        return grad_x, grad_weight, None


class RMSNorm(KeepsParameterMarks, nn.Module):
    """`weight · x / √(mean(x²) + eps)` over the last dimension, `[…, H]`.

    The quotient is computed in float32 (float64 for such an input), rounded to the input's dtype
    and then multiplied by the weight, in this order, as Hugging Face's `LlamaRMSNorm` does it.

    Args:
        normalized_shape: H, the size of the last dimension.
        eps: added to the mean of the squares.
        sequence_parallel_enabled: the input is this rank's shard of the sequence (see `LayerNorm`).
        device, dtype: of the weight.

    Raises:
        ValueError: an input of another last dimension.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel_enabled: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"the input of shape {tuple(input.shape)} should have {len(self.weight)} features"
            )
        return _RMSNorm.apply(input, self.weight, self.eps)
