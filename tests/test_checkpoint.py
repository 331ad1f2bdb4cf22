"""`save_checkpoint` and `load_checkpoint`: what is in the files, exact resume, what is latest,
errors on all ranks.
"""

import contextlib
import json
import os
import random
import shutil

import numpy as np
import pytest
import torch

from tests.standin import Standin, attempt, same, state, zero
from tutorial_lib.checkpoint import (
    finalize_checkpoint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tags,
)
from tutorial_lib.parallel_layers import parallel_state


def build(dtype=torch.float32, **kwargs):
    model = Standin(dtype, **kwargs)
    groups = [
        {"params": [model.norm, model.scale], "weight_decay": 0.0},
        {"params": [model.embed, model.gate_up, model.down, model.qkv]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )


def train(model, optimizer, scheduler, first, last):
    losses = []
    for step in range(first, last):
        losses.append(
            model.train_step(optimizer, step)
            + torch.rand(()).item()
            + np.random.rand()
            + random.random()
        )
        scheduler.step()
    return losses


def save_and_go_on(folder, **options):
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, 0, 3)
    save_checkpoint(folder, "step_3", model, optimizer, scheduler, {"position": 12}, **options)
    losses = train(model, optimizer, scheduler, 3, 8)
    finalize_checkpoint()
    return losses, state(model)


def resume(folder, last=8):
    model, optimizer, scheduler = build()
    zero(model)
    content = load_checkpoint(folder, None, model, optimizer, scheduler)
    assert content == {"position": 12} and model.head is model.embed
    return train(model, optimizer, scheduler, 3, last), state(model)


@pytest.mark.parametrize(
    ("use_xser", "async_save", "num_workers"),
    [(False, False, 8), (False, True, 1), (True, False, 1), (True, True, 8)],
)
def test_resume_equals_never_having_stopped(ranks, tmp_path, use_xser, async_save, num_workers):
    options = dict(use_xser=use_xser, async_save=async_save, num_workers=num_workers)
    before = ranks(save_and_go_on, str(tmp_path), world_size=4, tp=2, **options)
    after = ranks(resume, str(tmp_path), world_size=4, tp=2)
    for (losses, weights), (again, resumed) in zip(before, after):
        assert losses == again and same(weights, resumed)
    found = sorted(
        str(p.relative_to(tmp_path / "step_3"))
        for p in (tmp_path / "step_3").rglob("*.pt")
        if "tensor_" not in p.name
    )
    shards = [
        f"{part}/dp_rank_00_tp_rank_0{tp}_pp_rank_00.pt"
        for part in ("model", "optim")
        for tp in (0, 1)
    ]
    infos = [f"{name}.info.pt" for name in shards] if use_xser else []
    assert found == sorted([*shards, *infos, "random_state.pt", "scheduler.pt", "user_content.pt"])
    marker = json.loads((tmp_path / "step_3" / "done").read_text())
    mesh = {"world": 4, "tp": 2, "dp": 2, "pp": 1, "cp": 1}
    assert marker["step"] == 3 and marker["mesh"] == mesh
    assert marker["files"].keys() == {
        str(p.relative_to(tmp_path / "step_3"))
        for p in (tmp_path / "step_3").rglob("*")
        if p.is_file() and p.name not in ("checkpoint", "done")
    }


def other_mesh(folder):
    first = parallel_state.is_global_rank_zero()
    with (
        pytest.warns(UserWarning, match="random states stay") if first else contextlib.nullcontext()
    ):
        model, optimizer, scheduler = build()
        load_checkpoint(folder, None, zero(model), optimizer, scheduler)
    for step in range(3, 8):
        model.train_step(optimizer, step)
        scheduler.step()
    return state(model)


@pytest.mark.parametrize(
    ("world_size", "tp", "use_xser"), [(1, 1, False), (2, 2, True), (4, 4, False), (4, 1, True)]
)
def test_another_mesh_reshards(ranks, tmp_path, world_size, tp, use_xser):
    ranks(save_and_go_on, str(tmp_path), world_size=4, tp=2, use_xser=use_xser)
    expected = ranks(plain_run, world_size=world_size, tp=tp)
    for weights, reference in zip(
        ranks(other_mesh, str(tmp_path), world_size=world_size, tp=tp), expected
    ):
        assert same(weights, reference)


def plain_run():
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, 0, 8)
    return state(model)


def four_saves(folder, async_save):
    model, *_ = build()
    for step in (9, 10, 11, 100):
        save_checkpoint(folder, f"step_{step}", model, async_save=async_save, num_kept_ckpts=2)
    finalize_checkpoint()


