"""Whole models traced by XLA: the values of the CPU, and exactly the conversations that the model
needs.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPTNeoXConfig, LlamaConfig

from tutorial_lib.backends import get_device, mark_step
from tutorial_lib.lab.plan.communication import collectives
from tutorial_lib.lab.plan.dry_run import dry_run
from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.models.bert import BertForPreTraining
from tutorial_lib.models.gpt import GPT2LMHeadModel
from tutorial_lib.models.gpt_neox import GPTNeoXForCausalLM
from tutorial_lib.models.llama2 import LlamaForCausalLM
from tutorial_lib.parallel_layers import move_model_to_device
from tutorial_lib.training.loop import accumulate_gradients
from tutorial_lib.utils.activation_checkpoint import apply_activation_checkpointing
from tutorial_lib.xla_cpu.graphs import find_collectives, find_masks

from .parity import assert_same, bert_batch, next_token_batch, train_together
from .pool import needs_xla

pytestmark = [pytest.mark.slow, needs_xla]

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96,
    max_position_embeddings=32,
)  # fmt: skip
GPT_SIZES = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=32, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MODELS = {
    "bert": lambda **sizes: BertForPreTraining(
        BertConfig(**SIZES, **NO_DROPOUT, **sizes), True, True
    ),
    "gpt_neox": lambda **sizes: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **sizes), True),
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**SIZES, **sizes), True),
    "gpt": lambda **sizes: GPT2LMHeadModel(GPT2Config(**{**GPT_SIZES, **sizes}), True),
}
BATCHES = {
    "bert": bert_batch,
    "gpt_neox": next_token_batch,
    "llama": next_token_batch,
    "gpt": partial(next_token_batch, kind="targets"),
}
LENGTH = 16
MESH = dict(world_size=4, tp=2, timeout=300)
TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def build(name, backend, dtype=torch.float32, **sizes):
    torch.manual_seed(3)
    model = MODELS[name](**sizes).to(dtype)
    if dtype == torch.float64 and name in ("gpt_neox", "llama"):
        # Hugging Face's angles are float32 in any case, and XLA's cosine rounds the last digit
        # otherwise than PyTorch's.
        rotary = (model.model if name == "llama" else model.gpt_neox).rotary_emb
        angles = rotary(torch.zeros(1, dtype=dtype), torch.arange(LENGTH)[None])
        rotary.forward = lambda x, position_ids: tuple(angle.to(x.device) for angle in angles)
    return move_model_to_device(model, get_device(backend))


def trained(name, backend, dtype):
    sizes = {}
    if dtype == torch.float64 and name != "llama":
        # torch-xla's GELU has a constant of nine digits, so in float64 it is another function; and
        # it rounds the ε of a LayerNorm to float32, which this one survives.
        sizes = {"hidden_act": "relu", "layer_norm_eps": 2.0**-17}
        if name == "gpt":
            sizes = {"activation_function": "relu", "layer_norm_epsilon": 2.0**-17}
    return train_together(
        build(name, backend, dtype, **sizes), BATCHES[name], zero=name != "bert",
        accumulation=2, steps=5, lr=1e-3,
        max_norm=0.5, sequence_parallel=name != "bert",
    )  # fmt: skip


# In float64 nothing differs, so only the order of sums can differ in float32.
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_cpu_in_float64(ranks, name):
    expected = ranks(trained, name, "cpu", torch.float64, **MESH)[0]
    assert min(expected[1]) > 0.5, "nothing was clipped"
    for found in ranks(trained, name, "xla", torch.float64, backend="xla", **MESH):
        assert_same(found, expected)


RUNS = {
    "bert": Run(BertConfig(**SIZES, **NO_DROPOUT), 2, 2, 3, LENGTH, 2),
    "bert, cut, zero": Run(
        BertConfig(**SIZES, **NO_DROPOUT), 2, 2, 2, LENGTH, 1, zero=True,
        options=dict(shard_mlp=True, shard_vocabulary=True),
    ),
    "gpt_neox, sequence parallel, zero": Run(
        GPTNeoXConfig(**SIZES), 2, 2, 2, LENGTH, 3, sequence_parallel=True, zero=True,
    ),
    "llama, grouped, float32 gradients": Run(
        LlamaConfig(**SIZES, num_key_value_heads=1), 2, 2, 2, LENGTH, 2, sequence_parallel=True,
        checkpointing="selective+mlp", zero=True, dtype=torch.bfloat16, float32_gradients=True,
    ),
    "gpt, checkpointing": Run(
        GPT2Config(**GPT_SIZES), 2, 2, 2, LENGTH, 2, checkpointing="full",
    ),
}  # fmt: skip
GROUPS = {"tp": TP, "dp": DP}
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int64: "s64"}


def graphs_of_a_run(run):
    """The collectives of all graphs that one step runs, a graph as often as it runs."""
    from tutorial_lib import xla_cpu

    with torch.device("xla"):
        model, optimizer = run.build()
    batch = run.batch("xla")
    mark_step()  # the initial weights, which are no part of a step
    client, ran = xla_cpu._started().client, []
    find = client._graph
    client._graph = lambda tensors: ran.append(find(tensors)) or ran[-1]
    try:
        accumulate_gradients(model, [batch] * run.accumulation)
        optimizer.step()
        mark_step()
    finally:
        del client._graph
    return find_collectives(graph.computation.as_hlo_text() for graph in ran)


@pytest.mark.parametrize("name", RUNS)
def test_the_graphs_say_what_the_dry_run_records_and_the_planner_lists(ranks, name):
    """Kind, group, shape, dtype and count, all of them. What is read is the graph as it is traced
    and as Trainium's compiler would get it, so no pass of XLA has merged or split anything; of
    reductions only sums occur.
    """
    run = RUNS[name]
    planned = collectives(run)
    expected = Counter((c.kind, GROUPS[c.axis], c.shape, DTYPES[c.dtype]) for c in planned)
    for rank, found in enumerate(ranks(graphs_of_a_run, run, backend="xla", **MESH)):
        assert Counter(dry_run(run, rank).collectives) == Counter(planned)
        assert {c.reduction for c in found} <= {None, "add"}
        assert {(c.kind, c.replica_groups, c.shape, c.dtype): c.count for c in found} == expected


def masks_of_llama(mode, padded):
    from tutorial_lib import backends, xla_cpu

    model = build("llama", "xla")
    classes = model.checkpointed[mode]
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))
    batch = next_token_batch(0, kind="right") if padded else next_token_batch(0)
    loss = model(**{name: tensor.to("xla") for name, tensor in batch.items()}).loss
    loss.backward()
    backends.mark_step()
    assert loss.item() > 0
    return find_masks(xla_cpu.hlo_text(), LENGTH)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_the_causal_mask_is_a_constant_of_the_graph_and_one_of_padding_is_not(ranks, mode):
    constant = ranks(masks_of_llama, mode, False, backend="xla", **MESH)[0]
    assert constant and all(constant.values()), constant
    padded = ranks(masks_of_llama, mode, True, backend="xla", **MESH)[0]
    assert padded and not all(padded.values()), padded
