"""Small runs of every model and choice."""

import torch

from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.models import bert, gpt, gpt_neox, llama2

from .tiny_models import SHARDED

BERT, NEOX, LLAMA = (module.make_config("tiny") for module in (bert, gpt_neox, llama2))
GROUPED = llama2.make_config("tiny", num_key_value_heads=2, vocab_size=8191)
UNIFORM = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BERT_WITHOUT_DROPOUT = bert.make_config("tiny", **UNIFORM)
GPT = gpt.make_config("tiny", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
SMALL = {
    "bert": Run(BERT_WITHOUT_DROPOUT, 2, 2, 2, 64, 3),
    "bert, cut, zero, checkpointing": Run(
        BERT_WITHOUT_DROPOUT, 2, 2, 2, 64, 2, zero=True, checkpointing="full", options=SHARDED
    ),
    "bert, dropout": Run(BERT, 4, 1, 2, 64, 2, options=SHARDED),
    "gpt": Run(GPT, 2, 2, 2, 64, 2, checkpointing="selective"),
    "gpt, sequence parallel, zero": Run(GPT, 2, 2, 2, 64, 3, sequence_parallel=True, zero=True),
    "gpt, checkpointing, odd vocabulary": Run(
        gpt.make_config("tiny", vocab_size=8101), 4, 1, 2, 64, 2, checkpointing="full",
        dtype=torch.bfloat16,
    ),
    "neox": Run(NEOX, 2, 2, 2, 64),
    "neox, sequence parallel, zero": Run(NEOX, 2, 2, 2, 64, 2, sequence_parallel=True, zero=True),
    "neox, checkpointing, bfloat16": Run(
        NEOX, 4, 1, 2, 64, 3, sequence_parallel=True, checkpointing="full", dtype=torch.bfloat16
    ),
    "llama": Run(LLAMA, 2, 2, 2, 64, 2, checkpointing="selective"),
    "llama, all of it": Run(
        LLAMA, 2, 2, 2, 64, 4, sequence_parallel=True, checkpointing="selective+mlp", zero=True,
        dtype=torch.bfloat16, float32_gradients=True,
    ),
    "llama, grouped, odd vocabulary": Run(
        GROUPED, 4, 1, 2, 64, 2, sequence_parallel=True, checkpointing="full"
    ),
    "llama, fused attention": Run(
        LLAMA, 1, 4, 2, 64, 2, zero=True, options=dict(use_flash_attention=True)
    ),
}  # fmt: skip
