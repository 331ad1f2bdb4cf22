"""The tools, on BERT and the stand-in: merge, split, reshard, convert, verify, inspect, and what
they refuse. Other models: `test_checkpoint_hugging_face`.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig
from transformers import BertForPreTraining as HuggingFaceBert

from tests.standin import Standin, full_weights, run, same, zero
from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.checkpoint.architectures import layout_at
from tutorial_lib.checkpoint.layout import Layout
from tutorial_lib.checkpoint.shards import Shards
from tutorial_lib.models.bert import BertForPreTraining
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.sharding import Partition
from tutorial_lib.storage import xser

CONFIG = BertConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=12,
    intermediate_size=48,
    vocab_size=97,
    max_position_embeddings=32,
)


def save_bert(folder):
    save_checkpoint(folder, "step_7", BertForPreTraining(CONFIG, True, True))


def reference():
    return hugging_face_reference(HuggingFaceBert, CONFIG).eval()


@pytest.mark.parametrize("tp", [2, 12])
def test_split_and_merge_are_the_identity(tmp_path, tp):
    reference().save_pretrained(tmp_path / "hf", max_shard_size="20kB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    options = f"--tp {tp} --pad --option shard_mlp=true --option shard_vocabulary=true".split()
    assert main(["split", str(tmp_path / "hf"), str(tmp_path / "run" / "step_0"), *options]) == 0
    assert main(["verify", str(tmp_path / "run" / "step_0")]) == 0
    shards = Shards(tags.latest(tmp_path / "run"))
    assert [rank for _, rank, _ in shards.found()] == list(range(tp)), "rank 10 comes after 9"
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    original = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        original |= load_file(file)
    assert same(load_file(tmp_path / "merged" / "model.safetensors"), original)


@pytest.mark.parametrize("command", ["merge", "reshard"])
def test_an_altered_shard_is_named_and_leaves_nothing(ranks, tmp_path, capsys, command):
    ranks(save_bert, str(tmp_path / "run"), world_size=2, tp=2)
    shard = tmp_path / "run" / "step_7" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    options = {"merge": [], "reshard": ["--tp", "1"]}[command]
    assert main([command, str(tmp_path / "run"), str(tmp_path / "out" / "t"), *options]) == 1
    assert f"{shard} was altered" in capsys.readouterr().err
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]


class Odd(Standin):
    """What is hard to shard: 7 rows, fewer rows than places, no rows at all, nothing to learn."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype)
        self.seven = nn.Parameter((torch.arange(21, dtype=dtype) / 8).reshape(7, 3))
        self.pair = nn.Parameter((torch.arange(10, dtype=dtype) / 8).reshape(2, 5, 1))
        self.frozen = nn.Parameter(torch.ones(3, 2, dtype=dtype), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5, dtype=dtype))


def optimizer_of(model, zero1: bool = True) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    few = [(name, named.pop(name)) for name in ("norm", "pair", "frozen") if name in named]
    groups = [{"params": few, "weight_decay": 0.0}, {"params": list(named.items())}]
    if not zero1:
        return torch.optim.AdamW(groups, lr=0.05)
    return NeuronZero1Optimizer(groups, torch.optim.AdamW, lr=0.05, grad_clipping=False)


def zero_start(folder, kind, dtype, zero1=True, **options):
    model = kind(dtype)
    optimizer = optimizer_of(model, zero1)
    run(model, optimizer, 0, 3)
    save_checkpoint(folder, "step_3", model, optimizer, user_content={"global_step": 3}, **options)
    return run(model, optimizer, 3, 8)


def zero_resume(folder, tag, kind, dtype, zero1=True):
    model = kind(dtype)
    optimizer = optimizer_of(model, zero1)
    content = load_checkpoint(folder, tag, zero(model), optimizer, restore_random_state=False)
    assert content == {"global_step": 3}
    return run(model, optimizer, 3, 8)


def zero_straight(kind, dtype, zero1=True):
    model = kind(dtype)
    return run(model, optimizer_of(model, zero1), 0, 8)


