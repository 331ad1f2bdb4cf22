"""Query, key and value projections for fewer key/value heads than query heads (Ainslie et al.,
2023), or than ranks.
"""

import math

import torch
from torch import nn

from ..parallel_layers import parallel_state
from ..parallel_layers.layers import ParallelLinear, check_features
from ..parallel_layers.linear import column_parallel_linear
from ..parallel_layers.sharded_module import InitMethod
from ..parallel_layers.sharding import Partition
from ..parallel_layers.utils import ensure_divisibility, ensure_positive


class GQAQKVColumnParallelLinear(ParallelLinear):
    """Three column-parallel projections in one multiplication, with key and value on several ranks
    where they have to be.

    Rank r of T holds query features `[r, r + 1) · Q/T`. With multiplier m it holds shard number
    `r // m` of the T/m shards of key and of value, as do its m − 1 neighbours. So query heads stay
    in order, and each finds the key and value head that it has in the full model on its own rank,
    as long as a rank holds one such head where m > 1: choose m = T / (number of key/value heads).
    With 8 query heads, 2 key/value heads, T = 4 and m = 2:

        rank      0      1      2      3
        q heads   0 1    2 3    4 5    6 7
        k, v      0      0      1      1

    Each copy's gradient comes from its own query heads; backward sums it over the copies, so that
    they stay equal. In `weight_qkv` and `bias_qkv` the rank's rows of q, k and v are concatenated.

    Args:
        input_size: features of the input.
        output_sizes: features of the full query, and of the full key (and value).
        bias: whether there is one; it is sharded like the weight.
        gather_output: give every rank all features, rather than its own.
        init_method: fills each full matrix in place; by default as `nn.Linear`.
        sequence_parallel_enabled: the input is this rank's shard of the sequence, `[S/T, B, H]`.
        kv_size_multiplier: m, how many ranks hold the same shard of key and value.
        fuse_qkv: has to be True: q, k and v are one parameter here.

    Shapes:
        input `[…, input_size]`; q `[…, Q/T]`, k and v `[…, KV·m/T]`.

    Raises:
        ValueError: sizes that are not divisible, and what `ColumnParallelLinear` refuses.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int] | tuple[int, int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        *,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
    ):
        query, key = output_sizes
        ensure_positive(query_size=query, key_size=key, kv_size_multiplier=kv_size_multiplier)
        super().__init__(
            input_size, query + 2 * key, dtype, device, init_method, sequence_parallel_enabled
        )
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "gather_output=True and sequence_parallel_enabled=True exclude each other"
            )
        if not fuse_qkv:
            raise ValueError("fuse_qkv=False is not supported: q, k and v are one parameter")
        what = "tensor parallel size over kv_size_multiplier"
        ensure_divisibility(self._size, kv_size_multiplier, what)
        if kv_size_multiplier > 1:
            parallel_state.initialize_kv_group(kv_size_multiplier)
        self.output_sizes, self.gather_output = (query, key), gather_output
        replicas = (1, kv_size_multiplier, kv_size_multiplier)
        self.rows = rows = Partition(0, (query, key, key), self._size, replicas)
        # The last rows, of key and value, are those that the ranks of a kv group share.
        self._copied_rows = sum(rows.local_sizes[1:]) if kv_size_multiplier > 1 else 0
        for name, rest in ("weight_qkv", (input_size,)), ("bias_qkv", ()):
            shared = self._copied_rows * math.prod(rest)
            shape = (self.output_size, *rest) if bias or rest else None
            self._declare(name, shape, rows, **({"kv_shared_numel": shared} if shared else {}))
        self._initialize()

    @property
    def weight(self) -> torch.Tensor:
        return self.weight_qkv

    def reset_parameters(self) -> None:
        """Draws weight and bias of q, then k, then v, each as `nn.Linear` does."""
        names = ["weight_qkv"] + ["bias_qkv"] * (self.bias_qkv is not None)
        full, bound = [self._full(name) for name in names], 1 / math.sqrt(self.input_size)
        for weight, *bias in zip(*(tensor.split(self.rows.sizes) for tensor in full)):
            self.init_method(weight)
            for vector in bias:
                nn.init.uniform_(vector, -bound, bound)
        for name, tensor in zip(names, full):
            self._keep(name, tensor)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of this rank, or all."""
        check_features(self, input, self.input_size, sharded=False)
        output = column_parallel_linear(
            input,
            self.weight_qkv,
            self.bias_qkv,
            self.sequence_parallel_enabled,
            self._copied_rows,
        )
        if not self.gather_output:
            return output.split(self.rows.local_sizes, -1)
        return self._gathered(output).split(self.rows.sizes, -1)
