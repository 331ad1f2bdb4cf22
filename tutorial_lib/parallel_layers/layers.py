"""Linear layers whose weights are sharded over the tensor-parallel ranks (Shoeybi et al., 2019,
section 3).

Names and signatures are those of `neuronx_distributed.parallel_layers.layers`. `ParallelEmbedding`
is of this module too, but has a file of its own.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from . import mappings
from .embedding import ParallelEmbedding as ParallelEmbedding
from .features import holds_shard, note_features
from .linear import column_parallel_linear, row_parallel_linear
from .sharded_module import InitMethod, ShardedModule
from .sharding import Partition
from .utils import divide, ensure_positive


def kaiming(weight: torch.Tensor) -> None:
    """The initial weight of `nn.Linear`."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def check_features(layer: ShardedModule, x: torch.Tensor, size: int, sharded: bool) -> None:
    """Raises ValueError unless `x` has `size` features: one rank's shard if `sharded`, else all."""
    layer._check_mesh()
    given = None if layer._size == 1 else holds_shard(x)
    if x.size(-1) != size or given is (not sharded):
        wanted = "this rank's shard of the features" if sharded else "the features of all ranks"
        found = {True: ", one rank's shard", False: ", those of all ranks", None: ""}[given]
        raise ValueError(
            f"{type(layer).__name__} takes {wanted}: {size} of {layer.input_size} on {layer._size} "
            f"ranks; the input of shape {tuple(x.shape)} has {x.size(-1)}{found} "
            "(gather_output of the layer before has to be the opposite of input_is_parallel)"
        )


class ParallelLinear(ShardedModule):
    """What both layers share: a sharded weight, and maybe a bias, that start as `nn.Linear`'s."""

    def __init__(self, input_size, output_size, dtype, device, init_method, sequence_parallel):
        super().__init__(device, dtype)
        ensure_positive(input_size=input_size, output_size=output_size)
        self.input_size, self.output_size = input_size, output_size
        self.init_method = init_method or kaiming
        self.sequence_parallel_enabled = sequence_parallel

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as it is multiplied: `[out, in]`."""
        return self.weight

    def reset_parameters(self) -> None:
        """Draws weight and bias as `nn.Linear` does, with the fan-in of the full weight."""
        self.draw_("weight", self.init_method)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.input_size)
            self.draw_("bias", lambda bias: nn.init.uniform_(bias, -bound, bound))

    def _gathered(self, output: torch.Tensor) -> torch.Tensor:
        """The output features of all ranks, without padding. Where ranks hold copies, one is taken;
        the others get no gradient, so that it counts once.
        """
        output = mappings.gather_from_tensor_model_parallel_region(output)
        if self.rows.trivial:
            return output
        return replace(self.rows, dim=-1).merge(output.chunk(self._size, -1))

    def extra_repr(self) -> str:
        return (
            f"{self.input_size} → {self.output_size}, weight {tuple(self.weight.shape)} on each of "
            f"{self._size} ranks"
        )


class ColumnParallelLinear(ParallelLinear):
    """`Y = X Aᵀ + b` with the rows of `A` (and of `b`) sharded: each rank computes its own output
    features.

    Args:
        input_size, output_size: features of the full layer.
        bias: whether there is one: sharded like the weight, or whole on every rank if
            `gather_output`.
        gather_output: give every rank all output features, rather than its own.
        stride: how many matrices are concatenated in the weight (3 for q, k, v; 2 for gate, up);
            each is sharded by itself.
        init_method: fills the full weight in place; by default as `nn.Linear`.
        sequence_parallel_enabled: the input is this rank's shard of the sequence, `[S/T, B, H]`. It
            is gathered in forward and again in backward, not kept gathered.
        pad: append zero rows where the ranks do not divide `output_size`, in training too: the rows
            take no part in the multiplication, so their output and gradient are exactly 0.
        pad_alignment_size_per_rank: with `pad`, make each rank's share a multiple of it.

    Shapes:
        input `[…, input_size]`, any number of dimensions; output `[…, output_size / T]`, or `[…,
        output_size]` if gathered.

    Raises:
        ValueError: sizes that are not divisible, and `gather_output` with sequence parallelism.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        *,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
    ):
        super().__init__(
            input_size, output_size, dtype, device, init_method, sequence_parallel_enabled
        )
        ensure_positive(stride=stride)
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "gather_output=True and sequence_parallel_enabled=True exclude each other"
            )
        if pad and stride > 1:
            raise ValueError(f"pad=True needs stride=1, one matrix in the weight, not {stride}")
        self.gather_output = gather_output
        sizes = (divide(output_size, stride, "output_size over stride"),) * stride
        self.rows = rows = self._rows(sizes, pad, pad_alignment_size_per_rank)
        self.output_size_per_partition = sum(rows.local_sizes)
        self._declare("weight", (output_size, input_size), rows)
        shape = (output_size,) if bias else None
        self._declare("bias", shape, None if gather_output else rows)
        self._initialize()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output features of this rank, or all."""
        check_features(self, input, self.input_size, sharded=False)
        weight, bias = self.matrix, None if self.gather_output else self.bias
        padding = self.output_size_per_partition - self.rows.real_size(self._rank)
        if padding:
            weight, bias = weight[:-padding], None if bias is None else bias[:-padding]
        output = column_parallel_linear(input, weight, bias, self.sequence_parallel_enabled)
        if padding:
            output = nn.functional.pad(output, (0, padding))
        if self.gather_output:
            output = self._gathered(output)
            if self.bias is not None:
                output = output + self.bias.to(output.dtype)
        return note_features(
            output, self.output_size, self.output_size_per_partition, self.gather_output
        )


class RowParallelLinear(ParallelLinear):
    """`Y = X Aᵀ + b` with the columns of `A` sharded: each rank multiplies its input features, and
    the results are summed over the ranks.

    Args:
        input_is_parallel: the input is this rank's features already (from a column layer);
            otherwise the layer takes its shard of them.
        sequence_parallel_enabled: keep this rank's shard of the sequence of the sum, `[S/T, B, H]`;
            needs `input_is_parallel`. The bias is then marked `sequence_parallel_enabled`: its
            gradient is this rank's share, to be summed once a step.

    The other arguments are those of `ColumnParallelLinear`. The bias is whole on every rank, and
    added once.

    Shapes:
        input `[…, input_size / T]` or `[…, input_size]`; output `[…, output_size]`, or its shard of
        the sequence.

    Raises:
        ValueError: sizes that are not divisible, and sequence parallelism without
            `input_is_parallel`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
    ):
        super().__init__(
            input_size, output_size, dtype, device, init_method, sequence_parallel_enabled
        )
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("sequence_parallel_enabled=True needs input_is_parallel=True")
        self.input_is_parallel = input_is_parallel
        columns = Partition(1, (input_size,), self._size)
        self.input_size_per_partition = columns.local_sizes[0]
        self._declare("weight", (output_size, input_size), columns)
        shape = (output_size,) if bias else None
        self._declare("bias", shape, sequence_parallel_enabled=sequence_parallel_enabled)
        self._initialize()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, or this rank's shard of its sequence."""
        if not self.input_is_parallel:
            check_features(self, input, self.input_size, sharded=False)
            input = mappings.scatter_to_tensor_model_parallel_region(input)
        check_features(self, input, self.input_size_per_partition, sharded=True)
        return row_parallel_linear(input, self.matrix, self.bias, self.sequence_parallel_enabled)
