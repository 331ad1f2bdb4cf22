"""`save_checkpoint` and `load_checkpoint`: what is in the files, exact resume, other meshes, what
is latest; files that are missing, broken or hostile, here and in the other ways to save.
"""

import contextlib
import json
import os
import pickle
import shutil

import pytest
import torch

from tests.standin import (
    WITNESS,
    Bomb,
    Odd,
    Standin,
    alter,
    build,
    largest_file,
    refused,
    same,
    train,
    zero,
)
from tutorial_lib.checkpoint import (
    finalize_checkpoint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tags,
)
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.parallel_layers import checkpointing, parallel_state


def start(folder, dtype, zero1, **options):
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    objects = build(Odd, dtype, zero1)
    train(objects, 0, 3)
    save_checkpoint(folder, "step_3", *objects, {"position": 12}, **options)
    found = train(objects, 3, 8)
    finalize_checkpoint()
    return found


def resume(folder, tag, dtype, zero1, kind=Odd, restore_random_state=True):
    objects = build(kind, dtype, zero1)
    zero(objects[0])
    content = load_checkpoint(folder, tag, *objects, restore_random_state=restore_random_state)
    assert content == {"position": 12} and objects[0].head is objects[0].embed
    return train(objects, 3, 8)


def resume_elsewhere(*args):
    first = parallel_state.is_global_rank_zero()
    warned = pytest.warns(UserWarning, match="random states stay")
    with warned if first else contextlib.nullcontext():
        return resume(*args)


def straight(dtype, zero1, kind=Odd):
    return train(build(kind, dtype, zero1), 0, 8)


def assert_same_runs(found, expected):
    for (weights, masters, _), (right, right_masters, _) in zip(found, expected, strict=True):
        assert same(weights, right) and same(masters, right_masters)


SAVES = [
    (torch.float32, False, dict()),
    (torch.bfloat16, True, dict(async_save=True, num_workers=1)),
    (torch.bfloat16, True, dict(use_xser=True, num_workers=1)),
    (torch.float32, False, dict(use_xser=True, async_save=True)),
]


@pytest.mark.parametrize("dtype, zero1, options", SAVES)
def test_resume_equals_never_having_stopped(ranks, tmp_path, dtype, zero1, options):
    before = ranks(start, str(tmp_path), dtype, zero1, world_size=4, tp=2, **options)
    after = ranks(resume, str(tmp_path), None, dtype, zero1, world_size=4, tp=2)
    assert_same_runs(after, before)
    assert [drawn for *_, drawn in after] == [drawn for *_, drawn in before]
    folder = tmp_path / "step_3"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    places = [("model", 0, tp) for tp in (0, 1)]
    places += [("optim", dp, tp) for dp in range(1 + zero1) for tp in (0, 1)]
    shards = {f"{part}/dp_rank_0{dp}_tp_rank_0{tp}_pp_rank_00.pt" for part, dp, tp in places}
    infos = {f"{name}.info.pt" for name in shards} if "use_xser" in options else set()
    small = {"random_state.pt", "scheduler.pt", "user_content.pt"}
    files = {name for name in found if name.endswith(".pt") and "tensor_" not in name}
    assert files == shards | infos | small
    marker = json.loads((folder / "done").read_text())
    mesh = {"world": 4, "tp": 2, "dp": 2, "pp": 1, "cp": 1}
    assert marker["step"] == 3 and marker["mesh"] == mesh
    assert marker["files"].keys() == found - {"checkpoint", "done"}


# Replicated ranks see the same gradients, so that ZeRO-1 does what the plain optimizer does. The
# tool is not told that two key/value rows are shared by four ranks: the stand-in has no
# configuration.
MESHES = [
    (torch.bfloat16, True, True, 2, 1, False),
    (torch.bfloat16, True, True, 4, 4, False),
    (torch.bfloat16, True, True, 1, 1, False),
    (torch.bfloat16, True, True, 2, 2, True),
    (torch.bfloat16, True, True, 4, 1, True),
    (torch.float32, False, False, 2, 2, False),
    (torch.float32, False, False, 4, 4, False),
    (torch.float32, False, False, 4, 1, True),
    (torch.float32, False, True, 2, 1, False),
    (torch.float32, False, True, 2, 1, True),
]


