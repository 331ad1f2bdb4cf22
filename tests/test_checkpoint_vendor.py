"""Checkpoints of the vendor's library, which have no metadata: loaded on the same mesh and on
others, or refused with what is missing. `NeuronZero1Optimizer.load_sharded_state_dict`, whose files
have none either.
"""

import os
from contextlib import nullcontext

import pytest
import torch

from tests.standin import Standin, build, mark_as_vendor, refused, state, train, zero
from tests.test_checkpoint import assert_same_runs, resume, straight
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
    masters = ours["sharded_master_weights"]

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
        "shape_info": {n: torch.Size(info["shape"]) for n, info in ours["shape_info"].items()},
        "sharded_master_weights": {n: convert(n, x) for n, x in masters.items()},
    }


def trained(dtype, zero1=True):
    objects = build(Standin, dtype, zero1)
    train(objects, 0, 3)
    return objects


def write_as_vendor(folder: str, dtype, zero1: bool, with_masters: bool) -> None:
    model, optimizer, schedule = trained(dtype, zero1)
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
    torch.save({"position": 12}, f"{folder}/step_3/user_content.pt")
    torch.save(schedule.state_dict(), f"{folder}/step_3/scheduler.pt")
    mark_as_vendor(f"{folder}/step_3")


@pytest.mark.parametrize(
    "dtype, zero1, with_masters",
    [(torch.bfloat16, True, True), (torch.float32, True, False), (torch.float32, False, False)],
)
def test_the_vendors_optimizer_at_every_mesh(ranks, tmp_path, dtype, zero1, with_masters):
    ranks(write_as_vendor, str(tmp_path), dtype, zero1, with_masters, world_size=4, tp=2)
    for world_size, tp in MESHES:
        mesh = dict(world_size=world_size, tp=tp)
        found = ranks(resume, str(tmp_path), None, dtype, zero1, Standin, False, **mesh)
        assert_same_runs(found, ranks(straight, dtype, zero1, Standin, **mesh))


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
    mark_as_vendor(f"{folder}/step_1")


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
        (4, "dp_rank_00_tp_rank_01_pp_rank_00.pt: qkv differs from the previous rank's"),
        (2, "does not say how qkv is sharded: size over ranks: 2 is not divisible by 4"),
    ],
)
def test_shared_heads_in_another_order_are_refused(ranks, tmp_path, tp, words):
    ranks(tiled, str(tmp_path), world_size=4, tp=4)
    refused(ranks, ValueError, [words], load_weights, str(tmp_path), world_size=tp, tp=tp)


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
    place = ranks_module.my_place()
    tp, dp = place.tp, place.dp
    os.makedirs(folder, exist_ok=True)
    value = vendor_state(trained(dtype)[1]) | {"dp_rank": dp, "tp_rank": tp}
    torch.save(value, f"{folder}/optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}")


def go_on_sharded(folder, dtype, num_workers):
    model, optimizer, schedule = build(Standin, dtype, True)
    zero(model)
    optimizer.load_sharded_state_dict(folder, num_workers)  # the weights too, from the masters
    schedule.last_epoch = 2
    schedule.step()
    return train((model, optimizer, schedule), 3, 8)


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
        assert_same_runs(found, ranks(straight, dtype, True, Standin, **mesh))


def test_an_empty_folder(ranks, tmp_path):
    arguments = (go_on_sharded, str(tmp_path / "none"), torch.float32, 8)
    refused(ranks, FileNotFoundError, ["none"], *arguments)
