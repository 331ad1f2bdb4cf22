"""What the two sharded linear layers have in common: sizes, initial weights, checks."""

import math
from collections.abc import Callable

import torch
from torch import nn

from . import mappings
from .sharded_module import ShardedModule
from .utils import ensure_divisibility, ensure_positive

InitMethod = Callable[[torch.Tensor], object]


def kaiming(weight: torch.Tensor) -> None:
    """What `nn.Linear` starts from."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def padding(size: int, parts: int, multiple: int = 1) -> int:
    """Zeros behind `size` so that each of `parts` gets the same multiple of `multiple`."""
    ensure_positive(pad_alignment_size_per_rank=multiple)
    return -size % (parts * multiple)


def check_features(layer: ShardedModule, x: torch.Tensor, size: int, sharded: bool) -> None:
    """Raises ValueError unless `x` has `size` features: one rank's shard if `sharded`, else all."""
    given = None if layer._size == 1 else mappings.holds_shard(x)
    if x.size(-1) != size or given is (not sharded):
        wanted = "this rank's shard of the features" if sharded else "the features of all ranks"
        found = {True: ", one rank's shard", False: ", those of all ranks", None: ""}[given]
        raise ValueError(
            f"{type(layer).__name__} takes {wanted}: {size} of {layer.input_size} on {layer._size} "
            f"ranks; the input of shape {tuple(x.shape)} has {x.size(-1)}{found} "
            "(gather_output of the layer before has to be the opposite of input_is_parallel)"
        )


class ParallelLinear(ShardedModule):
    """A linear layer with a sharded weight, and maybe a bias."""

    def __init__(
        self,
        input_size,
        output_size,
        *,
        device,
        dtype,
        group,
        stride,
        init_method,
        pad,
        keep_master,
    ):
        super().__init__(device, dtype, group)
        ensure_positive(input_size=input_size, output_size=output_size, stride=stride)
        if pad and stride > 1:
            raise ValueError(
                f"pad works for one matrix, not for {stride} fused ones (stride {stride})"
            )
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.init_method, self.pad = init_method or kaiming, pad
        self.keep_master_weight = keep_master
        self.master_weight: torch.Tensor | None = None

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as it is multiplied: `[out, in]`."""
        return self.weight

    def _fused(self, size: int) -> tuple[int, ...]:
        ensure_divisibility(size, self.stride, "size over stride")
        return (size // self.stride,) * self.stride

    def reset_parameters(self) -> None:
        """Draws weight and bias as `nn.Linear` does, with the fan-in of the full weight."""
        full = self._draw((self.output_size, self.input_size), self.init_method)
        self._keep("weight", full)
        self.master_weight = full if self.keep_master_weight else None
        if self.bias is not None:
            bound = 1 / math.sqrt(self.input_size)
            self._keep(
                "bias",
                self._draw((self.output_size,), lambda b: nn.init.uniform_(b, -bound, bound)),
            )

    def _check_input(self, x: torch.Tensor, size: int, sharded: bool) -> None:
        self._check_mesh()
        check_features(self, x, size, sharded)
        sequence = self.sequence_dimension
        if self.sequence_parallel_enabled and not 0 <= sequence < x.dim() - 1:
            raise ValueError(
                f"sequence_dimension {sequence} is none of the dimensions before the features of an "
                f"input of shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.input_size} → {self.output_size}, weight {tuple(self.weight.shape)} of {self._size} ranks"
