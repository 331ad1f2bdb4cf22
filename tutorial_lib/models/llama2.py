"""Llama 2 with tensor and sequence parallelism: Hugging Face's `LlamaForCausalLM`, sharded.

Query, key and value come from one multiplication, as do gate and up of the feed-forward layer.
Weights that are concatenated are each sharded, so that a rank has matching rows of all. With
sequence parallel, what lies between the multiplications is sharded along the sequence, in the
layout `[S/T, B, H]` (Korthikanti et al., 2022, section 4.2).
"""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as hf

from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.modules.rms_norm import RMSNorm
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear

from .attention import CoreAttention, heads_first, heads_last
from .causal_lm import ShardedBody, ShardedCausalLM
from .configs import from_preset, kv_multiplier

PRESETS = {
    "tiny": dict(intermediate_size=352, rms_norm_eps=1e-5),
    "small": dict(intermediate_size=704, rms_norm_eps=1e-5),
    "full": dict(  # Llama 2 7B
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008,
        vocab_size=32000, rms_norm_eps=1e-5, max_position_embeddings=4096,
    ),
}  # fmt: skip


def make_config(preset: str, tp_size: int = 1, **changes) -> LlamaConfig:
    """The configuration of a preset, see `from_preset`."""
    return from_preset(LlamaConfig, PRESETS, preset, tp_size, **changes)


class ParallelLlamaAttention(hf.LlamaAttention):
    """Self-attention over this rank's N/T heads: `[B, S, H]`, or with sequence parallel (`sp`)
    `[S/T, B, H]`, in and out.

    Key and value heads that are fewer than the ranks are held by several of them.
    """

    def __init__(self, config: LlamaConfig, layer_idx: int, sp: bool, flash: bool):
        super().__init__(config, layer_idx)
        self.sp, hidden, size = sp, config.hidden_size, self.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        common = dict(bias=config.attention_bias, sequence_parallel_enabled=sp)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        if keys == queries:
            self.qkv_proj = ColumnParallelLinear(
                hidden, 3 * queries, stride=3, gather_output=False, **common
            )
        else:
            copies = kv_multiplier(config, parallel_state.get_tensor_model_parallel_size())
            self.qkv_proj = GQAQKVColumnParallelLinear(
                hidden, (queries, keys), gather_output=False, kv_size_multiplier=copies, **common
            )
        self.core_attn = CoreAttention(self.scaling, config.attention_dropout, flash)
        self.o_proj = RowParallelLinear(queries, hidden, input_is_parallel=True, **common)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_):
        projected = self.qkv_proj(hidden_states)
        if isinstance(projected, torch.Tensor):
            projected = projected.chunk(3, -1)
        query, key, value = (heads_first(each, self.head_dim, self.sp) for each in projected)
        query, key = hf.apply_rotary_pos_emb(query, key, *position_embeddings)
        # Values lie between queries and keys, and a view of them would keep all three for backward.
        context = self.core_attn(query, key, value.contiguous(), attention_mask)
        return self.o_proj(heads_last(context, self.sp)), None


class GatedActivation(nn.Module):
    """`act(gate) · up` of `[…, 2F/T] → […, F/T]`; a module of its own so that checkpointing can
    pick it.
    """

    def __init__(self, act_fn: nn.Module):
        super().__init__()
        self.act_fn = act_fn

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


class ParallelLlamaMLP(hf.LlamaMLP):
    """The feed-forward layer: this rank's F/T features between its multiplications."""

    def __init__(self, config: LlamaConfig, sp: bool):
        super().__init__(config)
        del self.gate_proj, self.up_proj, self.down_proj
        common = dict(bias=config.mlp_bias, sequence_parallel_enabled=sp)
        hidden, features = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            hidden, 2 * features, stride=2, gather_output=False, **common
        )
        self.act_fn = GatedActivation(self.act_fn)
        self.down_proj = RowParallelLinear(features, hidden, input_is_parallel=True, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class ParallelDecoderLayer(hf.LlamaDecoderLayer):
    """A transformer layer with its attention and feed-forward layer sharded."""

    def __init__(self, config: LlamaConfig, layer_idx: int, sp: bool, flash: bool):
        super().__init__(config, layer_idx)
        self.self_attn = ParallelLlamaAttention(config, layer_idx, sp, flash)
        self.mlp = ParallelLlamaMLP(config, sp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, sp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, sp)


class LlamaModel(ShardedBody, hf.LlamaModel):
    """Hugging Face's with sharded layers and embedding."""

    def __init__(self, config: LlamaConfig, sp: bool, flash: bool):
        super().__init__(config, sp, flash)
        self.embed_tokens = self.embedding(config.pad_token_id)
        for index in range(config.num_hidden_layers):
            self.layers[index] = ParallelDecoderLayer(config, index, sp, flash)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, sp)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        hidden, position_ids = self.mask_and_positions(input_ids, attention_mask, position_ids)
        return self.norm(self.run_layers(self.embed_tokens(input_ids), hidden, position_ids))


class LlamaForCausalLM(ShardedCausalLM, hf.LlamaForCausalLM):
    """`transformers.LlamaForCausalLM` over the tensor-parallel ranks; see `ShardedCausalLM`."""

    body = LlamaModel
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
    checkpointed = {
        "none": (),
        "selective": (CoreAttention,),
        "selective+mlp": (CoreAttention, GatedActivation),
        "full": (ParallelDecoderLayer,),
    }
    _no_split_modules = ["ParallelDecoderLayer"]
