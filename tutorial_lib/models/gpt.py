"""GPT-2 and GPT-3 with tensor and sequence parallelism: Hugging Face's `GPT2LMHeadModel`, cut over
the ranks.

Attention is cut by heads, the feed-forward layers by features, embedding and the head that is tied
to it by the vocabulary, with the cross entropy taken over the parts (Shoeybi et al., 2019). With
sequence parallel, what lies between those layers is cut along the sequence, in the layout `[S/T, B,
H]` (Korthikanti et al., 2022, section 4.2).

Dropout of what every rank holds draws the same mask on all of them, from torch's default stream.
Dropout of what is cut (the heads, with sequence parallel everything) draws a mask of each rank's
own, from the model-parallel stream.
"""

import math
from functools import partial

import torch
from torch import nn
from transformers import GPT2Config
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt2 import modeling_gpt2 as hf

from tutorial_lib.modules.conv1d import ColumnParallelConv1D, RowParallelConv1D
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layer_norm import LayerNorm
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from tutorial_lib.parallel_layers.marks import KeepsParameterMarks
from tutorial_lib.parallel_layers.utils import ensure_divisibility

from .attention import CoreAttention, causal_mask
from .base import ShardedModel
from .causal_lm import causal_lm_loss, count_targets, targets_loss
from .dropout import ShardedDropout
from .gpt_config import PRESETS as PRESETS
from .gpt_config import VOCABULARY_MULTIPLE, check_config, feed_forward_size
from .gpt_config import make_config as make_config
from .gpt_config import padded_vocabulary as padded_vocabulary
from .gpt_config import parameter_count as parameter_count
from .initialize import finish, initialize_sharded


def _dropout(rate: float, sequence_parallel_enabled: bool) -> nn.Dropout:
    return ShardedDropout(rate) if sequence_parallel_enabled else nn.Dropout(rate)


def _norm(config: GPT2Config, sequence_parallel_enabled: bool) -> LayerNorm:
    return LayerNorm(
        config.n_embd,
        eps=config.layer_norm_epsilon,
        sequence_parallel_enabled=sequence_parallel_enabled,
    )


class ParallelAttention(hf.GPT2Attention):
    """Self-attention over this rank's N/T heads: `[B, S, H]`, or `[S/T, B, H]`, in and out."""

    def __init__(
        self,
        config: GPT2Config,
        layer_idx: int,
        sequence_parallel_enabled: bool,
        use_flash_attention: bool,
    ):
        super().__init__(config, layer_idx=layer_idx)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        hidden, common = config.n_embd, dict(sequence_parallel_enabled=sequence_parallel_enabled)
        # Queries, keys and values of all heads lie one behind the other: three matrices, each cut
        # for itself.
        self.c_attn = ColumnParallelConv1D(
            hidden, 3 * hidden, stride=3, gather_output=False, **common
        )
        self.core_attn = CoreAttention(self.scaling, config.attn_pdrop, use_flash_attention)
        self.c_proj = RowParallelConv1D(hidden, hidden, input_is_parallel=True, **common)
        self.resid_dropout = _dropout(config.resid_pdrop, sequence_parallel_enabled)

    def forward(self, hidden_states, attention_mask=None, **_):
        fused = self.c_attn(hidden_states)
        query, key, value = (self._by_head(part) for part in fused.chunk(3, -1))
        context = self.core_attn(query, key, value, attention_mask)  # [B, N/T, S, D]
        order = (2, 0, 1, 3) if self.sequence_parallel_enabled else (0, 2, 1, 3)
        context = context.permute(order)
        return self.resid_dropout(self.c_proj(context.flatten(2))), None

    def _by_head(self, features: torch.Tensor) -> torch.Tensor:
        """`[B, N/T, S, D]` of `[B, S, H/T]`, or of `[S, B, H/T]` with sequence parallel."""
        heads = features.unflatten(-1, (-1, self.head_dim))
        return heads.permute((1, 2, 0, 3) if self.sequence_parallel_enabled else (0, 2, 1, 3))


