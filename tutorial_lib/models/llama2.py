"""Llama 2 with tensor and sequence parallelism: Hugging Face's `LlamaForCausalLM`, cut over the ranks.

Query, key and value come from one multiplication, as do gate and up of the feed-forward layer.
Weights that lie one behind the other are each cut for themselves, so that a rank has matching rows
of all. With sequence parallel, what lies between the multiplications is cut along the sequence, in
the layout `[S/T, B, H]` (Korthikanti et al., 2022, section 4.2).
"""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama import modeling_llama as hf

from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.modules.rms_norm import RMSNorm
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from tutorial_lib.parallel_layers.utils import ensure_divisibility

from .attention import CoreAttention, causal_mask
from .base import ShardedModel
from .causal_lm import causal_lm_loss, count_targets
from .initialize import finish, initialize_sharded
from .rotary import ExactFrequencies

PRESETS = {
    "tiny": dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=352, vocab_size=8192),
    "small": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=704, vocab_size=8192),
    "full": dict(  # Llama 2 7B
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32000,
        max_position_embeddings=4096,
    ),
}  # fmt: skip


def make_config(preset: str, tp_size: int = 1, **changes) -> LlamaConfig:
    """The configuration of a preset, checked against the tensor-parallel size.

    Args:
        preset: a key of `PRESETS`.
        changes: fields of `LlamaConfig` to set otherwise.

    Raises:
        ValueError: an unknown preset, or heads or a feed-forward size that `tp_size` does not divide.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    config = LlamaConfig(**({"rms_norm_eps": 1e-5} | PRESETS[preset] | changes))
    ensure_divisibility(
        config.num_attention_heads, tp_size, "attention heads over tensor-parallel ranks"
    )
    ensure_divisibility(
        config.intermediate_size, tp_size, "feed-forward size over tensor-parallel ranks"
    )
    kv_multiplier(config, tp_size)
    return config


def kv_multiplier(config: LlamaConfig, tp_size: int) -> int:
    """How many ranks hold each key and value head: 1 unless there are fewer of them than ranks.

    Raises:
        ValueError: neither does the number of ranks divide that of the heads, nor the other way
            round; or the query heads are no multiple of them.
    """
    heads = config.num_key_value_heads
    ensure_divisibility(config.num_attention_heads, heads, "attention heads over key/value heads")
    if heads >= tp_size:
        ensure_divisibility(heads, tp_size, "key/value heads over tensor-parallel ranks")
        return 1
    ensure_divisibility(tp_size, heads, "tensor-parallel ranks over key/value heads")
    return tp_size // heads


def parameter_count(config: LlamaConfig, tp_size: int) -> int:
    """Parameters of one rank, in closed form."""
    hidden, features, size = (
        config.hidden_size,
        config.intermediate_size // tp_size,
        config.head_dim,
    )
    queries = config.num_attention_heads // tp_size * size
    keys = config.num_key_value_heads * kv_multiplier(config, tp_size) // tp_size * size
    attention = (queries + 2 * keys) * hidden + queries * hidden
    if config.attention_bias:
        attention += queries + 2 * keys + hidden
    mlp = 3 * hidden * features + (2 * features + hidden if config.mlp_bias else 0)
    tables = 1 if config.tie_word_embeddings else 2
    layer = attention + mlp + 2 * hidden  # and two norms
    return (
        config.num_hidden_layers * layer
        + tables * -(-config.vocab_size // tp_size) * hidden
        + hidden
    )


class ParallelAttention(hf.LlamaAttention):
    """Self-attention over this rank's N/T heads: `[B, S, H] → [B, S, H]`, or `[S/T, B, H] → [S/T, B, H]`."""

    def __init__(
        self,
        config: LlamaConfig,
        layer_idx: int,
        sequence_parallel_enabled: bool,
        use_flash_attention: bool,
    ):
        super().__init__(config, layer_idx)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        tp_size = parallel_state.get_tensor_model_parallel_size()
        hidden, size = config.hidden_size, self.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        common = dict(
            bias=config.attention_bias, sequence_parallel_enabled=sequence_parallel_enabled
        )
        ensure_divisibility(
            config.num_attention_heads, tp_size, "attention heads over tensor-parallel ranks"
        )
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        if keys == queries:
            self.qkv_proj = ColumnParallelLinear(
                hidden, 3 * queries, stride=3, gather_output=False, **common
            )
        else:
            self.qkv_proj = GQAQKVColumnParallelLinear(
                hidden, (queries, keys), gather_output=False, kv_size_multiplier=kv_multiplier(config, tp_size),
                head_dim=size, **common,
            )  # fmt: skip
        self.core_attn = CoreAttention(self.scaling, config.attention_dropout, use_flash_attention)
        self.o_proj = RowParallelLinear(queries, hidden, input_is_parallel=True, **common)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_):
        projected = self.qkv_proj(hidden_states)
        if isinstance(projected, torch.Tensor):
            projected = projected.chunk(3, -1)
        query, key, value = (self._by_head(part) for part in projected)
        query, key = hf.apply_rotary_pos_emb(query, key, *position_embeddings)
        # Values lie between queries and keys, and a view of them would keep all three for backward.
        context = self.core_attn(query, key, value.contiguous(), attention_mask)
        context = (
            context.permute(2, 0, 1, 3)
            if self.sequence_parallel_enabled
            else context.transpose(1, 2)
        )
        return self.o_proj(context.flatten(2)), None

    def _by_head(self, features: torch.Tensor) -> torch.Tensor:
        """`[B, heads, S, D]` of `[B, S, features]`, or of `[S, B, features]` with sequence parallel."""
        heads = features.unflatten(-1, (-1, self.head_dim))
        return (
            heads.permute(1, 2, 0, 3) if self.sequence_parallel_enabled else heads.transpose(1, 2)
        )