@pytest.mark.parametrize("async_save", [False, True])
def test_keeps_the_newest(ranks, tmp_path, async_save):
    os.makedirs(tmp_path / "notes")  # a folder of the user's
    os.makedirs(tmp_path / "step_5.incomplete")
    ranks(four_saves, str(tmp_path), async_save, world_size=2, tp=2)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step_100", "step_11"]
    os.utime(tmp_path / "step_11" / "done")
    os.utime(tmp_path / "step_11")
    assert tags.latest(tmp_path).tag == "step_100" and has_checkpoint(str(tmp_path))
    assert not has_checkpoint(str(tmp_path / "nowhere"))


def replace(folder):
    model, *_ = build()
    save_checkpoint(folder, "last", model, user_content=1)
    save_checkpoint(folder, "last", model, user_content=2)
    return load_checkpoint(folder, "last", model)


def test_a_tag_can_be_replaced_and_the_old_one_serves_until_then(ranks, tmp_path):
    assert ranks(replace, str(tmp_path), world_size=2, tp=2) == [2, 2]
    assert os.listdir(tmp_path) == ["last"]
    shutil.copytree(
        tmp_path / "last", tmp_path / "last.replaced"
    )  # killed while it was being replaced
    os.remove(tmp_path / "last" / "done")
    assert tags.latest(tmp_path).path.name == "last.replaced"
    assert [p.name for p in tags.incomplete(tmp_path)] == ["last"]


def load_or_error(folder, tag=None):
    model, optimizer, _ = build()
    return load_checkpoint(folder, tag, model, optimizer)


def altered(path):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


SPOILS = {
    "missing": (os.remove, FileNotFoundError, "is missing"),
    "truncated": (
        lambda path: os.truncate(path, os.path.getsize(path) - 10),
        ValueError,
        "truncated",
    ),
    "altered": (altered, ValueError, "altered"),
}


@pytest.mark.parametrize(("part", "use_xser"), [("model", True), ("optim", False)])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoiled_shard_is_named_on_all_ranks(ranks, tmp_path, use_xser, part, spoil):
    ranks(save_and_go_on, str(tmp_path), world_size=4, tp=2, use_xser=use_xser)
    name = "dp_rank_00_tp_rank_01_pp_rank_00.pt" + (".tensors/tensor_1.pt" if use_xser else "")
    action, error, words = SPOILS[spoil]
    action(tmp_path / "step_3" / part / name)
    for kind_of, message in ranks(
        attempt, load_or_error, str(tmp_path), world_size=4, tp=2, timeout=30
    ):
        assert kind_of is error and words in message and f"{part}/{name}" in message, message


def test_incomplete_is_reported_and_never_chosen(ranks, tmp_path):
    errors = ranks(attempt, load_or_error, str(tmp_path), world_size=2, tp=2)
    assert all(
        kind is RuntimeError and "no complete checkpoint" in message for kind, message in errors
    )
    ranks(four_saves, str(tmp_path), False, world_size=2, tp=2)
    os.remove(tmp_path / "step_100" / "done")
    with pytest.warns(UserWarning, match="step_100 incomplete"):
        from tutorial_lib.checkpoint.load import _choose

        assert _choose(tmp_path, None).tag == "step_11"
    errors = ranks(attempt, load_or_error, str(tmp_path), "step_100", world_size=2, tp=2)
    assert all(
        kind is FileNotFoundError and "step_100 is incomplete" in message
        for kind, message in errors
    )
    errors = ranks(attempt, load_or_error, str(tmp_path), "step_11", world_size=2, tp=2)
    assert all(
        kind is FileNotFoundError and "without an optimizer" in message for kind, message in errors
    )


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
    for kind_of, message in ranks(attempt, function, str(tmp_path), world_size=2, tp=2):
        assert kind_of is ValueError and words in message and str(tmp_path) in message, message


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
    import resource

    save_checkpoint(folder, "step_1", Standin())
    model = Standin(vocabulary=20_000)
    if parallel_state.get_tensor_model_parallel_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        save_checkpoint(folder, "step_2", model, async_save=async_save, use_xser=use_xser)
        finalize_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk(ranks, tmp_path, async_save, use_xser):
    found = ranks(
        attempt, full_disk, str(tmp_path), async_save, use_xser, world_size=2, tp=2, timeout=30
    )
    for kind_of, message in found:
        assert (
            issubclass(kind_of, OSError) and "tp_rank_01" in message and "File too large" in message
        ), message
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
