"""BERT with tensor parallelism: Hugging Face's `BertForPreTraining` with its large matrices
sharded.

The attention is sharded as in the developer guide: query, key and value by heads (column parallel),
the output projection by its input (row parallel). By choice the feed-forward layers are sharded
likewise, and the vocabulary: word embeddings and the language-model head that is tied to them, with
the cross entropy taken over the shards.
"""

import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert import modeling_bert as hf

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.embedding import ParallelEmbedding
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.random import get_xla_rng_tracker
from tutorial_lib.parallel_layers.utils import divide

from .base import ShardedModel
from .configs import from_preset
from .initialize import finish

PRESETS = {
    "tiny": dict(intermediate_size=512),
    "small": dict(intermediate_size=1024),
    "full": dict(  # bert-large-uncased
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        vocab_size=30522,
    ),
}  # fmt: skip


def make_config(preset: str, tp_size: int = 1, shard_mlp: bool = False, **changes) -> BertConfig:
    """The configuration of a preset, see `from_preset`."""
    return from_preset(BertConfig, PRESETS, preset, tp_size, shard_mlp, **changes)


class ParallelSelfAttention(hf.BertSelfAttention):
    """Self-attention over this rank's N/T heads: `[B, S, H] → [B, S, H/T]`."""

    def __init__(self, config: BertConfig, **kwargs):
        super().__init__(config, **kwargs)
        hidden = config.hidden_size
        self.query = ColumnParallelLinear(hidden, hidden, gather_output=False)
        self.key = ColumnParallelLinear(hidden, hidden, gather_output=False)
        self.value = ColumnParallelLinear(hidden, hidden, gather_output=False)
        tp_size = parallel_state.get_tensor_model_parallel_size()
        self.num_attention_heads = divide(self.num_attention_heads, tp_size)
        self.all_head_size = divide(self.all_head_size, tp_size)

    def forward(self, *args, **kwargs):
        # Each rank drops probabilities of its own heads: from the stream that differs between
        # ranks.
        if self.training and self.dropout.p > 0:
            with get_xla_rng_tracker().fork():
                return super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class BertForPreTraining(ShardedModel, hf.BertForPreTraining):
    """`transformers.BertForPreTraining` over the tensor-parallel ranks.

    Args:
        config: Hugging Face's.
        shard_mlp: shard the feed-forward layers too. The published tutorial leaves them whole.
        shard_vocabulary: shard the word embeddings and the head; `prediction_logits` are then this
            rank's `[B, S, V/T]`. A vocabulary that the ranks do not divide is padded; the padding
            takes no part in anything.

    Raises:
        ValueError: a configuration that `check_config` refuses, or an attention kernel that is not
            among `kernels`.
    """

    heads = {
        f"attention.{module}": ("num_attention_heads",)
        for module in ("self.query", "self.key", "self.value", "output.dense")
    }
    checkpointed = {"none": (), "full": (hf.BertLayer,)}

    def __init__(self, config: BertConfig, shard_mlp: bool = False, shard_vocabulary: bool = False):
        self.shard_vocabulary = shard_vocabulary
        hidden, features = config.hidden_size, config.intermediate_size
        before, behind = dict(gather_output=False), dict(input_is_parallel=True)
        with torch.device("meta"):
            super().__init__(config, shard_mlp)
            for index, layer in enumerate(self.bert.encoder.layer):
                layer.attention.self = ParallelSelfAttention(config, layer_idx=index)
                layer.attention.output.dense = RowParallelLinear(hidden, hidden, **behind)
                if shard_mlp:
                    layer.intermediate.dense = ColumnParallelLinear(hidden, features, **before)
                    layer.output.dense = RowParallelLinear(features, hidden, **behind)
            if shard_vocabulary:
                self.bert.embeddings.word_embeddings = ParallelEmbedding(
                    config.vocab_size, hidden, config.pad_token_id, pad=True
                )
                head = self.cls.predictions
                head.decoder = ColumnParallelLinear(hidden, config.vocab_size, pad=True, **before)
                if config.tie_word_embeddings:  # otherwise Hugging Face's bias belongs to nothing
                    head.bias = head.decoder.bias
                self.tie_weights()
        finish(self)

    def count_targets(self, batch: dict) -> torch.Tensor:
        """`[2]`: predicted tokens and sequences of a batch, which the two parts of the loss are
        averaged over.
        """
        tokens = (batch["labels"] != -100).sum()
        return torch.stack([tokens, (batch["next_sentence_label"] != -100).sum()])

    def forward(
        self,
        input_ids,
        attention_mask=None,
        labels=None,
        next_sentence_label=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Hugging Face's forward; with both labels the loss is the sum of its two parts.

        Args:
            input_ids, labels: `[B, S]`; a label of -100 is not predicted.
            attention_mask: `[B, S]`, 0 for padding.
            next_sentence_label: `[B]`; one of -100 is not predicted.
            num_items_in_batch: `[2]`, what `count_targets` gives for the whole global batch. Each
                part of the loss is then its sum over this batch divided by that count, so that the
                losses of all micro-batches and data-parallel ranks add up to the loss of the global
                batch. By default this batch is the whole.
        """
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = self._padding_mask(attention_mask)
        output = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if labels is None or next_sentence_label is None:
            return output
        if num_items_in_batch is None:
            num_items_in_batch = self.count_targets(
                {"labels": labels, "next_sentence_label": next_sentence_label}
            )
        # In bfloat16 a count would have three digits.
        exact = torch.promote_types(output.prediction_logits.dtype, torch.float32)
        tokens, sequences = num_items_in_batch.clamp(min=1).to(exact)
        masked_lm = self._token_losses(output.prediction_logits, labels).sum() / tokens
        next_sentence = nn.functional.cross_entropy(
            output.seq_relationship_logits, next_sentence_label, reduction="sum"
        )
        output.loss = masked_lm + next_sentence / sequences
        return output

    def _padding_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Which tokens each one sees, for the kernel: `[B, 1, S, S]`, bool or to be added to
        scores.

        Unlike Hugging Face's own mask it depends on no value, so a step traces once.
        """
        seen = attention_mask.bool()[:, None, None, :].expand(-1, 1, attention_mask.size(1), -1)
        if self.config._attn_implementation != "eager":
            return seen
        lowest = torch.finfo(self.dtype).min
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, lowest)

    def _token_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.shard_vocabulary:
            return parallel_cross_entropy(logits, labels, vocab_size=self.config.vocab_size)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def model_inputs(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch in the order of the tutorials' data set, by the model's names."""
    names = ("input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label")
    return dict(zip(names, batch))
