"""`parallel_layers.checkpointing`: files, options and errors of `save` and `load`."""

import os

import pytest
import torch

from tests.standin import Standin, attempt, same, state
from tutorial_lib.parallel_layers import checkpointing, parallel_state
from tutorial_lib.storage import objects, xser

FIRST = "tp_rank_00_pp_rank_00"


def round_trip(folder):
    model = Standin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train_step(optimizer, 1)
    before = state(model)
    checkpointing.save(
        {"model": model.state_dict(), "step": 1, "optimizer": optimizer.state_dict()}, folder
    )
    other = Standin()
    rest = checkpointing.load(folder, other)
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    again.load_state_dict(rest["optimizer"])
    assert same(state(other), before) and other.head is other.embed
    assert rest.keys() == {"step", "optimizer"} and rest["step"] == 1
    assert model.train_step(optimizer, 2) == other.train_step(again, 2)
    assert same(state(model), state(other))
    checkpointing.save({"model": model.state_dict()}, f"{folder}/half", down_cast_bf16=True)
    half = checkpointing.load(f"{folder}/half")["model"]
    assert half["norm"].dtype == torch.bfloat16 and half["positions"].dtype == torch.int64


def test_round_trip_and_files(ranks, tmp_path):
    ranks(round_trip, str(tmp_path), world_size=4, tp=2)
    assert sorted(os.listdir(tmp_path)) == ["half", FIRST, "tp_rank_01_pp_rank_00"]
    assert os.listdir(tmp_path / FIRST) == ["checkpoint.pt"]


def read_xser(folder, before):
    model = Standin()
    assert checkpointing.load(folder, model) == {"n": 3}
    return same(state(model), before)


def test_torch_xla_reads_xser_and_we_read_its(ranks, tmp_path):
    theirs_ = pytest.importorskip("torch_xla.utils.serialization")
    model = ranks(Standin, world_size=1)[0]
    xser.save({"model": model.state_dict(), "n": 3}, tmp_path / FIRST, True)
    with torch.serialization.safe_globals([theirs_.TensorReference]):
        references = torch.load(tmp_path / FIRST, weights_only=True)
    embed, head = (references["model"][name] for name in ("embed", "head"))
    assert type(embed) is theirs_.TensorReference and embed.tid == head.tid, (
        "a tied tensor is stored once"
    )
    assert ranks(read_xser, str(tmp_path), state(model), world_size=1) == [True]
    theirs = tmp_path / "theirs"
    os.mkdir(f"{theirs}.tensors")
    torch.save({"w": theirs_.TensorReference(0), "n": 3}, theirs)
    torch.save(torch.ones(2), f"{theirs}.tensors/tensor_0.pt")
    assert xser.load(theirs)["w"].tolist() == [1, 1]


def bad_arguments(folder):
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return [
        # On one rank: the other does not wait.
        attempt(checkpointing.save, {}, None if first else folder),
        attempt(checkpointing.save, {"model": {}, "args": {"path": os.DirEntry}}, folder),
        attempt(checkpointing.load, 5 if first else folder),
        attempt(checkpointing.load, folder, 5),
        attempt(checkpointing.save, {"model": {}}, "/sys/checkpoint"),
    ]


def test_arguments_of_a_wrong_type(ranks, tmp_path):
    words = ["None", "checkpoint['args']['path']", "5", "5", "/sys/checkpoint"]
    for found in ranks(bad_arguments, str(tmp_path), world_size=2, tp=2, timeout=30):
        assert [issubclass(kind, ValueError) for kind, _ in found] == [True] * 4 + [False]
        assert issubclass(found[-1][0], OSError)
        assert all(word in message for (_, message), word in zip(found, words, strict=True))


def test_a_view_does_not_drag_its_storage():
    base = torch.arange(1000.0)
    view = base[10:12]
    host = objects.to_host({"view": view, "tied": view, "turned": base.reshape(10, 100).t()[:2]})
    assert host["view"] is host["tied"] and host["view"].untyped_storage().nbytes() == 8
    assert host["turned"].is_contiguous() and host["turned"].untyped_storage().nbytes() == 80
