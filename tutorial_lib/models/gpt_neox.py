"""GPT-NeoX with tensor and sequence parallelism: Hugging Face's `GPTNeoXForCausalLM`, sharded.

Attention is sharded by heads, the feed-forward layers by features, embedding and head by the
vocabulary, with the cross entropy taken over the shards (Shoeybi et al., 2019). With sequence
parallel, what lies between those layers (norms, dropout, residuals) is sharded along the sequence,
in the layout `[S/T, B, H]` (Korthikanti et al., 2022, section 4.2).
"""

from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox as hf

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layer_norm import LayerNorm
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from tutorial_lib.parallel_layers.utils import divide

from .attention import CoreAttention
from .causal_lm import ShardedBody, ShardedCausalLM, dropout
from .configs import from_preset

PRESETS = {
    "tiny": dict(intermediate_size=512),
    "small": dict(intermediate_size=1024),
    "6.9b": dict(  # pythia-6.9b
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=16384,
        vocab_size=50432,
    ),
    "full": dict(  # gpt-neox-20b
        hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576,
        vocab_size=50432, hidden_act="gelu_fast",
    ),
}  # fmt: skip


def make_config(preset: str, tp_size: int = 1, **changes) -> GPTNeoXConfig:
    """The configuration of a preset, see `from_preset`."""
    return from_preset(GPTNeoXConfig, PRESETS, preset, tp_size, **changes)


def _norm(config: GPTNeoXConfig, sp: bool) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.layer_norm_eps, sequence_parallel_enabled=sp)


class ParallelNeoXAttention(hf.GPTNeoXAttention):
    """Self-attention over this rank's N/T heads: `[B, S, H]`, or with sequence parallel (`sp`)
    `[S/T, B, H]`, in and out.

    The rows of the fused weight lie head by head, each with its query, key and value. So it is one
    matrix to shard (stride 1), and each rank gets whole heads.
    """

    def __init__(self, config: GPTNeoXConfig, layer_idx: int, sp: bool):
        super().__init__(config, layer_idx)
        tp_size = parallel_state.get_tensor_model_parallel_size()
        self.sp, self.num_heads = sp, divide(config.num_attention_heads, tp_size)
        hidden = config.hidden_size
        common = dict(bias=config.attention_bias, sequence_parallel_enabled=sp)
        self.query_key_value = ColumnParallelLinear(
            hidden, 3 * hidden, gather_output=False, **common
        )
        self.core_attn = CoreAttention(self.scaling, config.attention_dropout, True)
        self.dense = RowParallelLinear(hidden, hidden, input_is_parallel=True, **common)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **_):
        fused = self.query_key_value(hidden_states)  # [B, S, 3H/T] or [S, B, 3H/T]
        fused = fused.unflatten(-1, (self.num_heads, 3 * self.head_size))
        if self.sp:
            fused = fused.transpose(0, 1)  # [B, S, N/T, 3D]
        query, key, value = fused.chunk(3, dim=-1)
        query, key = hf.apply_rotary_pos_emb(query, key, *position_embeddings, unsqueeze_dim=2)
        # Backward needs the values, and a view would keep query and key before their rotation too.
        value = value.contiguous()
        # Heads come first in shape only: in this order of memory the kernel's output is not copied.
        query, key, value = (matrix.transpose(1, 2) for matrix in (query, key, value))
        context = self.core_attn(query, key, value, attention_mask)
        context = context.transpose(1, 2).flatten(2)
        return self.dense(context.transpose(0, 1) if self.sp else context), None


class ParallelNeoXMLP(hf.GPTNeoXMLP):
    """The feed-forward layer: this rank's F/T features between its two multiplications."""

    def __init__(self, config: GPTNeoXConfig, sp: bool):
        super().__init__(config)
        hidden, features = config.hidden_size, config.intermediate_size
        common = dict(sequence_parallel_enabled=sp)
        self.dense_h_to_4h = ColumnParallelLinear(hidden, features, gather_output=False, **common)
        self.dense_4h_to_h = RowParallelLinear(features, hidden, input_is_parallel=True, **common)


class ParallelLayer(hf.GPTNeoXLayer):
    """A transformer layer with its attention and feed-forward layers sharded, and with sequence
    parallel (`sp`) all between them.
    """

    def __init__(self, config: GPTNeoXConfig, layer_idx: int, sp: bool):
        super().__init__(config, layer_idx)
        self.input_layernorm = _norm(config, sp)
        self.post_attention_layernorm = _norm(config, sp)
        self.post_attention_dropout = dropout(config.hidden_dropout, sp)
        self.post_mlp_dropout = dropout(config.hidden_dropout, sp)
        self.attention = ParallelNeoXAttention(config, layer_idx, sp)
        self.mlp = ParallelNeoXMLP(config, sp)


class GPTNeoXModel(ShardedBody, hf.GPTNeoXModel):
    """Hugging Face's with sharded layers and embedding."""

    def __init__(self, config: GPTNeoXConfig, sp: bool, flash: bool):
        super().__init__(config, sp, flash)
        # Its sum over the ranks is the scatter along the sequence too: one reduce-scatter.
        self.embed_in = self.embedding()
        self.emb_dropout = dropout(config.hidden_dropout, sp)
        for index in range(config.num_hidden_layers):
            self.layers[index] = ParallelLayer(config, index, sp)
        self.final_layer_norm = _norm(config, sp)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        hidden, position_ids = self.mask_and_positions(input_ids, attention_mask, position_ids)
        hidden_states = self.emb_dropout(self.embed_in(input_ids))
        return self.final_layer_norm(self.run_layers(hidden_states, hidden, position_ids))


class GPTNeoXForCausalLM(ShardedCausalLM, hf.GPTNeoXForCausalLM):
    """`transformers.GPTNeoXForCausalLM` over the tensor-parallel ranks; see `ShardedCausalLM`.

    Its attention is PyTorch's fused kernel.
    """

    body = GPTNeoXModel
    kernels = ("sdpa",)
    heads = dict.fromkeys(
        ("attention.query_key_value", "attention.dense"), ("num_attention_heads",)
    )
    checkpointed = {"none": (), "full": (ParallelLayer,)}
    _no_split_modules = ["ParallelLayer"]

    def __init__(self, config: GPTNeoXConfig, sequence_parallel_enabled: bool = False):
        super().__init__(config, sequence_parallel_enabled, use_flash_attention=True)
