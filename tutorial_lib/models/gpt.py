"""GPT-2 and GPT-3 with tensor and sequence parallelism: Hugging Face's `GPT2LMHeadModel`, sharded.

Attention is sharded by heads, the feed-forward layers by features, embedding and the head that is
tied to it by the vocabulary, with the cross entropy taken over the shards (Shoeybi et al., 2019).
With sequence parallel, what lies between those layers is sharded along the sequence, in the layout
`[S/T, B, H]` (Korthikanti et al., 2022, section 4.2).

Dropout of what every rank holds draws the same mask on all of them, from torch's default stream.
Dropout of what is sharded (the heads, with sequence parallel everything) draws a mask of each
rank's own, from the model-parallel stream.
"""

import math
from functools import partial

from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as hf

from tutorial_lib.modules.conv1d import ColumnParallelConv1D, RowParallelConv1D
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.layer_norm import LayerNorm
from tutorial_lib.parallel_layers.marks import KeepsParameterMarks

from .attention import CoreAttention, heads_first, heads_last
from .causal_lm import ShardedBody, ShardedCausalLM, dropout
from .configs import feed_forward_size, from_preset

VOCABULARY_MULTIPLE = 128  # of the rows of the vocabulary on each rank, as in Megatron-LM
PRESETS = {
    "tiny": dict(vocab_size=8192, n_positions=256),
    "small": dict(vocab_size=8192, n_positions=512),
    # GPT-3 6.7B
    "full": dict(n_embd=4096, n_layer=32, n_head=32, vocab_size=50257, n_positions=2048),
}


def make_config(preset: str, tp_size: int = 1, **changes) -> GPT2Config:
    """The configuration of a preset, see `from_preset`. A document ends with the last token."""
    last = (PRESETS.get(preset, {}) | changes).get("vocab_size", 1) - 1
    ends = {"bos_token_id": last, "eos_token_id": last}
    return from_preset(GPT2Config, PRESETS, preset, tp_size, **(ends | changes))


def _norm(config: GPT2Config, sp: bool) -> LayerNorm:
    return LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, sequence_parallel_enabled=sp)


class ParallelAttention(hf.GPT2Attention):
    """Self-attention over this rank's N/T heads: `[B, S, H]`, or with sequence parallel (`sp`)
    `[S/T, B, H]`, in and out.
    """

    def __init__(self, config: GPT2Config, layer_idx: int, sp: bool, flash: bool):
        super().__init__(config, layer_idx=layer_idx)
        self.sp, hidden, common = sp, config.n_embd, dict(sequence_parallel_enabled=sp)
        # Queries, keys and values of all heads are concatenated: three matrices, each sharded.
        self.c_attn = ColumnParallelConv1D(
            hidden, 3 * hidden, stride=3, gather_output=False, **common
        )
        self.core_attn = CoreAttention(self.scaling, config.attn_pdrop, flash)
        self.c_proj = RowParallelConv1D(hidden, hidden, input_is_parallel=True, **common)
        self.resid_dropout = dropout(config.resid_pdrop, sp)

    def forward(self, hidden_states, attention_mask=None, **_):
        query, key, value = (
            heads_first(matrix, self.head_dim, self.sp)
            for matrix in self.c_attn(hidden_states).chunk(3, -1)
        )
        context = self.core_attn(query, key, value, attention_mask)  # [B, N/T, S, D]
        return self.resid_dropout(self.c_proj(heads_last(context, self.sp))), None


class ParallelMLP(hf.GPT2MLP):
    """The feed-forward layer: this rank's F/T features between its two multiplications."""

    def __init__(self, config: GPT2Config, sp: bool):
        features, common = feed_forward_size(config), dict(sequence_parallel_enabled=sp)
        super().__init__(features, config)
        self.c_fc = ColumnParallelConv1D(config.n_embd, features, gather_output=False, **common)
        self.c_proj = RowParallelConv1D(features, config.n_embd, input_is_parallel=True, **common)
        self.dropout = dropout(config.resid_pdrop, sp)


class ParallelBlock(hf.GPT2Block):
    """A transformer layer with its attention and feed-forward layer sharded."""

    def __init__(self, config: GPT2Config, layer_idx: int, sp: bool, flash: bool):
        super().__init__(config, layer_idx=layer_idx)
        self.ln_1, self.ln_2 = _norm(config, sp), _norm(config, sp)
        self.attn = ParallelAttention(config, layer_idx, sp, flash)
        self.mlp = ParallelMLP(config, sp)


class PositionEmbedding(KeepsParameterMarks, nn.Embedding):
    """Learned positions, whole on every rank.

    Under sequence parallel each rank looks up its chunk's, so that gradients are shares.
    """

    def __init__(self, config: GPT2Config, sp: bool):
        super().__init__(config.n_positions, config.n_embd)
        self.weight.sequence_parallel_enabled = sp


class GPT2Model(ShardedBody, hf.GPT2Model):
    """Hugging Face's with sharded layers and embedding."""

    def __init__(self, config: GPT2Config, sp: bool, flash: bool):
        super().__init__(config, sp, flash)
        self.wte = self.embedding(multiple=VOCABULARY_MULTIPLE)
        self.wpe = PositionEmbedding(config, sp)
        self.drop = dropout(config.embd_pdrop, sp)
        for index in range(config.n_layer):
            self.h[index] = ParallelBlock(config, index, sp, flash)
        self.ln_f = _norm(config, sp)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if input_ids.size(1) > self.config.n_positions:
            raise ValueError(
                f"a sequence of {input_ids.size(1)} tokens: the model has "
                f"{self.config.n_positions} positions"
            )
        hidden, position_ids = self.mask_and_positions(input_ids, attention_mask, position_ids)
        if self.sp:  # this rank's chunk, [S/T, 1 or B]
            chunks = position_ids.chunk(parallel_state.get_tensor_model_parallel_size(), 1)
            position_ids = chunks[parallel_state.get_tensor_model_parallel_rank()].t()
        hidden_states = self.drop(self.wte(input_ids) + self.wpe(position_ids))
        for block in self.h:
            hidden_states = block(hidden_states, attention_mask=hidden)
        return self.ln_f(hidden_states)


class GPT2LMHeadModel(ShardedCausalLM, hf.GPT2LMHeadModel):
    """`transformers.GPT2LMHeadModel` over the tensor-parallel ranks; see `ShardedCausalLM`.

    The vocabulary is padded to a multiple of 128 on each rank. With sequence parallel the gradients
    of positions are shares too.
    """

    body = GPT2Model
    vocabulary_multiple = VOCABULARY_MULTIPLE
    heads = {"attn.c_attn": ("n_head",) * 3, "attn.c_proj": ("n_head",)}
    checkpointed = {"none": (), "selective": (CoreAttention,), "full": (ParallelBlock,)}
    _no_split_modules = ["ParallelBlock"]

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
        else:
            super()._init_weights(module)
