"""GPT-NeoX with tensor and sequence parallelism: Hugging Face's `GPTNeoXForCausalLM`, cut over the ranks.

Attention is cut by heads, the feed-forward layers by features, embedding and head by the
vocabulary, with the cross entropy taken over the parts (Shoeybi et al., 2019). With sequence
parallel, what lies between those layers (norms, dropout, residuals) is cut along the sequence, in
the layout `[S/T, B, H]` (Korthikanti et al., 2022, section 4.2).
"""

import torch
from torch import nn
from transformers import GPTNeoXConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.models.gpt_neox import modeling_gpt_neox as hf

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layer_norm import LayerNorm
from tutorial_lib.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from tutorial_lib.parallel_layers.random import get_xla_rng_tracker
from tutorial_lib.parallel_layers.utils import divide, ensure_divisibility

from .attention import causal_mask, hugging_face_mask
from .base import ShardedModel
from .causal_lm import causal_lm_loss, count_targets
from .dropout import ShardedDropout
from .initialize import finish, initialize_sharded
from .rotary import ExactFrequencies

PRESETS = {
    "tiny": dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=8192),
    "small": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192),
    "6.9b": dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, vocab_size=50432
    ),  # pythia-6.9b
    "full": dict(  # gpt-neox-20b
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        vocab_size=50432,
        hidden_act="gelu_fast",
    ),
}


def make_config(preset: str, tp_size: int = 1, **changes) -> GPTNeoXConfig:
    """The configuration of a preset, checked against the tensor-parallel size.

    Args:
        preset: a key of `PRESETS`. The feed-forward size is 4H.
        changes: fields of `GPTNeoXConfig` to set otherwise.

    Raises:
        ValueError: an unknown preset, or heads or a feed-forward size that `tp_size` does not divide.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    config = GPTNeoXConfig(
        **(PRESETS[preset] | {"intermediate_size": 4 * PRESETS[preset]["hidden_size"]} | changes)
    )
    ensure_divisibility(
        config.num_attention_heads, tp_size, "attention heads over tensor-parallel ranks"
    )
    ensure_divisibility(
        config.intermediate_size, tp_size, "feed-forward size over tensor-parallel ranks"
    )
    return config


def parameter_count(config: GPTNeoXConfig, tp_size: int) -> int:
    """Parameters of one rank, in closed form."""
    hidden, feed_forward, tp = config.hidden_size, config.intermediate_size, tp_size
    attention = 3 * hidden * hidden // tp + hidden * hidden // tp
    if config.attention_bias:
        attention += 3 * hidden // tp + hidden
    mlp = (hidden + 1) * feed_forward // tp + feed_forward * hidden // tp + hidden
    layer = attention + mlp + 2 * 2 * hidden  # and two norms
    tables = 1 if config.tie_word_embeddings else 2
    return (
        config.num_hidden_layers * layer
        + tables * -(-config.vocab_size // tp) * hidden
        + 2 * hidden
    )


def layer_activation_bytes(
    config: GPTNeoXConfig,
    batch: int,
    length: int,
    tp_size: int,
    sequence_parallel: bool,
    element: int = 4,
) -> float:
    """What one layer saves on one rank for its backward pass, without padding mask and dropout, in closed form.

    In 2-byte elements about `SBH (6 + 24/T)` bytes, and with sequence parallel `SBH (6/T + 24/T)`.
    Korthikanti et al. (2022, equations 2 and 4) have `SBH (10 + 24/T + 5NS/(HT))`: their 10 holds
    two norms with an input each (here both see the same, so 2 less) and two dropout masks (2 less),
    and the last term is attention scores, which the attention kernel computes anew.

    Args:
        element: bytes of a number.
    """
    hidden, tokens, tp = config.hidden_size, batch * length, tp_size
    norms = (
        3 * hidden * element + 2 * 2 * 4
    )  # their input, two outputs; mean and deviation of each token in float32
    # Query, key, value, output; a float32 for each head.
    attention = 4 * hidden * element + 4 * config.num_attention_heads
    mlp = 2 * config.intermediate_size * element  # before and behind the activation function
    return tokens * (norms / (tp if sequence_parallel else 1) + (attention + mlp) / tp)


class RotaryEmbedding(ExactFrequencies, hf.GPTNeoXRotaryEmbedding):
    """Hugging Face's, exact in a model of any dtype."""