class ParallelMLP(hf.GPT2MLP):
    """The feed-forward layer: this rank's F/T features between its multiplications, summed over the
    ranks behind.
    """

    def __init__(self, config: GPT2Config, sequence_parallel_enabled: bool):
        features = feed_forward_size(config)
        super().__init__(features, config)
        common = dict(sequence_parallel_enabled=sequence_parallel_enabled)
        self.c_fc = ColumnParallelConv1D(config.n_embd, features, gather_output=False, **common)
        self.c_proj = RowParallelConv1D(features, config.n_embd, input_is_parallel=True, **common)
        self.dropout = _dropout(config.resid_pdrop, sequence_parallel_enabled)


class ParallelBlock(hf.GPT2Block):
    """A transformer layer with its attention and feed-forward layer cut."""

    def __init__(
        self,
        config: GPT2Config,
        layer_idx: int,
        sequence_parallel_enabled: bool,
        use_flash_attention: bool,
    ):
        super().__init__(config, layer_idx=layer_idx)
        self.ln_1, self.ln_2 = (_norm(config, sequence_parallel_enabled) for _ in range(2))
        self.attn = ParallelAttention(
            config, layer_idx, sequence_parallel_enabled, use_flash_attention
        )
        self.mlp = ParallelMLP(config, sequence_parallel_enabled)


class PositionEmbedding(KeepsParameterMarks, nn.Embedding):
    """Learned positions, whole on every rank. Under sequence parallel each looks up its chunk's, so
    gradients are shares.
    """

    def __init__(self, config: GPT2Config, sequence_parallel_enabled: bool):
        super().__init__(config.n_positions, config.n_embd)
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled


