"""Query, key and value projections for fewer key/value heads than query heads (Ainslie et al.,
2023), or than ranks.
"""

import math

import torch
from torch import nn

from ..parallel_layers import mappings, parallel_state
from ..parallel_layers.layers_utils import column_parallel_linear
from ..parallel_layers.parallel_linear import InitMethod, check_features, kaiming
from ..parallel_layers.sharded_module import ShardedModule
from ..parallel_layers.sharding import Partition
from ..parallel_layers.utils import ensure_divisibility, ensure_positive

PARTS = ("q", "k", "v")


class GQAQKVColumnParallelLinear(ShardedModule):
    """Three column-parallel projections in one multiplication, key and value held by several ranks
    where they have to be.

    Rank r of T holds query features `[r, r + 1) · Q/T`. With multiplier m it holds the part number
    `r // m` of the T/m parts of key and of value, together with its m − 1 neighbours. So query
    heads stay in order, and each finds the key and value head that it has in the full model on its
    own rank, as long as a rank holds one such head where m > 1: choose m = T / (number of key/value
    heads). With 8 query heads, 2 key/value heads, T = 4 and m = 2:

        rank      0      1      2      3
        q heads   0 1    2 3    4 5    6 7
        k, v      0      0      1      1

    Each copy's gradient comes from its own query heads; backward sums it over the copies, so that
    they stay equal. In `weight_qkv` and `bias_qkv` the rank's rows of q, k and v lie one behind the
    other.

    Args:
        input_size: features of the input.
        output_sizes: features of the full query, and of the full key (and value).
        bias: whether there is one; it is cut as the weight is.
        gather_output: give every rank all features, rather than its own.
        sequence_parallel_enabled: the input is this rank's chunk of the sequence, along dimension
            0.
        keep_master_weight: keep the full initial weight, `[Q + 2·KV, input_size]`, as
            `master_weight`.
        kv_size_multiplier: m, how many ranks hold the same part of key and value.
        fuse_qkv: one parameter `weight_qkv`, or three: `weight_q`, `weight_k`, `weight_v`.
        reduce_dtype: dtype in which the input's gradient is summed over the ranks (float64 stays
            float64).
        head_dim: features of a head, to check that heads stay whole and pairs together; not checked
            if None.

    Shapes:
        input `[…, input_size]`; q `[…, Q/T]`, k and v `[…, KV·m/T]`.

    Raises:
        ValueError: sizes that do not divide, and what `ColumnParallelLinear` refuses.
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
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        *,
        head_dim: int | None = None,
    ):
        super().__init__(device, dtype, None)
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "gather_output=True and sequence_parallel_enabled=True exclude each other"
            )
        if len(output_sizes) != 2:
            raise ValueError(
                f"output_sizes {output_sizes} are not two: of query, and of key and value"
            )
        query, key = output_sizes
        ensure_positive(
            input_size=input_size,
            query_size=query,
            key_size=key,
            kv_size_multiplier=kv_size_multiplier,
        )
        parts = self._size
        ensure_divisibility(
            parts, kv_size_multiplier, "tensor parallel size over kv_size_multiplier"
        )
        self._sizes = dict(zip(PARTS, (query, key, key)))
        self._cuts = {
            part: Partition(0, (size,), parts, (1 if part == "q" else kv_size_multiplier,))
            for part, size in self._sizes.items()
        }
        if head_dim is not None:
            _check_heads(query, key, parts, kv_size_multiplier, head_dim)
        if kv_size_multiplier > 1:
            parallel_state.initialize_kv_group(kv_size_multiplier, sequential_ranks_in_group=True)
        self.input_size, self.output_sizes, self.kv_size_multiplier = (
            input_size,
            (query, key),
            kv_size_multiplier,
        )
        self.gather_output, self.fuse_qkv, self.reduce_dtype = gather_output, fuse_qkv, reduce_dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.init_method, self.keep_master_weight = init_method or kaiming, keep_master_weight
        self.master_weight: torch.Tensor | None = None
        self.use_bias = bias

        shapes = {"weight": (input_size,)} | ({"bias": ()} if bias else {})
        for kind, rest in shapes.items():
            if fuse_qkv:
                sizes = tuple(self._sizes.values())
                fused = Partition(0, sizes, parts, (1, kv_size_multiplier, kv_size_multiplier))
                self._declare(f"{kind}_qkv", (sum(sizes), *rest), fused)
                self._note_copies(f"{kind}_qkv", sum(fused.local_sizes[1:]))
            else:
                for part, size in self._sizes.items():
                    self._declare(f"{kind}_{part}", (size, *rest), self._cuts[part])
                    if part != "q":
                        self._note_copies(f"{kind}_{part}", *self._cuts[part].local_sizes)
        self._initialize()

    def _note_copies(self, name: str, rows: int) -> None:
        """Marks the last rows of a parameter as those that the ranks of the kv group share."""
        if self.kv_size_multiplier > 1:
            parameter = getattr(self, name)
            parameter.kv_shared_numel = rows * math.prod(parameter.shape[1:])

    def reset_parameters(self) -> None:
        """Draws weight and bias of q, then k, then v, each as `nn.Linear` does."""
        weights, biases = [], []
        for size in self._sizes.values():
            weights.append(self._draw((size, self.input_size), self.init_method))
            if self.use_bias:
                bound = 1 / math.sqrt(self.input_size)
                biases.append(self._draw((size,), lambda b: nn.init.uniform_(b, -bound, bound)))
        for kind, tensors in ("weight", weights), ("bias", biases):
            if self.fuse_qkv and tensors:
                self._keep(f"{kind}_qkv", torch.cat(tensors))
            elif tensors:
                for part, tensor in zip(PARTS, tensors):
                    self._keep(f"{kind}_{part}", tensor)
        self.master_weight = torch.cat(weights) if self.keep_master_weight else None

    def _fused(self, kind: str) -> torch.Tensor:
        if self.fuse_qkv:
            return getattr(self, f"{kind}_qkv")
        return torch.cat([getattr(self, f"{kind}_{part}") for part in PARTS])

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of this rank, or all."""
        self._check_mesh()
        check_features(self, input, self.input_size, sharded=False)
        weight, bias = self._fused("weight"), self._fused("bias") if self.use_bias else None
        local = [self._cuts[part].local_sizes[0] for part in PARTS]
        shared = self.kv_size_multiplier > 1
        output = column_parallel_linear(
            input,
            weight,
            bias,
            self.groups,
            0 if self.sequence_parallel_enabled else None,
            self.reduce_dtype,
            shared_rows=sum(local[1:]) if shared else 0,
            shared_groups=parallel_state.get_kv_shared_replica_groups() if shared else None,
        )
        outputs = output.split(local, -1)
        return tuple(map(self._gather, PARTS, outputs)) if self.gather_output else outputs

    def _gather(self, part: str, output: torch.Tensor) -> torch.Tensor:
        """All features in order, of one copy of each: the other copies then get no gradient, to be
        counted once.
        """
        gathered = mappings.gather_from_tensor_model_parallel_region(output, self.groups)
        cut = self._cuts[part]
        if cut.trivial:
            return gathered
        return Partition(-1, cut.sizes, cut.parts, cut.replicas).merge(
            gathered.chunk(cut.parts, -1)
        )

    def extra_repr(self) -> str:
        return f"{self.input_size} → {self.output_sizes}, kv on {self.kv_size_multiplier} of {self._size} ranks"


def _check_heads(query: int, key: int, parts: int, multiplier: int, head_dim: int) -> None:
    """Raises ValueError unless every rank holds whole heads, and each query head's key/value head."""
    for name, size in (("query", query), ("key/value", key)):
        ensure_divisibility(size, head_dim, f"{name} features over head_dim")
    heads, kv_heads = query // head_dim, key // head_dim
    ensure_divisibility(heads, kv_heads, "query heads over key/value heads")
    ensure_divisibility(heads, parts, "query heads over ranks")
    ensure_divisibility(
        kv_heads * multiplier, parts, "key/value heads × kv_size_multiplier over ranks"
    )
    if multiplier > 1 and kv_heads * multiplier != parts:
        raise ValueError(
            f"{kv_heads} key/value heads × kv_size_multiplier {multiplier} give {kv_heads * multiplier // parts} "
            f"on each of {parts} ranks, and query heads pair with theirs only where that is 1"
        )