def assert_same_runs(found, expected):
    for (weights, master), (again, expected_master) in zip(found, expected, strict=True):
        assert same(weights, again) and same(master, expected_master)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"use_xser": True}),
        (torch.bfloat16, {"async_save": True}),
    ],
    ids=["plain", "xser", "async"],
)
def test_zero1_resume_is_exact(ranks, tmp_path, dtype, options):
    before = ranks(zero_start, str(tmp_path), Odd, dtype, world_size=4, tp=2, **options)
    after = ranks(zero_resume, str(tmp_path), None, Odd, dtype, world_size=4, tp=2)
    assert_same_runs(after, before)
    files = list((tmp_path / "step_3" / "optim").glob("dp_rank_*.pt"))
    assert len(files) == (8 if "use_xser" in options else 4)


def reshard(source, output, tp: int, dp: int, *options: str) -> None:
    sizes = ["--tp", str(tp), "--dp", str(dp)]
    assert main(["reshard", str(source), str(output), *sizes, *options]) == 0
    assert main(["verify", str(output)]) == 0


# The tool is not told that two key/value rows are shared by four ranks: the stand-in has no
# configuration.
@pytest.mark.parametrize(
    ("world_size", "tp", "tool"),
    [(2, 1, False), (4, 4, False), (1, 1, False), (2, 2, True), (4, 1, True)],
)
def test_zero1_at_another_mesh(ranks, tmp_path, world_size, tp, tool):
    dtype, tag = torch.bfloat16, "step_3"
    ranks(zero_start, str(tmp_path), Odd, dtype, world_size=4, tp=2)
    if tool:
        tag = "other"
        reshard(tmp_path / "step_3", tmp_path / tag, tp, world_size // tp)
    found = ranks(zero_resume, str(tmp_path), tag, Odd, dtype, world_size=world_size, tp=tp)
    assert_same_runs(found, ranks(zero_straight, Odd, dtype, world_size=world_size, tp=tp))


@pytest.mark.parametrize("tool", [False, True])
@pytest.mark.parametrize("zero1", [False, True])
def test_a_plain_optimizer_at_another_mesh(ranks, tmp_path, zero1, tool):
    """Replicated ranks see the same gradients, so that ZeRO-1 does what the plain one does."""
    dtype, tag = torch.float32, "other" if tool else "step_3"
    ranks(zero_start, str(tmp_path), Odd, dtype, False, world_size=2, tp=2)
    if tool:
        reshard(tmp_path / "step_3", tmp_path / tag, 1, 2)
    found = ranks(zero_resume, str(tmp_path), tag, Odd, dtype, zero1, world_size=2, tp=1)
    assert_same_runs(found, ranks(zero_straight, Odd, dtype, zero1, world_size=2, tp=1))


def plain_from_zero(folder):
    model = Standin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    load_checkpoint(folder, None, model, optimizer, restore_random_state=False)


def test_another_kind_of_optimizer(ranks, tmp_path):
    ranks(zero_start, str(tmp_path), Standin, torch.float32, world_size=2, tp=2)
    with pytest.raises(ValueError, match="group"):
        ranks(plain_from_zero, str(tmp_path), world_size=2, tp=2)


def test_xser_there_and_back(ranks, tmp_path):
    ranks(zero_start, f"{tmp_path}/run", Odd, torch.float32, world_size=4, tp=2)
    folders = [tmp_path / kind / "step_3" for kind in ("run", "xser", "plain")]
    for source, output, form in zip(folders, folders[1:], ("--xser", "--no-xser")):
        reshard(source, output, 2, 2, form)
    for place in (shards := Shards(tags.latest(tmp_path / "run"))).found():
        for folder in folders[1:]:
            file = folder / shards.file(*place).relative_to(folders[0])
            assert_same_object(xser.load(shards.file(*place)), xser.load(file))
    weights = xser.load(folders[2] / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    assert weights["embed"].data_ptr() == weights["head"].data_ptr(), "tied stays stored once"


def assert_same_object(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_object(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same_object(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype
    else:
        assert one == other


def save_standin(folder, drift=False):
    model = Standin()
    if drift and parallel_state.get_tensor_model_parallel_rank() == 3:
        with torch.no_grad():
            model.norm[0] += 1e-6
            model.qkv[-1] += 1e-6
    save_checkpoint(folder, "step_1", model)


def test_fused_and_shared_weights_merge(ranks, tmp_path):
    for tp in (1, 2, 4):
        ranks(save_standin, f"{tmp_path}/{tp}", world_size=tp, tp=tp)
        assert main(["merge", f"{tmp_path}/{tp}", f"{tmp_path}/{tp}.safetensors"]) == 0
        assert same(
            load_file(tmp_path / f"{tp}.safetensors"),
            full_weights() | {"positions": torch.arange(4)},
        )


def test_verify_names_what_is_wrong(ranks, tmp_path, capsys):
    ranks(save_standin, str(tmp_path), True, world_size=4, tp=4)
    assert main(["verify", str(tmp_path)]) == 1
    found = capsys.readouterr().out
    assert "norm is replicated and differs between ranks 0 and 3" in found
    assert "qkv: rows from 7 are shared and differ on rank 3" in found
    shard = tmp_path / "step_1" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    os.truncate(shard, 100)
    (tmp_path / "step_1" / "model" / "stray.pt").write_text("")
    assert main(["verify", str(tmp_path)]) == 1
    found = capsys.readouterr().out
    assert f"{shard} has 100 bytes" in found and "stray.pt does not belong" in found
    os.remove(shard)
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"missing     model/{shard.name}" in capsys.readouterr().out


def test_inspect(ranks, tmp_path, capsys):
    ranks(zero_start, str(tmp_path), Standin, torch.bfloat16, world_size=4, tp=2)
    os.makedirs(tmp_path / "step_9.incomplete")
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for words in (
        "step_3: complete, step 3 (latest)", "step_9.incomplete: incomplete", "world 4, tp 2, dp 2",
        "Standin, 177 elements in 7 tensors (6 bfloat16, 1 int64)", "embed = head",
        "ZeRO-1 over data-parallel groups of 2",
        "gate_up    16×4 bfloat16, sharded along dim 0, 2 fused",
    ):  # fmt: skip
        assert words in out, out


@pytest.mark.parametrize("command", ["merge", "reshard", "split"])
def test_never_over_something(ranks, tmp_path, capsys, command):
    ranks(save_bert, f"{tmp_path}/run", world_size=1, tp=1)
    source, options = (
        f"{tmp_path}/run/step_7",
        {"reshard": ["--tp", "1"], "split": ["--tp", "1"]},
    )
    if command == "split":
        source = f"{tmp_path}/hf"
        reference().save_pretrained(source)
    before = {p: p.stat().st_mtime_ns for p in Path(source).rglob("*")}
    for output in (source, f"{source}/inside"):
        assert main([command, source, output, *options.get(command, [])]) == 1
        assert "choose another place" in capsys.readouterr().err
    os.makedirs(tmp_path / "full" / "of")
    assert main([command, source, f"{tmp_path}/full", *options.get(command, [])]) == 1
    assert "exists already" in capsys.readouterr().err
    assert before == {p: p.stat().st_mtime_ns for p in Path(source).rglob("*")}


def test_reshard_refuses_a_degree(ranks, tmp_path, capsys):
    ranks(save_bert, f"{tmp_path}/run", world_size=1, tp=1)
    for options, words in (
        (["8", "--pad"], "12 attention heads are not divisible by 8"),
        (["2"], "--pad"),
        (["0"], "tp is 0"),
    ):
        assert main(["reshard", f"{tmp_path}/run", f"{tmp_path}/out/t", "--tp", *options]) == 1
        assert words in capsys.readouterr().err


def test_heads_that_ranks_share():
    layout = Layout((8, 4), torch.float32, Partition(0, (4, 2, 2), 1))
    assert layout.at(4, heads=(4, 2, 2)).partition.replicas == (1, 2, 2)
    assert layout.at(4, heads=(4, 2, 2)).at(2, heads=(4, 2, 2)) == layout.at(2)
    llama = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    assert layout_at("x.qkv_proj.weight", layout, 4, llama).partition.replicas == (1, 2, 2)
    with pytest.raises(ValueError, match="4 attention heads are not divisible by 3"):
        layout_at("x.qkv_proj.weight", layout, 3, llama)
    with pytest.raises(ValueError, match="padding"):
        Layout((6, 4), torch.float32, Partition(0, (6,), 4, pad=2)).at(2, heads=(3,))
