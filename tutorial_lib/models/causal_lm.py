"""What the models that predict the next token share: positions and masks, the sharded head, the
loss.
"""

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.random import get_xla_rng_tracker
from tutorial_lib.parallel_layers.utils import ensure_divisibility

from .attention import causal_mask
from .base import ShardedModel
from .initialize import finish


class ShardedDropout(nn.Dropout):
    """Dropout where each tensor-parallel rank draws a mask of its own, for its shard."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        with get_xla_rng_tracker().fork():
            return super().forward(input)


def dropout(rate: float, sharded: bool) -> nn.Dropout:
    """Dropout of an activation that is sharded, or whole on every rank."""
    return ShardedDropout(rate) if sharded else nn.Dropout(rate)


class ShardedBody:
    """Embedding, layers and the last norm; stands before Hugging Face's class among the bases.

    With sequence parallel (`sp`) the output is this rank's `[S/T, B, H]`, otherwise `[B, S, H]`.
    """

    def __init__(self, config: PretrainedConfig, sp: bool, flash: bool):
        super().__init__(config)
        self.sp, self.flash = sp, flash

    def embedding(self, padding_idx: int | None = None, multiple: int = 1) -> ParallelEmbedding:
        """The table of the vocabulary, padded to a multiple of that on each rank."""
        return ParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden_size,
            padding_idx,
            pad=True,
            pad_alignment_size_per_rank=multiple,
            sequence_parallel_enabled=self.sp,
        )

    def _apply(self, fn, recurse: bool = True):
        """Casts the model, but leaves the frequencies of rotary embeddings (Su et al., 2021) in
        float32: bfloat16 has three digits, and after some hundred positions the angles would be
        wrong.
        """
        rotary = getattr(self, "rotary_emb", None)
        before = {} if rotary is None else dict(rotary._buffers)
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if rotary._buffers[name].dtype is not tensor.dtype:
                rotary._buffers[name] = tensor.to(rotary._buffers[name].device)
        return self

    def run_layers(self, hidden_states, hidden, position_ids) -> torch.Tensor:
        """All layers of a model with rotary embeddings."""
        angles = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=hidden, position_embeddings=angles)
        return hidden_states

    def mask_and_positions(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The hidden keys (see `causal_mask`; None for a fused kernel without them) and the
        positions.

        Raises:
            ValueError: with sequence parallel, a sequence length that the ranks do not divide.
        """
        length = input_ids.size(1)
        if self.sp:
            tp_size = parallel_state.get_tensor_model_parallel_size()
            ensure_divisibility(length, tp_size, "sequence length over tensor-parallel ranks")
        hidden = None
        if attention_mask is not None or position_ids is not None or not self.flash:
            hidden = causal_mask(length, input_ids.device, attention_mask, position_ids)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        return hidden, position_ids


class ShardedCausalLM(ShardedModel):
    """A Hugging Face model that predicts the next token, sharded, for training: it keeps no cache.

    Args:
        config: Hugging Face's. A vocabulary that the ranks do not divide is padded; the padding
            takes no part in anything.
        sequence_parallel_enabled: shard norms, dropout and residuals along the sequence too. The
            gradients of norms and of row-parallel biases are then shares, which
            `neuronx_distributed_config(sequence_parallel=True)` sums.
        use_flash_attention: PyTorch's fused kernel for attention.

    Raises:
        ValueError: a configuration that `check_config` refuses.
    """

    body: type[nn.Module]  # the class of the model without its head

    def __init__(
        self,
        config: PretrainedConfig,
        sequence_parallel_enabled: bool = False,
        use_flash_attention: bool = False,
    ):
        self.sequence_parallel_enabled = sequence_parallel_enabled
        with torch.device("meta"):
            super().__init__(config)
            body = self.body(config, sequence_parallel_enabled, use_flash_attention)
            setattr(self, self.base_model_prefix, body)
            self.lm_head = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                bias=False,
                gather_output=False,
                pad=True,
                pad_alignment_size_per_rank=self.vocabulary_multiple,
                sequence_parallel_enabled=sequence_parallel_enabled,
            )
            self.tie_weights()
        finish(self)

    def count_targets(self, batch: dict) -> torch.Tensor:
        """How many tokens of a batch are predicted, over which the loss is averaged."""
        targets = batch["targets"] if "targets" in batch else batch["labels"][:, 1:]
        return (targets != -100).sum()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        labels=None,
        targets=None,
        num_items_in_batch=None,
    ) -> CausalLMOutputWithPast:
        """The loss, and this rank's shard of the logits: `[B, S, V/T]`, padding included.

        Args:
            input_ids: `[B, S]`.
            attention_mask: `[B, S]`, 0 for padding. None stands for no padding: the mask is then a
                constant.
            position_ids: `[B, S]`; by default each row counts from 0. See `causal_mask`.
            labels: `[B, S]`, as in Hugging Face: position s predicts label s + 1, unless that is
                −100.
            targets: `[B, S]`, as in Megatron-LM: position s predicts target s, unless that is −100.
                At most one of the two.
            num_items_in_batch: what `count_targets` gives for the whole global batch. The loss is
                the sum over this batch divided by that count. By default this batch is the whole.

        Raises:
            ValueError: with sequence parallel, a sequence length that the ranks do not divide; a
                mask or positions of another shape; both labels and targets.
        """
        if labels is not None and targets is not None:
            raise ValueError("labels and targets were both given: give the one to be predicted")
        hidden_states = self.base_model(input_ids, attention_mask, position_ids)
        logits = self.lm_head(hidden_states)
        if self.sequence_parallel_enabled:
            logits = logits.transpose(0, 1)
        if labels is not None:  # not a slice of the logits, which would copy them
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        loss = None
        if targets is not None:
            if num_items_in_batch is None:
                num_items_in_batch = (targets != -100).sum()
            count = torch.as_tensor(num_items_in_batch).clamp(min=1)
            losses = parallel_cross_entropy(logits, targets, vocab_size=self.config.vocab_size)
            loss = losses.sum() / count
        return CausalLMOutputWithPast(loss=loss, logits=logits)
