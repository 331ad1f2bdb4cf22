"""Whole models traced by XLA: the values of the CPU, exactly the collectives that the model needs,
and no look at a value.
"""

from collections import Counter

import pytest
import torch

from tutorial_lib.backends import get_device, mark_step
from tutorial_lib.lab.plan.communication import collectives
from tutorial_lib.lab.plan.dry_run import dry_run
from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.parallel_layers import move_model_to_device
from tutorial_lib.parallel_layers.layers import ParallelEmbedding
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.training.loop import accumulate_gradients
from tutorial_lib.utils.activation_checkpoint import apply_activation_checkpointing
from tutorial_lib.xla_cpu.graphs import find_collectives, find_masks

from .parity import (
    assert_same,
    gradient_of,
    hugging_face_loss,
    micro_batch,
    next_token_batch,
    reference,
    train_together,
    whole_gradients,
)
from .test_models import config
from .tiny_models import LENGTH, SHARDED, TINY

MESH = dict(world_size=4, tp=2, timeout=300)
TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
# Key and value on both ranks, and a vocabulary that does not divide.
SHARED = dict(num_key_value_heads=1, vocab_size=97)


def build(name, backend, dtype=torch.float32, sequence_parallel=True, **changes):
    torch.manual_seed(3)
    model = TINY[name].build(config(name, **changes), sequence_parallel and name != "bert")
    model = model.to(dtype)
    if dtype == torch.float64 and name in ("gpt_neox", "llama"):
        # Hugging Face's angles are float32 in any case, and XLA's cosine rounds the last digit
        # otherwise than PyTorch's.
        rotary = model.base_model.rotary_emb
        angles = rotary(torch.zeros(1, dtype=dtype), torch.arange(LENGTH)[None])
        rotary.forward = lambda x, position_ids: tuple(angle.to(x.device) for angle in angles)
    return move_model_to_device(model, get_device(backend))


def traced(sequence_parallel):
    import torch_xla.debug.metrics as metrics

    model = build("llama", "xla", sequence_parallel=sequence_parallel, **SHARED)
    batch = {name: tensor.to("xla") for name, tensor in next_token_batch(0).items()}
    mark_step()
    looked = metrics.counter_value("aten::_local_scalar_dense")  # counts since the process began
    loss = model(**batch).loss
    loss.backward()
    gradients = whole_gradients(model)
    assert metrics.counter_value("aten::_local_scalar_dense") == looked, "a value was looked at"
    mark_step()
    embedding = move_model_to_device(ParallelEmbedding(8, 4), get_device("xla"))
    bad = embedding(torch.tensor([[0, 8]], device="xla")).isnan().all(-1)
    # torch-xla orders collectives by adding zero times a result to the next input: NaN spreads.
    mark_step()
    logits, target = torch.zeros(2, 8, device="xla"), torch.tensor([0, 16], device="xla")
    lost = parallel_cross_entropy(logits, target).isnan()
    mark_step()
    assert bad.tolist() == [[False, True]] and lost.tolist() == [False, True]
    return loss.item(), {name: tensor.cpu() for name, tensor in gradients.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_traced_step_equals_one_process(ranks, sequence_parallel):
    torch.manual_seed(3)
    model = reference(TINY["llama"], config("llama", **SHARED), torch.float32)
    loss = hugging_face_loss(model, next_token_batch(0))
    loss.backward()
    wanted = {name: gradient_of(p) for name, p in model.named_parameters()}
    where = dict(world_size=2, tp=2, backend="xla", timeout=240)
    for found, gradients in ranks(traced, sequence_parallel, **where):
        assert_same(([found], [], gradients, {}), ([loss.item()], [], wanted, {}), 1e-5)


def trained(name, backend, dtype):
    changes = {}
    if name != "llama":
        # torch-xla's GELU has a constant of nine digits, so in float64 it is another function; and
        # it rounds the ε of a LayerNorm to float32, which this one survives.
        act, eps = "hidden_act", "layer_norm_eps"
        if name == "gpt2":
            act, eps = "activation_function", "layer_norm_epsilon"
        changes = {act: "relu", eps: 2.0**-17}
    kind, sharded = "targets" if name == "gpt2" else "whole", name != "bert"
    return train_together(
        build(name, backend, dtype, **changes), lambda index: micro_batch(name, kind, index),
        zero=sharded, accumulation=2, steps=5, lr=1e-3, max_norm=0.5, sequence_parallel=sharded,
    )  # fmt: skip


# In float64 nothing differs, so only the order of sums can differ in float32.
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_training_equals_the_cpu_in_float64(ranks, name):
    expected = ranks(trained, name, "cpu", torch.float64, **MESH)[0]
    assert min(expected[1]) > 0.5, "nothing was clipped"
    for found in ranks(trained, name, "xla", torch.float64, backend="xla", **MESH):
        assert_same(found, expected)


RUNS = {
    "bert": Run(config("bert"), 2, 2, 3, LENGTH, 2),
    "bert, cut, zero": Run(config("bert"), 2, 2, 2, LENGTH, 1, zero=True, options=SHARDED),
    "gpt_neox, sequence parallel, zero": Run(
        config("gpt_neox"), 2, 2, 2, LENGTH, 3, sequence_parallel=True, zero=True
    ),
    "llama, grouped, float32 gradients": Run(
        config("llama", num_key_value_heads=1), 2, 2, 2, LENGTH, 2, sequence_parallel=True,
        checkpointing="selective+mlp", zero=True, dtype=torch.bfloat16, float32_gradients=True,
    ),
    "gpt, checkpointing": Run(config("gpt2"), 2, 2, 2, LENGTH, 2, checkpointing="full"),
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
    client, ran = xla_cpu._boundary.client, []
    find = client._graph
    client._graph = lambda tensors: ran.append(find(tensors)) or ran[-1]
    try:
        accumulate_gradients(model, [batch] * run.accumulation)
        optimizer.step()
        mark_step()
    finally:
        del client._graph
    return find_collectives(graph.computation.as_hlo_text() for graph in ran)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_graphs_say_what_the_dry_run_records_and_the_planner_lists(ranks, name):
    """Kind, group, shape, dtype and count, all of them. What is read is the graph as it is traced
    and as Trainium's compiler would get it, so no pass of XLA has merged or split anything.
    """
    run = RUNS[name]
    planned = collectives(run)
    expected = Counter((c.kind, GROUPS[c.axis], c.shape, DTYPES[c.dtype]) for c in planned)
    for rank, found in enumerate(ranks(graphs_of_a_run, run, backend="xla", **MESH)):
        assert Counter(dry_run(run, rank).collectives) == Counter(planned)
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
    return find_masks(xla_cpu.hlo_texts()[-1], LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_the_causal_mask_is_a_constant_of_the_graph_and_one_of_padding_is_not(ranks, mode):
    constant = ranks(masks_of_llama, mode, False, backend="xla", **MESH)[0]
    assert constant and all(constant.values()), constant
    padded = ranks(masks_of_llama, mode, True, backend="xla", **MESH)[0]
    assert padded and not all(padded.values()), padded
