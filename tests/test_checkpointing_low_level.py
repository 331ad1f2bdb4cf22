"""`parallel_layers.checkpointing`: files, options and errors of `save` and `load`."""

import os
import pickle

import pytest
import torch

from tests.standin import Standin, attempt, full_weights, same, state
from tutorial_lib.parallel_layers import checkpointing, parallel_state
from tutorial_lib.storage import objects, xser


def round_trip(folder, xser, serially):
    model = Standin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train_step(optimizer, 1)
    before = state(model)
    checkpointing.save(
        {"model": model.state_dict(), "step": 1, "optimizer": optimizer.state_dict()},
        folder,
        serially,
        xser,
    )
    other = Standin()
    rest = checkpointing.load(
        folder, other, load_xser=xser
    )  # positional, as the tutorials' scripts do
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    again.load_state_dict(rest["optimizer"])
    assert same(state(other), before) and other.head is other.embed
    assert rest.keys() == {"step", "optimizer"} and rest["step"] == 1
    assert model.train_step(optimizer, 2) == other.train_step(again, 2) and same(
        state(model), state(other)
    )


@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("serially", [False, True])
def test_round_trip_and_files(ranks, tmp_path, xser, serially):
    ranks(round_trip, str(tmp_path), xser, serially, world_size=4, tp=2)
    names = sorted(os.listdir(tmp_path))
    if xser:
        assert names == [
            f"tp_rank_0{r}_pp_rank_00{s}" for r in (0, 1) for s in ("", ".info.pt", ".tensors")
        ]
        assert "tensor_0.pt" in os.listdir(tmp_path / names[2])
    else:
        assert names == ["tp_rank_00_pp_rank_00", "tp_rank_01_pp_rank_00"]
        assert os.listdir(tmp_path / names[0]) == ["checkpoint.pt"]


def test_torch_xla_reads_xser_and_we_read_its(ranks, tmp_path):
    theirs_ = pytest.importorskip("torch_xla.utils.serialization")
    ranks(round_trip, str(tmp_path), True, True, world_size=2, tp=2)
    with torch.serialization.safe_globals([theirs_.TensorReference]):
        references = torch.load(tmp_path / "tp_rank_00_pp_rank_00", weights_only=True)
    assert type(references["model"]["embed"]) is theirs_.TensorReference
    assert references["model"]["embed"].tid == references["model"]["head"].tid, (
        "a tied tensor is stored once"
    )
    theirs = tmp_path / "theirs"
    os.mkdir(f"{theirs}.tensors")
    torch.save({"w": theirs_.TensorReference(0), "n": 3}, theirs)
    torch.save(torch.ones(2), f"{theirs}.tensors/tensor_0.pt")
    assert xser.load(theirs)["w"].tolist() == [1, 1]


def options(folder):
    model = Standin()
    checkpointing.save({"model": model.state_dict()}, f"{folder}/half", down_cast_bf16=True)
    half = checkpointing.load(f"{folder}/half")["model"]
    assert half["norm"].dtype == torch.bfloat16 and half["positions"].dtype == torch.int64
    dp = parallel_state.get_data_parallel_rank()
    checkpointing.save({"dp": dp}, f"{folder}/each", master_dp_only=False)
    assert checkpointing.load(f"{folder}/each", master_dp_only=False) == {"dp": dp}
    checkpointing.save(model.state_dict(), f"{folder}/bare")
    assert (
        checkpointing.load(f"{folder}/bare", model_or_optimizer=Standin(), model_key=None) is None
    )
    if parallel_state.is_global_rank_zero():
        full = full_weights()
        torch.save(
            {"model": full | {"head": full["embed"], "positions": torch.arange(4)}},
            f"{folder}/full.pt",
        )
    parallel_state.gather_python_object(None, parallel_state.get_world_group())
    with torch.no_grad():
        fresh = state(model)
        for parameter in model.parameters():
            parameter.zero_()
    checkpointing.load(f"{folder}/full.pt", model, sharded=False)
    assert same(state(model), fresh)
    return fresh["gate_up"][:, 0], fresh["embed"].shape


