"""An embedding table cut over the tensor-parallel ranks, by rows (the vocabulary) or by columns."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from . import mappings
from .parallel_linear import padding
from .sharded_module import ShardedModule
from .sharding import Partition
from .utils import ensure_positive, ids_outside


class ParallelEmbedding(ShardedModule):
    """An embedding table whose rows are cut over the ranks; or its columns, if
    `shard_across_embedding`.

    By rows, each rank looks up the ids that it owns, gives exact zeros for the others, and the
    ranks' results are summed.

    Args:
        num_embeddings, embedding_dim: the full table: V rows of H.
        padding_idx: a global id, whose row starts as zeros and gets no gradient.
        max_norm, norm_type: as for `nn.Embedding`; only where each rank holds whole rows.
        scale_grad_by_freq, sparse: as for `nn.Embedding`; the former only where each rank sees all
            ids.
        init_method: fills the full table in place.
        shard_across_embedding: cut the columns rather than the rows.
        pad: put zeros behind a size that the ranks do not divide. In training too: no id reaches
            them, and padded columns are cut off.
        sequence_parallel_enabled: give this rank's chunk of the sequence.
        sequence_dimension: where the sequence is in the output. None and 0: ids `[B, S]` give
            `[S/T, B, H]`; 1: `[B, S/T, H]`.
        tensor_model_parallel_group: the ranks; by default the tensor-parallel group.
        use_spmd_rank, tile_cc: for a compiler's sake; they change no result here.
        rank_ordering: the place of each rank's part, where it is not the rank.
        collect_output: False gives this rank's own part: the summand, or the columns.
        pad_alignment_size_per_rank: with `pad`, make each rank's share a multiple of it, as in
            `ColumnParallelLinear`.

    Shapes:
        ids `[…]`; output `[…, H]` in the table's dtype.

    Raises:
        ValueError: sizes that do not divide; with sequence parallel, ids that are not `[B, S]`; and
            an id outside of `[0, V)`, on every rank. On an accelerator, where a look at the ids
            would stall it, such an id's row becomes NaN instead.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[torch.Tensor], object] = nn.init.normal_,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group=None,
        use_spmd_rank: bool = False,
        sequence_dimension: int | None = None,
        tile_cc: bool = False,
        rank_ordering: list[int] | None = None,
        collect_output: bool = True,
        *,
        pad_alignment_size_per_rank: int = 1,
    ):
        super().__init__(device, dtype, tensor_model_parallel_group)
        ensure_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx {padding_idx} is no row of a table of {num_embeddings}"
                )
            padding_idx %= num_embeddings
        parts = self._size
        if parts > 1 and scale_grad_by_freq and not shard_across_embedding:
            raise ValueError(
                "scale_grad_by_freq=True needs shard_across_embedding=True: each rank has to count all ids"
            )
        if parts > 1 and max_norm is not None and shard_across_embedding:
            raise ValueError("max_norm needs whole rows, and shard_across_embedding=True cuts them")
        if sequence_dimension not in (None, 0, 1):
            raise ValueError(f"sequence_dimension {sequence_dimension} is not None, 0 or 1")
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            num_embeddings,
            embedding_dim,
            padding_idx,
        )
        self.max_norm, self.norm_type, self.sparse = max_norm, norm_type, sparse
        self.scale_grad_by_freq, self.init_method = scale_grad_by_freq, init_method
        self.shard_across_embedding, self.collect_output = shard_across_embedding, collect_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0

        self.weight_partition_dim = 1 if shard_across_embedding else 0
        size = (num_embeddings, embedding_dim)[self.weight_partition_dim]
        multiple = pad_alignment_size_per_rank if pad else 1
        self.pad_size = padding(size, parts, multiple) if pad else 0
        order = None if rank_ordering is None else tuple(rank_ordering)
        self._cut = Partition(
            self.weight_partition_dim, (size,), parts, (), self.pad_size, order, multiple
        )
        self._declare("weight", (num_embeddings, embedding_dim), self._cut)
        self.num_embeddings_per_partition, self.embedding_dim_per_partition = self.weight.shape
        self.start_index = 0
        if not shard_across_embedding:
            self.start_index = self._cut.place(self._rank) * self.num_embeddings_per_partition
        self.end_index = self.start_index + self.num_embeddings_per_partition
        self._initialize()

    def reset_parameters(self) -> None:
        """Draws the table as `nn.Embedding` does."""
        full = self._draw((self.num_embeddings, self.embedding_dim), self.init_method)
        if self.padding_idx is not None:
            full[self.padding_idx] = 0
        self._keep("weight", full)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of the ids `input`."""
        self._check_mesh()
        outside = ids_outside(input, self.num_embeddings, "id")
        if self.sequence_parallel_enabled:
            if input.dim() != 2:
                raise ValueError(
                    f"sequence parallel needs ids of shape [B, S], not {tuple(input.shape)}"
                )
            if self.sequence_dimension == 0:
                input, outside = input.t(), None if outside is None else outside.t()
        if self._size == 1 or self.shard_across_embedding:
            rows = self._look_up(input if outside is None else input.masked_fill(outside, 0))
        else:
            local = input - self.start_index
            elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
            local = local.masked_fill(elsewhere, 0)
            rows = self._look_up(local, ~elsewhere).masked_fill(elsewhere.unsqueeze(-1), 0)
        if outside is not None:
            rows = rows.masked_fill(outside.unsqueeze(-1), float("nan"))
        return self._collect(rows) if self.collect_output else rows

    def _look_up(self, local: torch.Tensor, owned: torch.Tensor | None = None) -> torch.Tensor:
        if self.max_norm is not None:
            # Rows that were only looked up in place of another rank's stay as they are.
            with torch.no_grad():
                ids = local.flatten() if owned is None else local[owned]
                torch.embedding_renorm_(self.weight, ids, self.max_norm, self.norm_type)
        padding = self.padding_idx
        if padding is not None:
            padding -= self.start_index
            padding = padding if 0 <= padding < self.num_embeddings_per_partition else None
        return F.embedding(
            local,
            self.weight,
            padding,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )

    def _collect(self, rows: torch.Tensor) -> torch.Tensor:
        sequence = self.sequence_dimension if self.sequence_parallel_enabled else None
        if not self.shard_across_embedding:
            if sequence is not None:
                return mappings.reduce_scatter_to_sequence_parallel_region(
                    rows, sequence, self.groups
                )
            return mappings.reduce_from_tensor_model_parallel_region(rows, self.groups)
        rows = mappings.gather_from_tensor_model_parallel_region(rows, self.groups)
        if not self._cut.trivial:
            cut = Partition(
                -1, self._cut.sizes, self._cut.parts, (), self.pad_size, self._cut.order
            )
            rows = cut.merge(rows.chunk(cut.parts, -1))
        if sequence is not None:
            rows = mappings.scatter_to_sequence_parallel_region(rows, sequence, self.groups)
        return rows

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} × {self.embedding_dim}, weight {tuple(self.weight.shape)} of {self._size} ranks"