class GPT2Model(hf.GPT2Model):
    """Embeddings, layers and the last norm; with sequence parallel what comes out is this rank's
    `[S/T, B, H]`.
    """

    def __init__(
        self, config: GPT2Config, sequence_parallel_enabled: bool, use_flash_attention: bool
    ):
        super().__init__(config)
        self.sequence_parallel_enabled, self.use_flash_attention = (
            sequence_parallel_enabled,
            use_flash_attention,
        )
        self.wte = ParallelEmbedding(
            config.vocab_size,
            config.n_embd,
            pad=True,
            pad_alignment_size_per_rank=VOCABULARY_MULTIPLE,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        check_config(config, parallel_state.get_tensor_model_parallel_size())
        self.wpe = PositionEmbedding(config, sequence_parallel_enabled)
        self.drop = _dropout(config.embd_pdrop, sequence_parallel_enabled)
        for index in range(config.n_layer):
            self.h[index] = ParallelBlock(
                config, index, sequence_parallel_enabled, use_flash_attention
            )
        self.ln_f = _norm(config, sequence_parallel_enabled)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        length = input_ids.size(1)
        if length > self.config.n_positions:
            raise ValueError(
                f"a sequence of {length} tokens, and the model has {self.config.n_positions} "
                "positions"
            )
        if self.sequence_parallel_enabled:
            ensure_divisibility(
                length,
                parallel_state.get_tensor_model_parallel_size(),
                "sequence length over tensor-parallel ranks",
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        hidden_states = self.drop(self.wte(input_ids) + self._positions(position_ids))
        hidden = None
        if attention_mask is not None or not self.use_flash_attention:
            hidden = causal_mask(length, input_ids.device, attention_mask)
        for block in self.h:
            hidden_states = block(hidden_states, attention_mask=hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(hidden_states))

    def _positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """`[1 or B, S, H]`, or this rank's `[S/T, 1 or B, H]`."""
        if not self.sequence_parallel_enabled:
            return self.wpe(position_ids)
        chunks = position_ids.chunk(parallel_state.get_tensor_model_parallel_size(), 1)
        mine = chunks[parallel_state.get_tensor_model_parallel_rank()]
        return self.wpe(mine.t())


class GPT2LMHeadModel(ShardedModel, hf.GPT2LMHeadModel):
    """`transformers.GPT2LMHeadModel` over the tensor-parallel ranks, for training: it keeps no
    cache.

    Args:
        config: Hugging Face's. The vocabulary is padded to a multiple of 128 on each rank; the
            padding takes no part in anything, and is no part of `config.vocab_size`.
        sequence_parallel_enabled: cut norms, dropout and residuals along the sequence too. The
            gradients of norms, positions and row-parallel biases are then shares, which
            `neuronx_distributed_config(sequence_parallel=True)` sums.
        use_flash_attention: PyTorch's fused kernel for attention.

    Raises:
        ValueError: a configuration as for `check_config`.
    """

    heads = {"attn.c_attn": ("n_head",) * 3, "attn.c_proj": ("n_head",)}

    _no_split_modules = ["ParallelBlock"]

    def __init__(
        self,
        config: GPT2Config,
        sequence_parallel_enabled: bool = False,
        use_flash_attention: bool = False,
    ):
        self.sequence_parallel_enabled = sequence_parallel_enabled
        with torch.device("meta"):
            super().__init__(config)
            self.check_outputs()
            self.transformer = GPT2Model(config, sequence_parallel_enabled, use_flash_attention)
            self.lm_head = ColumnParallelLinear(
                config.n_embd,
                config.vocab_size,
                bias=False,
                gather_output=False,
                pad=True,
                pad_alignment_size_per_rank=VOCABULARY_MULTIPLE,
                sequence_parallel_enabled=sequence_parallel_enabled,
            )
            self.tie_weights()
        finish(self)

    def _init_weights(self, module: nn.Module) -> None:
        """Hugging Face's: normal weights, those that write to the residual stream narrower by
        √(2L).
        """
        std = self.config.initializer_range
        if isinstance(module, (ColumnParallelConv1D, RowParallelConv1D)):
            module.init_method = partial(nn.init.normal_, std=std)
            module.reset_parameters()
        elif isinstance(module, (ParallelAttention, ParallelMLP)):
            module.c_proj.draw_(
                "weight", partial(nn.init.normal_, std=std / math.sqrt(2 * self.config.n_layer))
            )
        elif not initialize_sharded(module, std):
            super()._init_weights(module)

    def count_targets(self, batch: dict) -> torch.Tensor:
        """How many tokens of a batch are predicted, which the loss is averaged over."""
        if "targets" in batch:
            return (batch["targets"] != -100).sum()
        return count_targets(batch["labels"])

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        labels=None,
        targets=None,
        num_items_in_batch=None,
    ):
        """The loss, and this rank's part of the logits: `[B, S, V/T]`, padding included.

        Args:
            input_ids: `[B, S]`.
            labels: `[B, S]`, as in Hugging Face: position s predicts label s + 1, unless that is
                −100.
            targets: `[B, S]`, as in Megatron-LM: position s predicts target s, unless that is −100.
                One of the two, or none.
            attention_mask: `[B, S]`, 0 for padding. None stands for no padding: the mask is then a
                constant.
            position_ids: `[B, S]`; by default each row counts from 0.
            num_items_in_batch: what `count_targets` gives for the whole global batch; by default
                this batch is the whole.

        Raises:
            ValueError: a sequence longer than the model has positions; with sequence parallel, one
                that the ranks do not divide; both labels and targets.
        """
        if labels is not None and targets is not None:
            raise ValueError("labels and targets were given, of which one says what is predicted")
        logits = self.lm_head(
            self.transformer(input_ids, attention_mask, position_ids).last_hidden_state
        )
        if self.sequence_parallel_enabled:
            logits = logits.transpose(0, 1)
        loss = None
        if targets is not None:
            loss = targets_loss(logits, targets, self.config.vocab_size, num_items_in_batch)
        elif labels is not None:
            loss = causal_lm_loss(logits, labels, self.config.vocab_size, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
