"""Linear layers whose weights are cut over the ranks (Shoeybi et al., 2019, section 3).

Names and signatures are those of `neuronx_distributed.parallel_layers.layers`. `ParallelEmbedding`
is of this module too, but has a file of its own.
"""

import torch
from torch import nn

from . import mappings
from .embedding import ParallelEmbedding as ParallelEmbedding
from .layers_utils import column_parallel_linear, row_parallel_linear
from .parallel_linear import InitMethod, ParallelLinear, padding
from .sharding import Partition


class ColumnParallelLinear(ParallelLinear):
    """`Y = X Aᵀ + b` with the rows of `A` (and of `b`) cut over the ranks: each computes its own
    output features.

    Args:
        input_size, output_size: features of the full layer.
        bias: whether there is one: cut as the weight is, or whole on every rank if `gather_output`.
        gather_output: give every rank all output features, rather than its own.
        stride: number of fused matrices (3 for q, k, v; 2 for gate, up); each is cut for itself.
        init_method: fills the full weight in place; by default as `nn.Linear`.
        sequence_parallel_enabled: the input is this rank's chunk of the sequence. It is gathered in
            forward and again in backward, not kept gathered.
        sequence_dimension: where the sequence is; None stands for 0 (`[S, B, H]`).
        keep_master_weight: keep the full initial weight as `master_weight`.
        skip_bias_add: return `(output, bias)`, for a kernel that fuses the sum.
        pad: put zero rows behind an `output_size` that the ranks do not divide. In training too:
            they take no part in the multiplication, so that their output and gradient are exactly
            0.
        pad_alignment_size_per_rank: with `pad`, make each rank's share a multiple of it.
        keep_padded_output: with `pad` and `gather_output`, leave the padding's zeros in the output.
        tensor_model_parallel_group: the ranks; by default the tensor-parallel group.
        reduce_dtype: dtype in which the input's gradient is summed over the ranks (float64 stays
            float64).
        rank_ordering: the place of each rank's part, where it is not the rank.

    Shapes:
        input `[…, input_size]`, any number of dimensions; output `[…, output_size / T]`, or `[…,
        output_size]` if gathered.

    Raises:
        ValueError: sizes that do not divide, and `gather_output` together with sequence parallel.
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
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group=None,
        reduce_dtype: torch.dtype = torch.float32,
        rank_ordering: list[int] | None = None,
    ):
        super().__init__(
            input_size, output_size, device=device, dtype=dtype, group=tensor_model_parallel_group,
            stride=stride, init_method=init_method, pad=pad, keep_master=keep_master_weight,
        )  # fmt: skip
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "gather_output=True and sequence_parallel_enabled=True exclude each other"
            )
        parts = self._size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.reduce_dtype = reduce_dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.keep_padded_output = keep_padded_output
        zeros = padding(output_size, parts, pad_alignment_size_per_rank) if pad else 0
        order = None if rank_ordering is None else tuple(rank_ordering)
        multiple = pad_alignment_size_per_rank if pad else 1
        self._set_cut(Partition(0, self._fused(output_size), parts, (), zeros, order, multiple))
        self._declare("weight", (output_size, input_size), self._cut)
        if bias:
            self._declare("bias", (output_size,), None if gather_output else self._cut)
        else:
            self.register_parameter("bias", None)
        self._initialize()

    def _set_cut(self, cut: Partition) -> None:
        self._cut, self.pad_size = cut, cut.pad
        self.output_size_per_partition = sum(cut.local_sizes)

    def forward(self, input: torch.Tensor, slice_indices: torch.Tensor | None = None):
        """The output features of this rank, or all.

        Args:
            input: `[…, input_size]`.
            slice_indices: rows of this rank's weight to compute, by default all.
        """
        self._check_input(input, self.input_size, sharded=False)
        if slice_indices is not None and self.gather_output and self.bias is not None:
            raise ValueError(
                "slice_indices needs gather_output=False or bias=False: the bias is that of all features"
            )
        weight, bias = self.matrix, None if self.gather_output or self.skip_bias_add else self.bias
        real = self._cut.real_size(self._rank)
        if slice_indices is not None:
            weight, bias = weight[slice_indices], bias if bias is None else bias[slice_indices]
        elif real < weight.size(0):
            weight, bias = weight[:real], bias if bias is None else bias[:real]
        sequence_dim = self.sequence_dimension if self.sequence_parallel_enabled else None
        output = column_parallel_linear(
            input, weight, bias, self.groups, sequence_dim, self.reduce_dtype
        )
        if slice_indices is None and real < self.output_size_per_partition:
            output = nn.functional.pad(output, (0, self.output_size_per_partition - real))
        if self.gather_output:
            output = mappings.gather_from_tensor_model_parallel_region(output, self.groups)
            if not self._cut.trivial and slice_indices is None:
                output = self._in_order(output)
            if self.bias is not None and not self.skip_bias_add:
                output = output + self._whole_bias(output)
        if slice_indices is None:
            mappings.note_features(
                output, self.output_size, self.output_size_per_partition, self.gather_output
            )
        return (output, self.bias) if self.skip_bias_add else output

    def _in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """The features of all ranks in the order of the full weight."""
        cut = Partition(-1, self._cut.sizes, self._cut.parts, (), self.pad_size, self._cut.order)
        merged = cut.merge(gathered.chunk(cut.parts, -1))
        return nn.functional.pad(merged, (0, self.pad_size)) if self.keep_padded_output else merged

    def _whole_bias(self, output: torch.Tensor) -> torch.Tensor:
        bias = self.bias.to(output.dtype)
        return nn.functional.pad(bias, (0, output.size(-1) - bias.size(0)))


class RowParallelLinear(ParallelLinear):
    """`Y = X Aᵀ + b` with the columns of `A` cut over the ranks: each multiplies its input
    features, and the sum is shared.

    Args:
        input_is_parallel: the input is this rank's features already (from a column layer);
            otherwise they are cut out.
        sequence_parallel_enabled: keep this rank's chunk of the sequence of the sum; needs
            `input_is_parallel`. The bias is then marked `sequence_parallel_enabled`: its gradient
            is this rank's share, to be summed once a step.
        sequence_dimension: where the sequence is; None stands for 0 (`[S, B, H]`).
        skip_bias_add: return `(output, bias)`.
        pad: put zero columns behind an `input_size` that the ranks do not divide; they take no
            part, in training too. The input comes with its padding if it is parallel, without it
            otherwise.
        reduce_output: False gives each rank's own summand, without the bias.
        reduce_dtype: dtype in which the output is summed over the ranks (float64 stays float64).
        tile_cc: for a compiler's sake; it changes no result here.

    The other arguments are those of `ColumnParallelLinear`. The bias is whole on every rank, and
    added once.

    Shapes:
        input `[…, input_size / T]` or `[…, input_size]`; output `[…, output_size]`, or its chunk of
        the sequence.

    Raises:
        ValueError: sizes that do not divide, and sequence parallel without `input_is_parallel`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group=None,
        reduce_dtype: torch.dtype = torch.float32,
        tile_cc: bool = False,
        rank_ordering: list[int] | None = None,
    ):
        super().__init__(
            input_size, output_size, device=device, dtype=dtype, group=tensor_model_parallel_group,
            stride=stride, init_method=init_method, pad=pad, keep_master=keep_master_weight,
        )  # fmt: skip
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("sequence_parallel_enabled=True needs input_is_parallel=True")
        if sequence_parallel_enabled and not reduce_output:
            raise ValueError(
                "sequence_parallel_enabled=True needs reduce_output=True: it is the reduction that cuts"
            )
        parts = self._size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.reduce_output, self.reduce_dtype = reduce_output, reduce_dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        zeros = padding(input_size, parts) if pad else 0
        order = None if rank_ordering is None else tuple(rank_ordering)
        self._set_cut(Partition(1, self._fused(input_size), parts, (), zeros, order))
        self._declare("weight", (output_size, input_size), self._cut)
        if bias:
            self._declare(
                "bias", (output_size,), sequence_parallel_enabled=sequence_parallel_enabled
            )
        else:
            self.register_parameter("bias", None)
        self._initialize()

    def _set_cut(self, cut: Partition) -> None:
        self._cut, self.pad_size, self.input_size_per_partition = cut, cut.pad, sum(cut.local_sizes)

    def forward(self, input: torch.Tensor):
        """The sum over the ranks, or this rank's chunk or share of it."""
        if not self.input_is_parallel:
            self._check_input(input, self.input_size, sharded=False)
            if not self._cut.trivial:
                input = self._by_rank(input)
            input = mappings.scatter_to_tensor_model_parallel_region(input, self.groups)
        self._check_input(input, self.input_size_per_partition, sharded=True)
        weight = self.matrix
        real = self._cut.real_size(self._rank)
        if real < weight.size(1):
            input, weight = input[..., :real], weight[:, :real]
        if not self.reduce_output:
            output = nn.functional.linear(input, weight)
        else:
            sequence_dim = self.sequence_dimension if self.sequence_parallel_enabled else None
            bias = None if self.skip_bias_add else self.bias
            output = row_parallel_linear(
                input, weight, bias, self.groups, sequence_dim, self.reduce_dtype
            )
        return (output, self.bias) if self.skip_bias_add else output

    def _by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """The features in the order in which the ranks hold them."""
        cut = Partition(-1, self._cut.sizes, self._cut.parts, (), self.pad_size, self._cut.order)
        return torch.cat([cut.shard(whole, rank) for rank in range(cut.parts)], -1)
