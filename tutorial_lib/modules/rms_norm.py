"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..parallel_layers.utils import KeepsParameterMarks


class _RMSNorm(Function):
    """Saves its input as it came and one number a row, not the float32 values in between."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        dims = tuple(range(-weight.dim(), 0))
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(exact.square().mean(dims, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (exact * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        dims = tuple(range(-weight.dim(), 0))
        normed = x.to(scale.dtype) * scale
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad * normed.to(x.dtype)).to(scale.dtype).unsqueeze(0)
            grad_weight = rows.flatten(0, -weight.dim() - 1).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            towards = (grad * weight).to(scale.dtype)
            along = (towards * normed).mean(dims, keepdim=True)
            grad_x = ((towards - normed * along) * scale).to(x.dtype)
        return grad_x, grad_weight, None


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`weight · x / √(mean(x²) + eps)`, with the mean over the last dimensions.

    The quotient is computed in float32 (float64 for such an input), rounded to the input's dtype
    and then multiplied by the weight, in this order, as Hugging Face's `LlamaRMSNorm` does it.

    Raises:
        ValueError: `normalized_shape` is not that of the weight, or not the input's last
            dimensions.
    """
    shape = tuple(normalized_shape)
    if tuple(weight.shape) != shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape {shape} does not fit an input of shape {tuple(input.shape)} "
            f"and a weight of shape {tuple(weight.shape)}"
        )
    return _RMSNorm.apply(input, weight, eps)


class RMSNorm(KeepsParameterMarks, nn.Module):
    """Root mean square normalisation with a weight, marked `sequence_parallel_enabled`.

    Args:
        normalized_shape: the last dimension, or dimensions, of the input.
        eps: added to the mean of the squares.
        sequence_parallel_enabled: the input is this rank's chunk of the sequence (see `LayerNorm`).
        device, dtype: of the weight.
        elementwise_affine: has to be True, as there is no use for the other here.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        sequence_parallel_enabled: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        elementwise_affine: bool = True,
    ):
        super().__init__()
        if not elementwise_affine:
            raise ValueError("elementwise_affine=False: this RMSNorm always has a weight")
        shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.normalized_shape, self.eps = shape, eps
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return manual_rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"