class ParallelAttention(hf.GPTNeoXAttention):
    """Self-attention over this rank's N/T heads: `[B, S, H] → [B, S, H]`, or `[S/T, B, H] → [S/T, B, H]`.

    The rows of the fused weight lie head by head, each with its query, key and value. So it is one matrix to cut
    (stride 1), and each rank gets whole heads.
    """

    def __init__(self, config: GPTNeoXConfig, layer_idx: int, sequence_parallel_enabled: bool):
        super().__init__(config, layer_idx)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        tp_size = parallel_state.get_tensor_model_parallel_size()
        self.num_heads = divide(
            config.num_attention_heads, tp_size, "attention heads over tensor-parallel ranks"
        )
        hidden = config.hidden_size
        common = dict(
            bias=config.attention_bias, sequence_parallel_enabled=sequence_parallel_enabled
        )
        self.query_key_value = ColumnParallelLinear(
            hidden, 3 * hidden, gather_output=False, **common
        )
        self.dense = RowParallelLinear(hidden, hidden, input_is_parallel=True, **common)

    def forward(self, hidden_states, attention_mask=None, layer_past=None, **kwargs):
        if layer_past is not None:  # generation
            return super().forward(hidden_states, attention_mask, layer_past, **kwargs)
        if self.training and self.attention_dropout > 0:  # each rank drops out of its own heads
            with get_xla_rng_tracker().fork():
                return self._attend(hidden_states, attention_mask, **kwargs)
        return self._attend(hidden_states, attention_mask, **kwargs)

    def _attend(self, hidden_states, attention_mask, position_embeddings, **kwargs):
        """Hugging Face's forward where the input may be a chunk of the sequence; the heads see all of it."""
        fused = self.query_key_value(hidden_states)  # [B, S, 3H/T] or [S, B, 3H/T]
        fused = fused.unflatten(-1, (self.num_heads, 3 * self.head_size))
        if self.sequence_parallel_enabled:
            fused = fused.transpose(0, 1)  # [B, S, N/T, 3D]
        query, key, value = fused.chunk(3, dim=-1)
        query, key = hf.apply_rotary_pos_emb(query, key, *position_embeddings, unsqueeze_dim=2)
        value = (
            value.contiguous()
        )  # backward needs it, and a view would keep query and key before their rotation too
        # Heads come first in shape only: in this order of memory the kernel's output is not copied behind it.
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, hf.eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = interface(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        output = output.flatten(2)
        return self.dense(
            output.transpose(0, 1) if self.sequence_parallel_enabled else output
        ), weights


class ParallelMLP(hf.GPTNeoXMLP):
    """The feed-forward layers: this rank's F/T features between them, summed over the ranks behind them."""

    def __init__(self, config: GPTNeoXConfig, sequence_parallel_enabled: bool):
        super().__init__(config)
        hidden, features, sequence = (
            config.hidden_size,
            config.intermediate_size,
            sequence_parallel_enabled,
        )
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden, features, gather_output=False, sequence_parallel_enabled=sequence
        )
        self.dense_4h_to_h = RowParallelLinear(
            features, hidden, input_is_parallel=True, sequence_parallel_enabled=sequence
        )


class ParallelLayer(hf.GPTNeoXLayer):
    """A transformer layer with its attention and feed-forward layers cut."""

    def __init__(self, config: GPTNeoXConfig, layer_idx: int, sequence_parallel_enabled: bool):
        super().__init__(config, layer_idx)
        self.input_layernorm = _norm(config, sequence_parallel_enabled)
        self.post_attention_layernorm = _norm(config, sequence_parallel_enabled)
        if sequence_parallel_enabled:
            self.post_attention_dropout = ShardedDropout(config.hidden_dropout)
            self.post_mlp_dropout = ShardedDropout(config.hidden_dropout)
        self.attention = ParallelAttention(config, layer_idx, sequence_parallel_enabled)
        self.mlp = ParallelMLP(config, sequence_parallel_enabled)


def _norm(config: GPTNeoXConfig, sequence_parallel_enabled: bool) -> LayerNorm:
    return LayerNorm(
        config.hidden_size,
        eps=config.layer_norm_eps,
        sequence_parallel_enabled=sequence_parallel_enabled,
    )