@pytest.mark.parametrize("dtype, saved, loaded, world_size, tp, tool", MESHES)
def test_another_mesh(ranks, tmp_path, dtype, saved, loaded, world_size, tp, tool):
    """Saved at 2 × 2, resharded when it is loaded or by the tool before."""
    xser, tag = tp == 2, "other" if tool else "step_3"
    ranks(start, str(tmp_path), dtype, saved, use_xser=xser, world_size=4, tp=2)
    if tool:
        reshard(tmp_path / "step_3", tmp_path / tag, tp, world_size // tp)
    where = dict(world_size=world_size, tp=tp)
    found = ranks(resume_elsewhere, str(tmp_path), tag, dtype, loaded, **where)
    assert_same_runs(found, ranks(straight, dtype, loaded, **where))


def reshard(source, output, tp: int, dp: int, *options: str) -> None:
    sizes = ["--tp", str(tp), "--dp", str(dp)]
    assert main(["reshard", str(source), str(output), *sizes, *options]) == 0
    assert main(["verify", str(output)]) == 0


def four_saves(folder, async_save):
    model = Standin()
    for step in (9, 10, 11, 100):
        save_checkpoint(folder, f"step_{step}", model, async_save=async_save, num_kept_ckpts=2)
    finalize_checkpoint()


@pytest.mark.parametrize("async_save", [False, True])
def test_keeps_the_newest(ranks, tmp_path, async_save):
    os.makedirs(tmp_path / "notes" / "checkpoint")  # a folder of the user's
    os.makedirs(tmp_path / "tensorflow")
    (tmp_path / "tensorflow" / "checkpoint").write_text('model_checkpoint_path: "m"')
    os.makedirs(tmp_path / "step_5.incomplete")
    ranks(four_saves, str(tmp_path), async_save, world_size=2, tp=2)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step_100", "step_11", "tensorflow"]
    assert os.listdir(tmp_path / "notes") == os.listdir(tmp_path / "tensorflow") == ["checkpoint"]
    os.utime(tmp_path / "step_11" / "done")
    os.utime(tmp_path / "step_11")
    assert tags.latest(tmp_path).tag == "step_100" and has_checkpoint(str(tmp_path))
    assert not has_checkpoint(str(tmp_path / "nowhere"))


def replace(folder):
    model = Standin()
    save_checkpoint(folder, "last", model, user_content=1)
    save_checkpoint(folder, "last", model, user_content=2)
    return load_checkpoint(folder, "last", model)


def test_a_tag_can_be_replaced_and_the_old_one_serves_until_then(ranks, tmp_path):
    assert ranks(replace, str(tmp_path), world_size=2, tp=2) == [2, 2]
    assert os.listdir(tmp_path) == ["last"]
    # Killed while it was being replaced.
    shutil.copytree(tmp_path / "last", tmp_path / "last.replaced")
    os.remove(tmp_path / "last" / "done")
    assert tags.latest(tmp_path).path.name == "last.replaced"
    assert [p.name for p in tags.incomplete(tmp_path)] == ["last"]


def low_level(folder, save):
    if save:
        checkpointing.save({"model": Standin().state_dict()}, folder)
    else:
        checkpointing.load(folder, Standin())


def sharded_state(folder, save):
    _, optimizer, _ = build(zero1=True)
    if save:
        optimizer.save_sharded_state_dict(folder)
    else:
        optimizer.load_sharded_state_dict(folder)


def whole(folder, save, **options):
    if save:
        start(folder, torch.float32, False, **options)
    else:
        resume(folder, None, torch.float32, False)


SHARD = "dp_rank_00_tp_rank_01_pp_rank_00.pt"
DOORS = {
    "model": (whole, dict(use_xser=True), f"step_3/model/{SHARD}.tensors/tensor_1.pt"),
    "optimizer": (whole, {}, f"step_3/optim/{SHARD}"),
    "sharded state": (sharded_state, {}, "optim.dp_rank_01.tp_rank_01"),
    "low level": (low_level, {}, "tp_rank_01_pp_rank_00/checkpoint.pt"),
}
SPOILS = {
    "missing": (os.remove, FileNotFoundError, "is missing"),
    "truncated": (
        lambda path: os.truncate(path, os.path.getsize(path) - 10), ValueError, "truncated"
    ),
    "altered": (alter, ValueError, "altered"),
    "bomb": (lambda path: torch.save({"a": Bomb()}, path), ValueError, "refused"),
    "raw bomb": (lambda path: path.write_bytes(pickle.dumps(Bomb())), ValueError, "refused"),
    "foreign": (
        lambda path: torch.save({"model": {"other": torch.ones(1)}}, path), ValueError, "another"
    ),
}  # fmt: skip
# A checkpoint has digests, so that anything else is "altered"; see `test_a_pickle_bomb`.
CASES = [(door, spoil) for door in DOORS for spoil in ("missing", "truncated")]
CASES += [("model", "altered"), ("optimizer", "altered"), ("sharded state", "bomb")]
CASES += [("low level", spoil) for spoil in ("bomb", "raw bomb", "foreign")]


@pytest.mark.parametrize("door, spoil", CASES)
def test_a_spoiled_shard_is_named_on_all_ranks(ranks, tmp_path, door, spoil):
    (function, options, name), (action, error, words) = DOORS[door], SPOILS[spoil]
    ranks(function, str(tmp_path), True, **options, world_size=4, tp=2)
    action(tmp_path / name)
    what = name.removeprefix("step_3/")
    refused(ranks, error, [words, what], function, str(tmp_path), False, world_size=4)
    assert not os.path.exists(WITNESS)


def load_or_error(folder, tag=None):
    load_checkpoint(folder, tag, *build()[:2])


def test_incomplete_is_reported_and_never_chosen(ranks, tmp_path):
    folder = str(tmp_path)
    refused(ranks, RuntimeError, ["no complete checkpoint"], load_or_error, folder)
    ranks(four_saves, folder, False, world_size=2, tp=2)
    os.remove(tmp_path / "step_100" / "done")
    with pytest.warns(UserWarning, match="step_100 incomplete"):
        from tutorial_lib.checkpoint.load import _choose

        assert _choose(tmp_path, None).tag == "step_11"
    for tag, words in (("step_100", "is incomplete"), ("step_11", "without an optimizer")):
        refused(ranks, FileNotFoundError, [tag, words], load_or_error, folder, tag)


def foreign(folder):
    save_checkpoint(folder, "other", torch.nn.Linear(2, 2))
    load_checkpoint(folder, model=Standin())


def larger(folder):
    save_checkpoint(folder, "larger", Standin(vocabulary=12))
    load_checkpoint(folder, model=Standin())


def two_different_tied(folder):
    weights = Standin().state_dict()
    weights["head"] = weights["head"] + 1
    save_checkpoint(folder, "torn", weights)
    load_checkpoint(folder, model=Standin())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (foreign, 'Missing key(s) in state_dict: "embed", "norm"'),
        (larger, "size mismatch for embed: copying a param with shape torch.Size([6, 4])"),
        (two_different_tied, "embed and head"),
    ],
)
def test_a_foreign_model(ranks, tmp_path, function, words):
    refused(ranks, ValueError, [words, str(tmp_path)], function, str(tmp_path))


