"""Checkpoints of the vendor's library, which have no metadata: loaded on the same mesh and on
others, or refused with what is missing. `NeuronZero1Optimizer.load_sharded_state_dict`, whose files
have none either.
"""

import os
from contextlib import nullcontext

import pytest
import torch

from tests.standin import Standin, attempt, run, state, zero
from tests.test_checkpoint_tools import (
    assert_same_runs,
    optimizer_of,
    zero_resume,
    zero_straight,
)
from tutorial_lib.checkpoint import load_checkpoint
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers import ranks as ranks_module

# World size and tensor-parallel size; the first is the one that saves.
MESHES = [(4, 2), (2, 1), (4, 4), (1, 1)]


def vendor_shard(full: torch.Tensor) -> torch.Tensor:
    """This rank's shard as torch-xla's ZeroRedundancyOptimizer cuts it: along dim 0, with rows of
    zeros at the end.
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    rows = torch.zeros(-full.size(0) % size, *full.shape[1:], dtype=full.dtype)
    return torch.cat([full, rows]).chunk(size)[rank].clone()


def vendor_state(optimizer) -> dict:
    """The state dict that torch-xla's optimizer would have."""
    ours, groups = optimizer.state_dict(), parallel_state.get_data_parallel_group()

    def convert(number: int, shard: torch.Tensor) -> torch.Tensor:
        if shard.dim() == 0:
            return shard
        shape = torch.Size(ours["shape_info"][number]["shape"])
        return vendor_shard(comm.all_gather(shard, 0, groups)[: shape.numel()].view(shape))

    return {
        "state": {},
        "param_groups": ours["param_groups"],
        "base_state": {
            number: {field: convert(number, value) for field, value in fields.items()}
            for number, fields in ours["base_state"].items()
        },
        "shape_info": {
            number: torch.Size(info["shape"]) for number, info in ours["shape_info"].items()
        },
        "sharded_master_weights": {
            number: convert(number, shard)
            for number, shard in ours["sharded_master_weights"].items()
        },
    }


def trained(dtype, zero1=True):
    model = Standin(dtype)
    optimizer = optimizer_of(model, zero1)
    run(model, optimizer, 0, 3)
    return model, optimizer


def write_as_vendor(folder: str, dtype, zero1: bool, with_masters: bool) -> None:
    model, optimizer = trained(dtype, zero1)
    place = ranks_module.my_place()
    value = vendor_state(optimizer) if zero1 else optimizer.state_dict()
    if not with_masters:
        value.pop("sharded_master_weights", None)
    for part, held, dp in (
        ("model", model.state_dict(keep_vars=True), 0),
        ("optim", value, place.dp * zero1),
    ):
        os.makedirs(f"{folder}/step_3/{part}", exist_ok=True)
        if dp == place.dp:
            name = f"dp_rank_{dp:02d}_tp_rank_{place.tp:02d}_pp_rank_00.pt"
            torch.save(held, f"{folder}/step_3/{part}/{name}")
    torch.save({"global_step": 3}, f"{folder}/step_3/user_content.pt")
    for name in ("checkpoint", "done"):
        with open(f"{folder}/step_3/{name}", "w") as file:
            file.write("1")


@pytest.mark.parametrize(
    "dtype, zero1, with_masters",
    [(torch.bfloat16, True, True), (torch.float32, True, False), (torch.float32, False, False)],
)
def test_the_vendors_optimizer_at_every_mesh(ranks, tmp_path, dtype, zero1, with_masters):
    ranks(write_as_vendor, str(tmp_path), dtype, zero1, with_masters, world_size=4, tp=2)
    for world_size, tp in MESHES:
        mesh = dict(world_size=world_size, tp=tp)
        found = ranks(zero_resume, str(tmp_path), None, Standin, dtype, zero1, **mesh)
        assert_same_runs(found, ranks(zero_straight, Standin, dtype, zero1, **mesh))