def test_options(ranks, tmp_path):
    (gate_up, shape), *_ = ranks(options, str(tmp_path), world_size=4, tp=2)
    assert (gate_up * 16 - 2 * 16).int().tolist() == [0, 1, 2, 3, 8, 9, 10, 11], (
        "gate and up are cut each for itself"
    )
    assert {"tp_rank_01_pp_rank_00_dp_rank_01"} < set(os.listdir(tmp_path / "each"))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/should-not-exist",)


def spoil(folder, kind):
    checkpointing.save({"model": Standin().state_dict()}, folder)
    if parallel_state.get_tensor_model_parallel_rank() == 1:
        path = f"{folder}/tp_rank_01_pp_rank_00/checkpoint.pt"
        if kind == "missing":
            os.remove(path)
        elif kind == "truncated":
            os.truncate(path, os.path.getsize(path) - 700)
        elif kind == "bomb":
            torch.save({"model": Bomb()}, path)
        elif kind == "raw bomb":
            with open(path, "wb") as file:
                pickle.dump(Bomb(), file)
        elif kind == "foreign":
            torch.save({"model": {"other": torch.ones(1)}}, path)
    checkpointing.load(folder, Standin())


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("missing", FileNotFoundError, "is missing"),
        ("truncated", ValueError, "is truncated"),
        ("bomb", ValueError, "refused"),
        ("raw bomb", ValueError, "refused"),
        ("foreign", ValueError, "another model"),
    ],
)
def test_a_bad_file_is_named_on_all_ranks(ranks, tmp_path, kind, error, words):
    found = ranks(attempt, spoil, str(tmp_path), kind, world_size=2, tp=2, timeout=30)
    for kind_of, message in found:
        assert kind_of is error and words in message and "tp_rank_01_pp_rank_00" in message, message
    assert not os.path.exists("/tmp/should-not-exist")


def save_what_does_not_belong():
    checkpointing.save({"model": {}, "args": {"path": os.DirEntry}}, "/tmp/never")


def write_nowhere():
    checkpointing.save({"model": {}}, "/sys/checkpoint")


def test_bad_saves(ranks):
    for kind_of, message in ranks(attempt, save_what_does_not_belong, world_size=2, tp=2):
        assert kind_of is ValueError and "checkpoint['args']['path']" in message
    for kind_of, message in ranks(attempt, write_nowhere, world_size=2, tp=2):
        assert issubclass(kind_of, OSError) and "/sys/checkpoint" in message


def views_and_ties():
    base = torch.arange(1000.0)
    view = base[10:12]
    host = objects.to_host({"view": view, "tied": view, "turned": base.reshape(10, 100).t()[:2]})
    assert host["view"] is host["tied"] and host["view"].untyped_storage().nbytes() == 8
    assert host["turned"].is_contiguous() and host["turned"].untyped_storage().nbytes() == 80


def test_a_view_does_not_drag_its_storage():
    views_and_ties()


def bad_arguments(folder):
    checkpointing.save({"model": Standin().state_dict()}, folder)
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    model = Standin()
    return [
        attempt(
            checkpointing.save, {}, None if first else folder
        ),  # on one rank: the other does not wait
        attempt(checkpointing.load, 5 if first else folder, model),
        attempt(checkpointing.load, folder, 5),
        attempt(checkpointing.load, folder, model, model_key=["model"] if first else "model"),
        attempt(checkpointing.load, folder, 5, sharded=False),
    ]


def test_arguments_of_a_wrong_type(ranks, tmp_path):
    words = ["None", "5", "no load_state_dict", "['model']", "needs a module"]
    for found in ranks(bad_arguments, str(tmp_path), world_size=2, tp=2, timeout=30):
        for (kind, message), word in zip(found, words, strict=True):
            assert kind is ValueError and word in message, message