class GatedActivation(nn.Module):
    """`act(gate) · up` of `[…, 2F/T] → […, F/T]`; a module of its own so that checkpointing can pick it."""

    def __init__(self, act_fn: nn.Module):
        super().__init__()
        self.act_fn = act_fn

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


class ParallelMLP(hf.LlamaMLP):
    """The feed-forward layer: this rank's F/T features between its multiplications, summed over the ranks behind."""

    def __init__(self, config: LlamaConfig, sequence_parallel_enabled: bool):
        super().__init__(config)
        del self.gate_proj, self.up_proj, self.down_proj
        common = dict(bias=config.mlp_bias, sequence_parallel_enabled=sequence_parallel_enabled)
        hidden, features = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            hidden, 2 * features, stride=2, gather_output=False, **common
        )
        self.act_fn = GatedActivation(self.act_fn)
        self.down_proj = RowParallelLinear(features, hidden, input_is_parallel=True, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class ParallelDecoderLayer(hf.LlamaDecoderLayer):
    """A transformer layer with its attention and feed-forward layer cut."""

    def __init__(
        self,
        config: LlamaConfig,
        layer_idx: int,
        sequence_parallel_enabled: bool,
        use_flash_attention: bool,
    ):
        super().__init__(config, layer_idx)
        self.self_attn = ParallelAttention(
            config, layer_idx, sequence_parallel_enabled, use_flash_attention
        )
        self.mlp = ParallelMLP(config, sequence_parallel_enabled)
        self.input_layernorm = _norm(config, sequence_parallel_enabled)
        self.post_attention_layernorm = _norm(config, sequence_parallel_enabled)


def _norm(config: LlamaConfig, sequence_parallel_enabled: bool) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, sequence_parallel_enabled)


class RotaryEmbedding(ExactFrequencies, hf.LlamaRotaryEmbedding):
    """Hugging Face's, exact in a model of any dtype."""