def tied_once(folder):
    weights = Standin().state_dict()
    del weights["head"]
    save_checkpoint(folder, "one", weights)
    model = Standin()
    torch.nn.init.zeros_(model.embed)
    load_checkpoint(folder, model=model)
    return torch.equal(model.head, weights["embed"]) and model.head is model.embed


def test_a_tied_tensor_under_one_of_its_names(ranks, tmp_path):
    assert all(ranks(tied_once, str(tmp_path), world_size=2, tp=2))


def full_disk(folder, async_save, use_xser):
    save_checkpoint(folder, "step_1", Standin())
    second = parallel_state.get_tensor_model_parallel_rank() == 1
    with largest_file(100_000) if second else contextlib.nullcontext():
        model = Standin(vocabulary=20_000)
        save_checkpoint(folder, "step_2", model, async_save=async_save, use_xser=use_xser)
        finalize_checkpoint()


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk(ranks, tmp_path, async_save, use_xser):
    words = ["tp_rank_01", "File too large"]
    refused(ranks, OSError, words, full_disk, str(tmp_path), async_save, use_xser)
    assert os.listdir(tmp_path) == ["step_1"]


def bfloat16_states(folder):
    model = Standin(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train_step(optimizer, 1)
    for fields in optimizer.state.values():
        fields["momentum_buffer"] = fields["momentum_buffer"].float() + 1e-6
    save_checkpoint(folder, "step_1", model, optimizer)
    again = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(folder, model=model, optimizer=again)
    return all(
        torch.equal(optimizer.state[p]["momentum_buffer"], again.state[p]["momentum_buffer"])
        for p in model.parameters()
    )


def test_states_keep_their_dtype(ranks, tmp_path):
    assert all(ranks(bfloat16_states, str(tmp_path), world_size=2, tp=2))
