"""The planner's closed forms against the dry run, and its bounds against numbers done by hand."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers.activations import ACT2CLS

from tutorial_lib.lab.plan import (
    INSTANCES,
    Instance,
    Plan,
    scaled,
    smallest_tensor_parallel,
    switches,
    with_tensor_parallel,
)  # fmt: skip
from tutorial_lib.lab.plan.__main__ import parse
from tutorial_lib.lab.plan.dry_run import dry_run
from tutorial_lib.lab.plan.parameters import parameters
from tutorial_lib.lab.plan.runs import PUBLISHED_THROUGHPUT, TUTORIALS, Run
from tutorial_lib.models import bert, gpt, gpt_neox, llama2

from .small_runs import GPT, GROUPED, LLAMA, NEOX, SMALL
from .tiny_models import TINY

TRN1, H100 = INSTANCES["trn1.32xlarge"], INSTANCES["h100x8"]
ANY = Instance("any", 64, *[1e12] * 5)


@pytest.mark.parametrize(
    "name, tera, tera_float32, gibibytes, terabytes",
    [
        ("trn1.32xlarge", 3040, 760, 512, 13.12),
        ("trn2.48xlarge", 10700, 2900, 1536, 46.4),
        ("trn3-gen1", 42944 / 4, 11712 / 4, 9216 / 4, 313.6 / 4),  # of its UltraServer
        ("trn3-gen2", 96624 / 36, 26352 / 36, 20736 / 36, 705.6 / 36),
    ],
)
def test_cores_add_up_to_the_published_instance(name, tera, tera_float32, gibibytes, terabytes):
    one = INSTANCES[name]
    rates = one.half_operations, one.single_operations, one.memory_bandwidth
    published = pytest.approx([tera * 1e12, tera_float32 * 1e12, terabytes * 1e12], rel=5e-3)
    assert [rate * one.cores for rate in rates] == published
    assert one.memory * one.cores == gibibytes * 2**30


FUSED = dict(use_flash_attention=True)
MODULES = {"bert": bert, "gpt2": gpt, "gpt_neox": gpt_neox, "llama": llama2}
FUNCTIONS = [name for name in ACT2CLS if name not in ("prelu", "xielu")]  # they have parameters


@pytest.mark.parametrize("family", MODULES)
def test_activation_functions(family):
    """All of Hugging Face's, with and without dropout, on both kinds of attention: in Llama's gated
    MLP and in one of the plain ones.
    """
    field = "activation_function" if family == "gpt2" else "hidden_act"
    plain = [name for name in MODULES if name != "llama"]
    sizes = dict(num_hidden_layers=1, vocab_size=96)
    functions = FUNCTIONS if family == "llama" else FUNCTIONS[plain.index(family) :: 3]
    for index, function in enumerate(functions):
        changes = {field: function} | dict.fromkeys(TINY[family].dropout, 0.1 * (index % 2))
        if family == "gpt_neox":
            changes["use_parallel_residual"] = index % 3 > 0
        if family in ("gpt2", "llama"):
            options = dict(use_flash_attention=index % 3 == 0)
        else:
            options = dict(shard_mlp=index % 3 == 0) if family == "bert" else {}
        run = Run(
            MODULES[family].make_config("tiny", 2, **sizes, **changes), 2, 1, 2, 16,
            sequence_parallel=family != "bert", options=options,
            dtype=torch.bfloat16 if index % 5 == 0 else torch.float32,
        )  # fmt: skip
        backend = "cuda" if index % 4 > 1 else "xla"
        found = dry_run(run, backend=backend).nbytes["saved activations"]
        assert Plan(run, ANY, backend).nbytes["saved activations"] == found, function


VARIANTS = {
    "gpt, fused": Run(GPT, 2, 1, 2, 64, checkpointing="selective", options=FUSED),
    "llama, fused": Run(LLAMA, 2, 1, 2, 64, options=FUSED),
    "llama, fused, dropout": Run(
        llama2.make_config("tiny", attention_dropout=0.1, head_dim=48), 2, 1, 2, 64, options=FUSED
    ),
    "gpt, fused, one head, dropout": Run(gpt.make_config("tiny"), 4, 1, 2, 64, options=FUSED),
    "gpt, small vocabulary": Run(gpt.make_config("tiny", vocab_size=96), 2, 1, 2, 64),
    "neox, dropout": Run(
        gpt_neox.make_config("tiny", hidden_dropout=0.1, attention_dropout=0.5, rotary_pct=1.0),
        2, 1, 2, 64, checkpointing="full",
    ),
    "llama, one key head": Run(
        llama2.make_config("tiny", num_key_value_heads=1, attention_bias=True, mlp_bias=True),
        2, 2, 2, 64,
    ),
    "neox": Run(NEOX, 2, 2, 2, 64, 2, dtype=torch.bfloat16),
    "several buckets": Run(
        gpt_neox.make_config("small", hidden_size=1024, intermediate_size=4096, vocab_size=50304),
        2, 2, 1, 64, zero=True,
    ),
    "bert": SMALL["bert"],
    "gpt, untied": Run(
        gpt.make_config("tiny", 4, tie_word_embeddings=False, vocab_size=8193, n_inner=512),
        4, sequence=64,
    ),
    "neox, tied": Run(
        gpt_neox.make_config(
            "tiny", 4, tie_word_embeddings=True, vocab_size=8191, attention_bias=False
        ),
        4, sequence=64,
    ),
}  # fmt: skip
CASES = [(SMALL[name], "xla") for name in SMALL]
CASES += [(run, backend) for run in VARIANTS.values() for backend in ("cuda", "xla")]


@pytest.mark.parametrize("run, backend", CASES)
def test_equals_the_dry_run(run, backend):
    """On the CPU `test_dry_run` compares both with real steps, and with the published runs."""
    dry, plan = dry_run(run, backend=backend), Plan(run, ANY, backend)
    assert sum(p.numel() for p in parameters(run)) == dry.parameters
    assert plan.nbytes == dry.nbytes
    assert plan.operations == dry.operations or backend == "cuda"
    assert Counter(plan.collectives) == Counter(dry.collectives)


def test_three_bounds_by_hand():
    config = gpt_neox.make_config("6.9b")
    run = Run(config, 8, 8, 1, 2048, 4, checkpointing="full", zero=True, dtype=torch.bfloat16)
    plan = Plan(run, TRN1)
    assert plan.nodes == 2 and plan.fits

    hidden, tokens = 4096, 2048
    layer = 2 * tokens * 12 * hidden**2 / 8 + 4 * tokens**2 * hidden / 8
    head = 2 * tokens * hidden * 50432 / 8
    assert plan.operations == 4 * (32 * 4 * layer + 3 * head)
    assert plan.times["arithmetic"] == plan.operations / 95e12

    # ZeRO-1's two halves: each of 8 tensor-parallel parts crosses between the 2 nodes once each
    # way; half of it leaves.
    weights = 2 * sum(p.numel() for p in parameters(run))
    assert plan.times["network"] == pytest.approx(8 * 2 * weights / 2 / 100e9, rel=1e-3)

    # Each micro-batch reads the weights three times.
    held = plan.nbytes
    moved = 4 * (5 * weights + 2 * held["saved activations"])  # gradients are read and written
    moved += 2 * weights + 2 * held["optimizer"]
    assert plan.moved_bytes == pytest.approx(moved + 2 * plan.bytes_sent)
    assert plan.step_time == max(plan.times.values()) and plan.throughput == 32 / plan.step_time


def test_published_throughputs_are_below_the_bound():
    for name, published in PUBLISHED_THROUGHPUT.items():
        plan = Plan(TUTORIALS[name], TRN1)
        assert plan.fits and published < plan.throughput
        # Arithmetic bounds it.
        assert plan.utilisation(published) == pytest.approx(published / plan.throughput, rel=0.1)
        # 6 operations for each parameter and token (Kaplan et al., 2020), and the attention's
        parameters_of_matrices = 32 * 12 * 4096**2 + 50257 * 4096
        a_sequence = 2048 * (6 * parameters_of_matrices + 12 * 32 * 4096 * 2048)
        peak = 95e12 * plan.run.world_size
        assert plan.utilisation(published) == pytest.approx(published * a_sequence / peak, rel=1e-3)


def test_each_switch_does_what_it_is_known_for():
    plan = Plan(TUTORIALS["llama2-7b"], TRN1)
    found = switches(plan)
    most, least = (found[f"checkpointing {mode}"].total_bytes for mode in ("none", "full"))
    assert most > plan.total_bytes > least
    assert found["checkpointing full"].operations > plan.operations
    assert found["without sequence parallel"].total_bytes > plan.total_bytes
    assert found["without ZeRO-1"].nbytes["optimizer"] > 10 * plan.nbytes["optimizer"]
    assert found["without float32 gradients"].nbytes["gradients"] * 2 == plan.nbytes["gradients"]
    assert found["tensor parallel 4"].nbytes["weights"] > 1.9 * plan.nbytes["weights"]
    assert all(other.run.sequences == plan.run.sequences for other in found.values())


def test_more_nodes():
    plan = Plan(TUTORIALS["gpt-6.7b"], TRN1)
    plans = scaled(plan, (1, 2, 16, 1000))
    assert [p.run.dp for p in plans] == [4, 8, 64, 4000]
    each = [p.throughput_in_turn / p.nodes for p in plans]
    assert each == sorted(each, reverse=True), "a node does less the more there are"
    assert plans[0].times["network"] == 0 < plans[1].times["network"] < plans[2].times["network"]
    assert Plan(Run(NEOX, 4, 2, 1, 64), H100).times["network"] > 0  # its links are known


def test_smallest_tensor_parallel_size():
    plan = Plan(TUTORIALS["llama2-7b"], TRN1)
    smallest = smallest_tensor_parallel(plan)
    assert with_tensor_parallel(plan, smallest).fits and with_tensor_parallel(plan, 3) is None
    less = (with_tensor_parallel(plan, tp) for tp in range(1, smallest))
    assert not any(p is not None and p.fits for p in less)
    tight = replace(TRN1, memory=1e9)
    assert smallest_tensor_parallel(Plan(TUTORIALS["llama2-7b"], tight)) is None


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Plan(Run(GPT, 4, 9, 1, 64), TRN1), "36 is not divisible by 32"),
        (lambda: Plan(Run(GPT, 4, 8, 1, 64), replace(TRN1, cores=6)), "6 is not divisible by 4"),
        (lambda: scaled(Plan(TUTORIALS["gpt-neox-20b"], H100), [1]), "1 nodes of 8 cores"),
        (lambda: replace(TRN1, cores=2.5), "cores is 2.5"),
        (lambda: replace(TRN1, memory=0), "memory 0"),
        (lambda: Plan(Run(GPT, 4, 8, 1, 64), TRN1, "tpu"), "'tpu' is not one of cpu"),
        (lambda: bert_plan(tie_word_embeddings=False), "tie_word_embeddings=False"),
        (lambda: bert_plan(attn_implementation="eager").nbytes, "attn_implementation 'eager'"),
        (lambda: Plan(Run(GROUPED, sequence=64, options=FUSED)).nbytes, "with 2 key and value"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def bert_plan(**changes):
    return Plan(Run(bert.make_config("tiny", **changes), sequence=64))


def test_command_line(tmp_path, capsys):
    words = "llama2-7b --tp 4 --nodes 2 --no-zero --no-float32-gradients"
    text = parse(words.split()).report
    for found in ("tensor parallel 4, data parallel 16", "sequences/s at most", "with ZeRO-1"):
        assert found in text
    LLAMA.save_pretrained(tmp_path)
    words = f"{tmp_path} --tp 2 --sequence 128 --dtype bfloat16 --instance h100x8"
    run = parse(words.split()).plan.run
    assert run == Run(run.config, 2, sequence=128, dtype=torch.bfloat16)
    assert run.config.hidden_size == LLAMA.hidden_size
    for words, message in [
        ("llama2-7b --tp 5", "32 is not divisible by 5"),
        ("nothing", "'nothing' is neither a folder nor one of"),
        ("llama2-7b --dp 4 --nodes 2", "both set the data-parallel size"),
        ("llama2-7b --nodes 0", "0 nodes of 32 cores hold no whole number of 8 ranks"),
        ("llama2-7b --checkpointing some", "'some' of llama is not one of"),
        ("llama2-7b --instance p5", "invalid choice: 'p5'"),
    ]:
        with pytest.raises(SystemExit):
            parse(words.split())
        assert message in " ".join(capsys.readouterr().err.split())