class LlamaModel(hf.LlamaModel):
    """Embedding, layers and the last norm; with sequence parallel what comes out is this rank's `[S/T, B, H]`."""

    def __init__(
        self, config: LlamaConfig, sequence_parallel_enabled: bool, use_flash_attention: bool
    ):
        super().__init__(config)
        self.sequence_parallel_enabled, self.use_flash_attention = (
            sequence_parallel_enabled,
            use_flash_attention,
        )
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, pad=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )  # fmt: skip
        for index in range(config.num_hidden_layers):
            self.layers[index] = ParallelDecoderLayer(
                config, index, sequence_parallel_enabled, use_flash_attention
            )
        self.norm = _norm(config, sequence_parallel_enabled)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        length = input_ids.size(1)
        if self.sequence_parallel_enabled:
            ensure_divisibility(
                length,
                parallel_state.get_tensor_model_parallel_size(),
                "sequence length over tensor-parallel ranks",
            )
        hidden = None
        if attention_mask is not None or position_ids is not None or not self.use_flash_attention:
            hidden = causal_mask(length, input_ids.device, attention_mask, position_ids)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask=hidden, position_embeddings=position_embeddings
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class LlamaForCausalLM(ShardedModel, hf.LlamaForCausalLM):
    """`transformers.LlamaForCausalLM` over the tensor-parallel ranks, for training: it keeps no cache.

    Args:
        config: Hugging Face's. A vocabulary that the ranks do not divide is padded; the padding
            takes no part in anything. Key and value heads that are fewer than the ranks are held by
            several of them.
        sequence_parallel_enabled: cut norms and residuals along the sequence too. The gradients of norms and of
            row-parallel biases are then shares, which `neuronx_distributed_config(sequence_parallel=True)` sums.
        use_flash_attention: PyTorch's fused kernel for attention.

    Raises:
        ValueError: heads or a feed-forward size that do not fit the tensor-parallel size, or
            outputs that the configuration asks for and forward does not give.
    """

    fused = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    heads = {
        "qkv_proj": ("num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
        "q_proj": ("num_attention_heads",),
        "o_proj": ("num_attention_heads",),
        "k_proj": ("num_key_value_heads",),
        "v_proj": ("num_key_value_heads",),
    }

    _no_split_modules = ["ParallelDecoderLayer"]

    def __init__(
        self,
        config: LlamaConfig,
        sequence_parallel_enabled: bool = False,
        use_flash_attention: bool = False,
    ):
        self.sequence_parallel_enabled = sequence_parallel_enabled
        with torch.device("meta"):
            super().__init__(config)
            self.check_outputs()
            self.model = LlamaModel(config, sequence_parallel_enabled, use_flash_attention)
            self.lm_head = ColumnParallelLinear(
                config.hidden_size, config.vocab_size, bias=False, gather_output=False, pad=True,
                sequence_parallel_enabled=sequence_parallel_enabled,
            )  # fmt: skip
            self.tie_weights()
        finish(self)

    def _init_weights(self, module: nn.Module) -> None:
        if not initialize_sharded(module, self.config.initializer_range):
            super()._init_weights(module)

    def count_targets(self, batch: dict) -> torch.Tensor:
        """How many tokens of a batch are predicted, which the loss is averaged over."""
        return count_targets(batch["labels"])

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        labels=None,
        num_items_in_batch=None,
    ):
        """The loss, and this rank's part of the logits: `[B, S, V/T]`, padding included.

        Args:
            input_ids, labels: `[B, S]`. The model shifts: position s predicts label s + 1, unless that is −100.
            attention_mask: `[B, S]`, 0 for padding. None stands for no padding: the mask is then a constant.
            position_ids: `[B, S]`; by default each row counts from 0. See `causal_mask`.
            num_items_in_batch: what `count_targets` gives for the whole global batch; by default
                this batch is the whole.

        Raises:
            ValueError: with sequence parallel, a sequence length that the ranks do not divide; a mask of
                another shape.
        """
        logits = self.lm_head(self.model(input_ids, attention_mask, position_ids).last_hidden_state)
        if self.sequence_parallel_enabled:
            logits = logits.transpose(0, 1)
        loss = None
        if labels is not None:
            loss = causal_lm_loss(logits, labels, self.config.vocab_size, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
