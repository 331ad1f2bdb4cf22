"""What the models that predict the next token share: positions and masks, the sharded head, the
loss.
"""

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.utils import ensure_divisibility

from .attention import causal_mask
from .base import ShardedModel
from .initialize import finish


class ShardedBody:
    """Embedding, layers and the last norm; stands before Hugging Face's class among the bases.

    With sequence parallel the output is this rank's `[S/T, B, H]`, otherwise `[B, S, H]`.
    """

    def __init__(
        self, config: PretrainedConfig, sequence_parallel_enabled: bool, use_flash_attention: bool
    ):
        super().__init__(config)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.use_flash_attention = use_flash_attention

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
        if self.sequence_parallel_enabled:
            tp_size = parallel_state.get_tensor_model_parallel_size()
            ensure_divisibility(length, tp_size, "sequence length over tensor-parallel ranks")
        hidden = None
        if attention_mask is not None or position_ids is not None or not self.use_flash_attention:
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
