"""An embedding table whose rows, the vocabulary, are sharded over the tensor-parallel ranks."""

import torch
from torch import nn
from torch.nn import functional as F

from . import mappings
from .sharded_module import InitMethod, ShardedModule
from .utils import ensure_positive, ids_outside


class ParallelEmbedding(ShardedModule):
    """`nn.Embedding` with its rows sharded: each rank looks up the ids that it owns, gives exact
    zeros for the others, and the ranks' results are summed.

    Args:
        num_embeddings, embedding_dim: the full table: V rows of H.
        padding_idx: a global id, whose row starts as zeros and gets no gradient.
        init_method: fills the full table in place.
        pad: append zero rows where the ranks do not divide `num_embeddings`, in training too: no id
            reaches them.
        pad_alignment_size_per_rank: with `pad`, make each rank's share a multiple of it, as in
            `ColumnParallelLinear`.
        sequence_parallel_enabled: give this rank's shard of the sequence.

    Shapes:
        ids `[…]`, output `[…, H]` in the table's dtype; with sequence parallelism ids `[B, S]`,
        output `[S/T, B, H]`.

    Raises:
        ValueError: sizes that are not divisible; with sequence parallelism, ids that are not `[B,
            S]`; and an id outside of `[0, V)`, on every rank. On an accelerator, where a look at
            the ids would stall it, such an id's row becomes NaN instead.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init_method: InitMethod = nn.init.normal_,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        sequence_parallel_enabled: bool = False,
    ):
        super().__init__(device, dtype)
        ensure_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx {padding_idx} is not a row of a table of {num_embeddings}"
                )
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.init_method = padding_idx, init_method
        self.sequence_parallel_enabled = sequence_parallel_enabled
        rows = self._rows((num_embeddings,), pad, pad_alignment_size_per_rank)
        self._declare("weight", (num_embeddings, embedding_dim), rows)
        self.num_embeddings_per_partition = rows.local_sizes[0]
        self.start_index = self._rank * self.num_embeddings_per_partition
        self._initialize()

    def reset_parameters(self) -> None:
        """Draws the table as `nn.Embedding` does."""

        def init(table: torch.Tensor) -> None:
            self.init_method(table)
            if self.padding_idx is not None:
                table[self.padding_idx] = 0

        self.draw_("weight", init)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of the ids `input`."""
        self._check_mesh()
        outside = ids_outside(input, self.num_embeddings, "id")
        if self.sequence_parallel_enabled:
            if input.dim() != 2:
                raise ValueError(
                    f"sequence parallelism needs ids of shape [B, S], not {tuple(input.shape)}"
                )
            input, outside = input.t(), None if outside is None else outside.t()
        elsewhere = None
        if self._size > 1 or outside is not None:
            input = input - self.start_index
            elsewhere = (input < 0) | (input >= self.num_embeddings_per_partition)
            input = input.masked_fill(elsewhere, 0)
        rows = F.embedding(input, self.weight, self._local_padding())
        if elsewhere is not None:
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        if outside is not None:
            rows = rows.masked_fill(outside.unsqueeze(-1), float("nan"))
        if self.sequence_parallel_enabled:
            return mappings.reduce_scatter_to_sequence_parallel_region(rows)
        return mappings.reduce_from_tensor_model_parallel_region(rows)

    def _local_padding(self) -> int | None:
        """Where the row `padding_idx` is on this rank."""
        if self.padding_idx is None:
            return None
        local = self.padding_idx - self.start_index
        return local if 0 <= local < self.num_embeddings_per_partition else None

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings} × {self.embedding_dim}, weight {tuple(self.weight.shape)} on "
            f"each of {self._size} ranks"
        )
