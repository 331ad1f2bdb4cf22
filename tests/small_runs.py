"""Small runs of every model and choice, and what a real step of each holds and says on a mesh of
CPU processes.
"""

import tempfile

import torch

from tutorial_lib.checkpoint import save_checkpoint
from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.models import bert, gpt, gpt_neox, llama2
from tutorial_lib.parallel_layers import comm
from tutorial_lib.training import memory
from tutorial_lib.training.loop import accumulate_gradients

BERT, NEOX, LLAMA = (
    bert.make_config("tiny"),
    gpt_neox.make_config("tiny"),
    llama2.make_config("tiny"),
)
GROUPED = llama2.make_config("tiny", num_key_value_heads=2, vocab_size=8191)
UNIFORM = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BERT_WITHOUT_DROPOUT = bert.make_config("tiny", **UNIFORM)
GPT = gpt.make_config("tiny", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
SHARDED = dict(shard_mlp=True, shard_vocabulary=True)
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


def real_step(run: Run, folder: str):
    """The same step on this mesh, with values."""
    model, optimizer = run.build()
    batch = run.batch("cpu")
    with memory.SavedActivations(model, batch.values()) as saved:
        loss = model(**batch).loss
    loss.backward()
    optimizer.zero_grad()
    with comm.record() as log:
        accumulate_gradients(model, [batch] * run.accumulation)
        gradients = memory.gradient_bytes(model)
        optimizer.step()
    nbytes = {
        "weights": memory.weight_bytes(model),
        "gradients": gradients,
        "optimizer": memory.optimizer_bytes(optimizer),
        "saved activations": saved.nbytes,
    }
    save_checkpoint(folder, "step_1", model, optimizer)
    return log, nbytes, [(s.shape, s.dtype, s.nbytes) for s in saved.tensors]


_steps: dict[str, tuple[list, str]] = {}
_folder = tempfile.TemporaryDirectory(prefix="steps-")  # removed when the process ends


def real_steps(ranks, name: str) -> tuple[list, str]:
    """What `real_step` gives on each rank, done once in a session, and the folder of the
    checkpoint.
    """
    if name not in _steps:
        run, folder = SMALL[name], f"{_folder.name}/{len(_steps)}"
        _steps[name] = ranks(real_step, run, folder, world_size=run.world_size, tp=run.tp), folder
    return _steps[name]