@pytest.mark.parametrize("command", [["merge"], ["reshard", "--tp", "1"]])
def test_tools_say_what_is_missing(ranks, tmp_path, capsys, command):
    ranks(write_as_vendor, f"{tmp_path}/run", torch.float32, True, True, world_size=4, tp=2)
    name, *options = command
    assert main([name, f"{tmp_path}/run/step_3", f"{tmp_path}/out/t", *options]) == 1
    assert "does not have metadata.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def write_weights(folder, weights):
    rank = parallel_state.get_tensor_model_parallel_rank()
    os.makedirs(f"{folder}/step_1/model", exist_ok=True)
    torch.save(weights, f"{folder}/step_1/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    for name in ("checkpoint", "done"):
        with open(f"{folder}/step_1/{name}", "w") as file:
            file.write("1")


def tiled(folder):
    """Key and value heads on the ranks 0 1 0 1, as the vendor's library lays them out on trn1."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    weights = state(Standin())
    weights["qkv"][1:] = torch.tensor([float(rank % 2), 2.0 + rank % 2])[:, None]
    write_weights(folder, weights)


def drifted(folder):
    """As a run leaves them whose ranks drift apart."""
    weights = state(Standin())
    weights["norm"] += parallel_state.get_tensor_model_parallel_rank()
    write_weights(folder, weights)


def load_weights(folder):
    load_checkpoint(folder, model=Standin())


@pytest.mark.parametrize(
    "tp, words",
    [
        (4, "dp_rank_00_tp_rank_01_pp_rank_00.pt: qkv is not what the rank before has"),
        (2, "does not say how qkv is sharded: size over ranks: 2 is not divisible by 4"),
    ],
)
def test_shared_heads_in_another_order_are_refused(ranks, tmp_path, tp, words):
    ranks(tiled, str(tmp_path), world_size=4, tp=4)
    for kind, message in ranks(attempt, load_weights, str(tmp_path), world_size=tp, tp=tp):
        assert kind is ValueError and words in message, message


def load_drifted(folder):
    first = parallel_state.is_global_rank_zero()
    with pytest.warns(match="norm are replicated and differ") if first else nullcontext():
        load_weights(folder)


@pytest.mark.parametrize("tp", [2, 1])
def test_replicated_tensors_that_differ_are_named(ranks, tmp_path, tp):
    ranks(drifted, str(tmp_path), world_size=2, tp=2)
    ranks(load_drifted, str(tmp_path), world_size=tp, tp=tp)


# --- save_sharded_state_dict ----------------------------------------------------------------------


def save_sharded(folder, dtype, num_workers):
    trained(dtype)[1].save_sharded_state_dict(folder, num_workers)


def save_as_vendor(folder, dtype, _):
    tp, dp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    os.makedirs(folder, exist_ok=True)
    value = vendor_state(trained(dtype)[1]) | {"dp_rank": dp, "tp_rank": tp}
    torch.save(value, f"{folder}/optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}")


def go_on_sharded(folder, dtype, num_workers):
    model = zero(Standin(dtype))
    optimizer = optimizer_of(model)
    optimizer.load_sharded_state_dict(folder, num_workers)  # the weights too, from the masters
    return run(model, optimizer, 3, 8)


@pytest.mark.parametrize(("write", "num_workers"), [(save_sharded, 1), (save_as_vendor, 8)])
def test_sharded_state_dict_at_every_mesh(ranks, tmp_path, write, num_workers):
    dtype = torch.bfloat16
    if write is save_sharded:
        ranks(write, str(tmp_path), dtype, 8, world_size=4, tp=4)  # of another mesh; goes
    ranks(write, str(tmp_path), dtype, num_workers, world_size=4, tp=2)
    names = [f"optim.dp_rank_0{dp}.tp_rank_0{tp}" for dp in (0, 1) for tp in (0, 1)]
    assert sorted(os.listdir(tmp_path)) == names
    for world_size, tp in MESHES:
        mesh = dict(world_size=world_size, tp=tp)
        found = ranks(go_on_sharded, str(tmp_path), dtype, num_workers, **mesh)
        assert_same_runs(found, ranks(zero_straight, Standin, dtype, **mesh))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/should-not-exist",)


SPOILS = {
    "missing": (os.remove, FileNotFoundError, "is missing"),
    "truncated": (lambda path: os.truncate(path, 100), ValueError, "truncated"),
    "bomb": (lambda path: torch.save({"base_state": Bomb()}, path), ValueError, "refused"),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoiled_shard_is_named_on_all_ranks(ranks, tmp_path, spoil):
    ranks(save_sharded, str(tmp_path), torch.float32, 8, world_size=4, tp=2)
    action, error, words = SPOILS[spoil]
    action(tmp_path / "optim.dp_rank_01.tp_rank_01")
    arguments = (go_on_sharded, str(tmp_path), torch.float32, 8)
    for kind, message in ranks(attempt, *arguments, world_size=4, tp=2, timeout=30):
        assert kind is error and words in message and "optim.dp_rank_01.tp_rank_01" in message
    assert not os.path.exists("/tmp/should-not-exist")


def test_an_empty_folder(ranks, tmp_path):
    arguments = (go_on_sharded, str(tmp_path / "none"), torch.float32, 8)
    for kind, message in ranks(attempt, *arguments, world_size=2, tp=2):
        assert kind is FileNotFoundError and "none" in message
