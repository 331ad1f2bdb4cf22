"""The tools, on BERT and the stand-in: merge, split, reshard, convert, verify, inspect, and what
they refuse. Other models: `test_checkpoint_hugging_face`.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten_with_path

from tests.standin import Standin, alter, build, same, train
from tests.test_checkpoint import reshard, start
from tests.tiny_models import TINY
from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.checkpoint.shards import Shards
from tutorial_lib.models.full_weights import full_tensors
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.storage import xser

CONFIG = TINY["bert"].config(hidden_size=24, num_attention_heads=12)


def save_bert(folder):
    save_checkpoint(folder, "step_7", TINY["bert"].build(CONFIG))


def save_replicated(folder):
    """With the whole MLP and vocabulary on every rank."""
    save_checkpoint(folder, "step_7", TINY["bert"].ours(CONFIG))


def load_sharded(folder):
    model = TINY["bert"].build(CONFIG)
    load_checkpoint(folder, model=model)
    return full_tensors(model)


def test_what_was_replicated_is_loaded_as_shards_of_another_degree(ranks, tmp_path):
    ranks(save_replicated, str(tmp_path / "run"), world_size=2, tp=2)
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "whole")]) == 0
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for found in ranks(load_sharded, str(tmp_path / "run"), world_size=4, tp=4):
        assert same({name: found[name] for name in whole}, whole)


def test_an_option_that_is_an_argument_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["split", str(tmp_path), str(tmp_path / "t"), "--tp", "2", "--option", "tp=4"])
    assert "--option tp: the command has an argument" in capsys.readouterr().err


def reference():
    return hugging_face_reference(TINY["bert"].theirs, CONFIG).eval()


def test_split_and_merge_are_the_identity(tmp_path, tp=12):
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
    alter(shard)
    options = {"merge": [], "reshard": ["--tp", "1"]}[command]
    assert main([command, str(tmp_path / "run"), str(tmp_path / "out" / "t"), *options]) == 1
    assert f"{shard} was altered" in capsys.readouterr().err
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]


def leaves(value) -> dict[str, object]:
    """What an object holds by its path, of tensors dtype and values."""
    return {
        str(path): (leaf.dtype, leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in tree_flatten_with_path(value)[0]
    }


@pytest.mark.parametrize("form", [False, True])
def test_blanks_are_filled_in_through_a_mapping_that_has_its_room(tmp_path, form):
    """A hole that is written to while the disk is full would end the process by a signal."""
    blank = torch.empty(1000, 1000, device="meta")
    value = {"a": blank, "tied": blank, "step": torch.tensor(3.0), "rate": 0.1}
    held, files = xser.save_blank(value, tmp_path / "t.pt", form)
    assert all(512 * file.stat().st_blocks >= file.stat().st_size for file in files)
    assert held["tied"] is held["a"] or held["tied"].data_ptr() == held["a"].data_ptr()
    assert not held["a"].any() and held["step"] == 3
    held["a"].copy_(torch.arange(1e6).view(1000, 1000))
    found = xser.load(tmp_path / "t.pt")
    assert found["a"].flatten().tolist() == list(range(1_000_000))
    assert found["tied"].data_ptr() == found["a"].data_ptr()
    assert (found["step"], found["rate"]) == (3, 0.1)


def test_xser_there_and_back(ranks, tmp_path):
    ranks(start, f"{tmp_path}/run", torch.float32, True, world_size=4, tp=2)
    folders = [tmp_path / kind / "step_3" for kind in ("run", "xser", "plain")]
    for source, output, form in zip(folders, folders[1:], ("--xser", "--no-xser")):
        reshard(source, output, 2, 2, form)
    for place in (shards := Shards(tags.latest(tmp_path / "run"))).found():
        for folder in folders[1:]:
            file = folder / shards.file(*place).relative_to(folders[0])
            one, other = xser.load(shards.file(*place)), xser.load(file)
            assert leaves(one) == leaves(other)
    weights = xser.load(folders[2] / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    assert weights["embed"].data_ptr() == weights["head"].data_ptr(), "tied stays stored once"


def save_drifted(folder):
    model = Standin()
    if parallel_state.get_tensor_model_parallel_rank() == 3:
        with torch.no_grad():
            model.norm[0] += 1e-6
            model.qkv[-1] += 1e-6
    save_checkpoint(folder, "step_1", model)


def test_verify_names_what_is_wrong(ranks, tmp_path, capsys):
    ranks(save_drifted, str(tmp_path), world_size=4, tp=4)
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


def save_zero1(folder):
    objects = build(Standin, torch.bfloat16, zero1=True)
    train(objects, 0, 3)
    save_checkpoint(folder, "step_3", *objects)


def test_inspect(ranks, tmp_path, capsys):
    ranks(save_zero1, str(tmp_path), world_size=4, tp=2)
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
    source, options = f"{tmp_path}/run/step_7", [] if command == "merge" else ["--tp", "1"]
    if command == "split":
        source = f"{tmp_path}/hf"
        reference().save_pretrained(source)
    before = {p: p.stat().st_mtime_ns for p in Path(source).rglob("*")}
    for output in (source, f"{source}/inside"):
        assert main([command, source, output, *options]) == 1
        assert "choose another place" in capsys.readouterr().err
    os.makedirs(tmp_path / "full" / "of")
    assert main([command, source, f"{tmp_path}/full", *options]) == 1
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
