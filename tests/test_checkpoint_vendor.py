"""Checkpoints of the vendor's library, which have no metadata: loaded on the same mesh and on
others, or refused with what is missing. And `NeuronZero1Optimizer.save_sharded_state_dict`, whose
files have none either.
"""

import os

import pytest
import torch

from tests.standin import Standin, attempt, same, state
from tests.test_checkpoint_tools import masters, zero1, zero_resume, zero_straight
from tutorial_lib.checkpoint import load_checkpoint
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.optimizer.shards import join_shards
from tutorial_lib.parallel_layers import comm, parallel_state

MESHES = [
    (4, 2),
    (2, 1),
    (4, 4),
    (2, 2),
    (1, 1),
]  # world size, tensor-parallel size; the first is the one that saves


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
        gathered = comm.all_gather(shard, 0, groups).chunk(parallel_state.get_data_parallel_size())
        return vendor_shard(join_shards(list(gathered), ours["shape_info"][number]["shape"]))

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


def write_as_vendor(folder: str, dtype, with_masters: bool) -> None:
    model = Standin(dtype)
    optimizer = zero1(model)
    for step in range(3):
        model.train_step(optimizer, step)
    tp, dp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    value = vendor_state(optimizer)
    if not with_masters:
        del value["sharded_master_weights"]
    for part in ("model", "optim"):
        os.makedirs(f"{folder}/step_3/{part}", exist_ok=True)
    torch.save(value, f"{folder}/step_3/optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt")
    if dp == 0:
        torch.save(
            model.state_dict(), f"{folder}/step_3/model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt"
        )
    torch.save({"global_step": 3}, f"{folder}/step_3/user_content.pt")
    for name in ("checkpoint", "done"):
        with open(f"{folder}/step_3/{name}", "w") as file:
            file.write("1")


@pytest.mark.parametrize("dtype, with_masters", [(torch.bfloat16, True), (torch.float32, False)])
def test_the_vendors_zero1_at_every_mesh(ranks, tmp_path, dtype, with_masters):
    ranks(write_as_vendor, str(tmp_path), dtype, with_masters, world_size=4, tp=2)
    for world_size, tp in MESHES:
        found = ranks(zero_resume, str(tmp_path), None, dtype, world_size=world_size, tp=tp)
        expected = ranks(zero_straight, dtype, world_size=world_size, tp=tp)
        for (weights, master), (right, right_master) in zip(found, expected):
            assert same(weights, right) and same(master, right_master), (world_size, tp)


@pytest.mark.parametrize("command", [["merge"], ["reshard", "--tp", "1"]])
def test_tools_say_what_is_missing(ranks, tmp_path, capsys, command):
    ranks(write_as_vendor, f"{tmp_path}/run", torch.float32, True, world_size=4, tp=2)
    name, *options = command
    assert main([name, f"{tmp_path}/run/step_3", f"{tmp_path}/out/t", *options]) == 1
    assert "no metadata.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def tiled(folder):
    """Key and value heads on the ranks 0 1 0 1, as the vendor's library lays them out on trn1."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    weights = state(Standin())
    weights["qkv"][1:] = torch.tensor([float(rank % 2), 2.0 + rank % 2])[:, None]
    os.makedirs(f"{folder}/step_1/model", exist_ok=True)
    torch.save(weights, f"{folder}/step_1/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    for name in ("checkpoint", "done"):
        with open(f"{folder}/step_1/{name}", "w") as file:
            file.write("1")


def load_weights(folder):
    load_checkpoint(folder, model=Standin())


@pytest.mark.parametrize(
    "tp, words",
    [
        (4, "dp_rank_00_tp_rank_01_pp_rank_00.pt: qkv is not what the rank before has"),
        (2, "no metadata.json to say how qkv is cut: size over parts: 2 is not divisible by 4"),
    ],
)
def test_shared_heads_in_another_order_are_refused(ranks, tmp_path, tp, words):
    ranks(tiled, str(tmp_path), world_size=4, tp=4)
    for kind, message in ranks(attempt, load_weights, str(tmp_path), world_size=tp, tp=tp):
        assert kind is ValueError and words in message, message


# --- save_sharded_state_dict ----------------------------------------------------------------------


def trained(dtype):
    model = Standin(dtype)
    optimizer = zero1(model)
    for step in range(3):
        model.train_step(optimizer, step)
    return model, optimizer


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
    model = Standin(dtype)
    optimizer = zero1(model)
    optimizer.load_sharded_state_dict(
        folder, num_workers
    )  # writes the weights too, from the masters
    for step in range(3, 8):
        model.train_step(optimizer, step)
    return state(model), masters(optimizer)


@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("write", [save_sharded, save_as_vendor])
def test_sharded_state_dict_at_every_mesh(ranks, tmp_path, write, num_workers):
    dtype = torch.bfloat16
    ranks(save_sharded, str(tmp_path), dtype, 8, world_size=4, tp=4)  # of another mesh; goes
    if write is save_as_vendor:
        for file in tmp_path.iterdir():
            file.unlink()
    ranks(write, str(tmp_path), dtype, num_workers, world_size=4, tp=2)
    names = [f"optim.dp_rank_0{dp}.tp_rank_0{tp}" for dp in (0, 1) for tp in (0, 1)]
    assert sorted(os.listdir(tmp_path)) == names
    for world_size, tp in MESHES:
        found = ranks(
            go_on_sharded, str(tmp_path), dtype, num_workers, world_size=world_size, tp=tp
        )
        expected = ranks(zero_straight, dtype, world_size=world_size, tp=tp)
        for (weights, master), (right, right_master) in zip(found, expected):
            assert same(weights, right) and same(master, right_master), (world_size, tp)


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