class GPTNeoXModel(hf.GPTNeoXModel):
    """Embedding, layers and the last norm; with sequence parallel what comes out is this rank's `[S/T, B, H]`."""

    def __init__(self, config: GPTNeoXConfig, sequence_parallel_enabled: bool = False):
        super().__init__(config)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        # Its sum over the ranks is the scatter along the sequence too: one reduce-scatter.
        self.embed_in = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            pad=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        if sequence_parallel_enabled:
            self.emb_dropout = ShardedDropout(config.hidden_dropout)
        for index in range(config.num_hidden_layers):
            self.layers[index] = ParallelLayer(config, index, sequence_parallel_enabled)
        self.final_layer_norm = _norm(config, sequence_parallel_enabled)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False, **kwargs):
        if use_cache or kwargs or self.config.output_hidden_states or self.config.output_attentions:
            if self.sequence_parallel_enabled:
                given = ", ".join([*(["use_cache"] if use_cache else []), *kwargs])
                raise ValueError(f"sequence parallel is for training: it does not take {given}")
            return super().forward(
                input_ids, attention_mask, position_ids, use_cache=use_cache, **kwargs
            )
        length, tp_size = input_ids.size(1), parallel_state.get_tensor_model_parallel_size()
        if self.sequence_parallel_enabled:
            ensure_divisibility(length, tp_size, "sequence length over tensor-parallel ranks")
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        elif attention_mask is None:
            hidden = causal_mask(length, input_ids.device, position_ids=position_ids)
            attention_mask = hugging_face_mask(~hidden, self)
        hidden_states = self.emb_dropout(self.embed_in(input_ids))
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.final_layer_norm(hidden_states))


class GPTNeoXForCausalLM(ShardedModel, hf.GPTNeoXForCausalLM):
    """`transformers.GPTNeoXForCausalLM` over the tensor-parallel ranks; at size 1 it is that model.

    Args:
        config: Hugging Face's. A vocabulary that the ranks do not divide is padded; the padding
            takes no part in anything.
        sequence_parallel_enabled: cut norms, dropout and residuals along the sequence too. The
            gradients of norms and of row-parallel biases are then shares, which
            `neuronx_distributed_config(sequence_parallel=True)` sums.

    Raises:
        ValueError: heads or a feed-forward size that the tensor-parallel size does not divide, an
            attention kernel other than `base.KERNELS`, or, with sequence parallel, outputs that the
            configuration asks for beside the logits.
    """

    heads = dict.fromkeys(
        ("attention.query_key_value", "attention.dense"), ("num_attention_heads",)
    )

    whole_at_size_1 = True

    def __init__(self, config: GPTNeoXConfig, sequence_parallel_enabled: bool = False):
        self.sequence_parallel_enabled = sequence_parallel_enabled
        with torch.device("meta"):
            super().__init__(config)
            self.check_kernel()
            if sequence_parallel_enabled:
                self.check_outputs()
            self.gpt_neox = GPTNeoXModel(config, sequence_parallel_enabled)
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
        labels=None,
        num_items_in_batch=None,
        use_cache=False,
        **kwargs,
    ):
        """Hugging Face's forward, with this rank's part of the logits: `[B, S, V/T]`, padding included.

        Args:
            input_ids, labels: `[B, S]`. The model shifts: position s predicts label s + 1, unless that is -100.
            attention_mask: `[B, S]`, 0 for padding. None stands for no padding; then no mask exists anywhere, but
                for `position_ids`, which may separate documents (see `causal_mask`).
            num_items_in_batch: what `count_targets` gives for the whole global batch. The loss is
                the sum over this batch divided by that count. By default this batch is the whole.
            kwargs: further arguments of Hugging Face's; none with sequence parallel.

        Raises:
            ValueError: with sequence parallel, a sequence length that the ranks do not divide, or a cache.
        """
        eager = self.config._attn_implementation == "eager"
        if attention_mask is None and eager and kwargs.get("position_ids") is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask is not None and attention_mask.dim() == 2 and not use_cache:
            attention_mask = self._causal_mask(attention_mask)
        # What sequence parallel does not take, the model names.
        keep = 0 if self.sequence_parallel_enabled else kwargs.pop("logits_to_keep", 0)
        output = self.gpt_neox(
            input_ids, attention_mask=attention_mask, use_cache=use_cache, **kwargs
        )
        logits = self.lm_head(slice_logits_to_keep(output.last_hidden_state, keep))
        if self.sequence_parallel_enabled:
            logits = logits.transpose(0, 1)
        loss = None
        if labels is not None:
            loss = causal_lm_loss(logits, labels, self.config.vocab_size, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=output.get("cache"),
            hidden_states=output.get("hidden_states"), attentions=output.get("attentions"),
        )  # fmt: skip

    def _causal_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """`[B, 1, S, S]`: which keys a query sees."""
        length = attention_mask.size(1)
        causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
        seen = causal & attention_mask.bool()[:, None, None, :]
        return hugging_face_mask(seen, self)
