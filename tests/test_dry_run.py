"""The dry run against real steps at small size, and the tutorials' own configurations."""

import resource
import time
from collections import Counter

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, BertForPreTraining, LlamaConfig, ViTConfig

from tutorial_lib.checkpoint import save_checkpoint
from tutorial_lib.lab.plan import Plan
from tutorial_lib.lab.plan.__main__ import parse
from tutorial_lib.lab.plan.dry_run import dry_run
from tutorial_lib.lab.plan.runs import TUTORIALS, Run
from tutorial_lib.parallel_layers import comm
from tutorial_lib.training import memory
from tutorial_lib.training.loop import accumulate_gradients

from .small_runs import LLAMA, SMALL

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def real_step(run: Run, folder: str):
    """The step on this mesh, with values."""
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
    return log, nbytes


@pytest.mark.parametrize("name", SMALL)
def test_equals_a_real_step_and_so_does_the_plan(ranks, tmp_path, name):
    run = SMALL[name]
    plan = Plan(run, backend="cpu")
    real = ranks(real_step, run, str(tmp_path), world_size=run.world_size, tp=run.tp)
    for rank, (log, nbytes) in enumerate(real):
        assert Counter(plan.collectives) == Counter(log) and nbytes.items() <= plan.nbytes.items()
        found = dry_run(run, rank, "cpu")
        assert found.collectives == log
        assert {**found.nbytes, "saved activations": 0} == {**nbytes, "saved activations": 0}
        saved = nbytes["saved activations"]
        assert found.nbytes["saved activations"] == pytest.approx(saved, rel=0.01)
        for place, file in found.files.items():
            written = torch.load(tmp_path / "step_1" / place, weights_only=True)
            assert _shapes(written) == _shapes(file)


def _shapes(value) -> list:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sorted(((tuple(leaf.shape), leaf.dtype) for leaf in leaves), key=str)


def hugging_face_count(config) -> int:
    with torch.device("meta"):
        if config.model_type == "bert":
            model = BertForPreTraining(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


QUICK = "llama2-7b"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != QUICK)) for name in TUTORIALS]
)
def test_the_published_runs(name):
    run, start = TUTORIALS[name], time.process_time()
    found, plan = dry_run(run, rank=run.world_size - 1), Plan(run)
    assert time.process_time() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * 2**30
    assert found.model_parameters == hugging_face_count(run.config)
    assert (found.mesh["tp"], found.mesh["dp"]) == (run.tp, run.dp)
    assert plan.nbytes == found.nbytes
    if name.startswith("gpt-6.7b"):  # its last rank holds padding, which takes no part in the loss
        assert plan.operations > found.operations
    else:
        assert plan.operations == found.operations
    assert Counter(plan.collectives) == Counter(found.collectives)
    copies = run.dp if run.zero else 1
    kept = sum(found.nbytes[kind] for kind in ("weights", "optimizer"))
    wanted = found.parameters * (run.dtype.itemsize + (12 if run.zero else 8) / copies)
    assert kept == pytest.approx(wanted, rel=1e-3)  # and the counters of AdamW
    for line in ("Collectives of a step", f"{found.parameters:,} of {found.model_parameters:,}"):
        assert line in str(found)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: dry_run(SMALL["bert"], 4), r"rank 4 is not in \[0, 4\)"),
        (lambda: dry_run(SMALL["bert"], 0, "tpu"), "'tpu' is not one of cpu, cuda, neuron, xla"),
        (lambda: SMALL["bert"].change(tp=3), "4 is not divisible by 3"),
        (lambda: SMALL["bert"].change(dp=0), "dp is 0, must be a positive integer"),
        (lambda: SMALL["bert"].change(dtype=torch.int8), "torch.int8"),
        (lambda: SMALL["neox"].change(options={"shard_mlp": True}), "gpt_neox; it takes none"),
        (lambda: SMALL["bert"].change(sequence_parallel=True), "not available for bert"),
        (lambda: SMALL["bert"].change(sequence=513), "513 is above the model's 512"),
        (lambda: SMALL["neox"].change(checkpointing="selective"), "is not one of none, full"),
        (lambda: SMALL["neox"].change(float32_gradients=True), "needs zero"),
        (lambda: Run(LLAMA, 2, sequence=63, sequence_parallel=True), "63 is not divisible by 2"),
        (lambda: Run(ViTConfig()), "'vit' is not one of bert"),
        (lambda: Run(LlamaConfig(hidden_act="xielu")), "'xielu' has parameters of its own"),
        (lambda: dry_run(Run(LlamaConfig(rope_parameters=DYNAMIC), sequence=8)), "'dynamic'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert not dist.is_initialized()


def test_what_does_not_fit_is_said_with_the_report():
    needed = psutil.virtual_memory().total + 1
    with pytest.raises(ValueError, match=f"{needed:,} bytes") as caught:
        memory.require_memory(needed, 1, "cpu", report=lambda: dry_run(SMALL["llama"]))
    assert "Collectives of a step" in str(caught.value)
    memory.require_memory(1, 1, "cpu", report=lambda: pytest.fail("it fits"))


def test_command_line(capsys):
    text = parse(["bert-large", "--dp", "2", "--dry-run", "3"]).report
    assert "Rank 3 of world 16 × tp 8 × dp 2" in text and "Its files in a checkpoint" in text
    with pytest.raises(SystemExit):
        parse(["bert-large", "--dry-run", "32"])
    assert "rank 32 is not in [0, 32)" in capsys.readouterr().err
