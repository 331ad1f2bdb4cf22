"""What the state dict of a ZeRO-1 optimizer holds: tensors and plain data only.

- `param_groups`, `state`: as torch has them; `state` is empty.
- `base_state`: the inner optimizer's state of this rank's shards, by the parameter's place.
- `sharded_master_weights`: likewise the masters, unless the optimizer was told to leave them out.
- `shape_info`: by place, what it takes to reshard the state for another mesh: the parameter's name
  (None without named parameters), its shape on this tensor-parallel rank, the padding at the end of
  the last shard, its dtype, and how it is sharded over tensor parallelism.
- `sharding`: this rank's place in the group and the group's size.

`flat_shards` has the layout of a shard.
"""

from typing import TYPE_CHECKING

import torch

from tutorial_lib.parallel_layers.flat_shards import shard_length, take_shard
from tutorial_lib.parallel_layers.marks import TENSOR_PARALLEL_ATTRIBUTES

if TYPE_CHECKING:
    from .zero1 import NeuronZero1Optimizer


def complete_state(optimizer: "NeuronZero1Optimizer", state: dict) -> dict:
    """`state`, from torch's `state_dict`, with all that is listed above."""
    pairs, groups, size = optimizer.pairs(), optimizer.param_groups, optimizer.sharding["size"]
    names = [name for g in groups for name in g.get("param_names", [None] * len(g["params"]))]
    infos = [_shape_info(name, x, size) for name, (x, _) in zip(names, pairs, strict=True)]
    state = {
        **state,
        "state": {},
        "base_state": state["state"],
        "shape_info": dict(enumerate(infos)),
        "sharding": optimizer.sharding,
    }
    if optimizer.save_master_weights:
        masters = {place: shard.detach() for place, (_, shard) in enumerate(pairs)}
        state["sharded_master_weights"] = masters
    return state


def load_shards(optimizer: "NeuronZero1Optimizer", state_dict: dict) -> None:
    """Loads the inner optimizer's state and the masters, or takes those from the parameters."""
    base = optimizer.base_optimizer
    groups = base.state_dict()["param_groups"]  # as they were handed over
    base.load_state_dict({"state": state_dict["base_state"], "param_groups": groups})
    masters, here = state_dict.get("sharded_master_weights"), optimizer.sharding
    with torch.no_grad():
        for place, (param, shard) in enumerate(optimizer.pairs()):
            if masters is None:
                shard.copy_(take_shard(param, here["rank"], here["size"], shard.dtype))
            else:
                shard.copy_(masters[place])


def _shape_info(name: str | None, parameter: torch.Tensor, size: int) -> dict:
    """What it takes to reshard a parameter's state for another mesh, as plain data."""
    return {
        "name": name,
        "shape": list(parameter.shape),
        "padding": shard_length(parameter.numel(), size) * size - parameter.numel(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        **{key: getattr(parameter, key, x) for key, x in TENSOR_PARALLEL_ATTRIBUTES.items()},
    }


def check_fits(state_dict: dict, optimizer: "NeuronZero1Optimizer") -> None:
    """Raises ValueError unless a state is of this optimizer's parameters, and of its shards."""
    if "sharding" not in state_dict:
        raise ValueError(f"not the state of a ZeRO-1 optimizer: its keys are {[*state_dict]}")
    saved, here = state_dict["sharding"], optimizer.sharding
    if saved != here:
        raise ValueError(
            f"the optimizer state is shard {saved['rank']} of {saved['size']}, and this rank needs "
            f"shard {here['rank']} of {here['size']}: convert the checkpoint to this data-parallel "
            "size first"
        )
    infos, pairs = state_dict["shape_info"], optimizer.pairs()
    if len(infos) != len(pairs):
        raise ValueError(
            f"the optimizer state is of {len(infos)} parameters, this optimizer has {len(pairs)}"
        )
    for (place, info), (parameter, _) in zip(infos.items(), pairs):
        if info["shape"] != list(parameter.shape):
            raise ValueError(
                f"parameter {place} has shape {list(parameter.shape)}, "
                f"the optimizer state is for {info['shape']}"
            )
