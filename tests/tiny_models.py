"""Every model that the course trains, as small as it can be: cut over the ranks, Hugging Face's,
and what they are fed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers

from tutorial_lib.models import bert, gpt, gpt_neox, llama2

from .parity import micro_batch

VOCABULARY, LENGTH = 97, 16  # no tensor-parallel size divides the vocabulary
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=8, intermediate_size=64,
    vocab_size=VOCABULARY,
)  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One architecture.

    Attributes:
        config: makes Hugging Face's configuration out of changes to these sizes.
        ours, theirs: the classes of the model.
        options: arguments of `ours` that cut as much as it can.
        dropout: the configuration's fields for dropout.
        sequence_parallel: `ours` can cut norms and residuals too.
    """

    config: Callable
    ours: type
    theirs: type
    options: dict = field(default_factory=dict)
    dropout: tuple[str, ...] = ()
    sequence_parallel: bool = True

    def build(self, config, sequence_parallel: bool = False):
        """The parallel model."""
        extra = {"sequence_parallel_enabled": True} if sequence_parallel else {}
        return self.ours(config, **self.options, **extra)


def _config(cls: type, **fixed) -> Callable:
    return lambda **changes: cls(**{**SIZES, "max_position_embeddings": 32, **fixed, **changes})


SHARDED = {"shard_mlp": True, "shard_vocabulary": True}
TINY = {
    "bert": Tiny(
        _config(transformers.BertConfig),
        bert.BertForPreTraining, transformers.BertForPreTraining, SHARDED,
        ("hidden_dropout_prob", "attention_probs_dropout_prob"), sequence_parallel=False,
    ),
    "gpt_neox": Tiny(
        _config(transformers.GPTNeoXConfig, use_cache=False),
        gpt_neox.GPTNeoXForCausalLM, transformers.GPTNeoXForCausalLM,
        dropout=("hidden_dropout", "attention_dropout"),
    ),
    "llama": Tiny(
        _config(transformers.LlamaConfig, num_key_value_heads=4, use_cache=False),
        llama2.LlamaForCausalLM, transformers.LlamaForCausalLM, dropout=("attention_dropout",),
    ),
    "gpt2": Tiny(
        _config(transformers.GPT2Config, n_inner=64, use_cache=False),
        gpt.GPT2LMHeadModel, transformers.GPT2LMHeadModel,
        dropout=("embd_pdrop", "resid_pdrop", "attn_pdrop"),
    ),
}  # fmt: skip


class Samples(torch.utils.data.Dataset):
    """Random sequences with their labels. Samples differ in how many tokens they have predicted, so
    that a mean of means shows.
    """

    def __init__(self, kind: str, count: int):
        self.kind, self.count = kind, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = micro_batch(self.kind, "whole", index)
        return {name: values[index % 2] for name, values in batch.items()}
