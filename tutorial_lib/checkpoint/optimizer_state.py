"""The state of an optimizer from a checkpoint into a run, whatever the mesh it was saved on.

Plain optimizers keep `state[number][field]`, each field as large as the rank's shard of the
parameter, or a scalar. ZeRO-1 keeps shards of these in `base_state` and `sharded_master_weights`.
"""

import torch

from ..parallel_layers import ranks
from ..storage.objects import to_host
from .layout import Layout
from .shards import MASTERS, Shards


def read_optimizer(
    source: Shards, targets: dict[str, Layout], optimizer, names: list[str] | None
) -> dict:
    """This rank's state dict of an optimizer, resharded if the mesh or the kind of optimizer is
    another.

    Args:
        targets: the layout of each parameter here, by its name.
        names: the names of the optimizer's parameters, in the order of its groups.

    Raises:
        FileNotFoundError: the checkpoint does not have optimizer state. A fresh optimizer is never
            taken instead.
        ValueError: it belongs to other parameters, or cannot be resharded; with both sizes.
    """
    folder, saved = source.path / "optim", source.parameters
    if not source.has_optimizer:
        raise FileNotFoundError(
            f"{folder} is missing: the checkpoint was saved without an optimizer"
        )
    if None not in (names, saved) and names != saved:
        other = next((a, b) for a, b in zip([*names, None], [*saved, None]) if a != b)
        raise ValueError(
            f"{folder} is of another optimizer: it has parameter {other[1]} where this one has "
            f"{other[0]}"
        )
    place, tp, into_dict = ranks.my_place(), ranks.mesh()["tp"], isinstance(optimizer, dict)
    live = optimizer if into_dict else optimizer.state_dict()
    zero1 = source.zero1 if into_dict else "base_state" in live
    degree, dp = (place.replicas, place.dp) if zero1 else (1, 0)
    if (source.tp, source.zero1, source.degree) == (tp, zero1, degree):
        state = source.shard("optim", place.tp, dp)
        if into_dict or live.keys() - {MASTERS} <= state.keys():  # else it is the vendor's
            return to_host(state, copy=True)
    if into_dict or names is None or not targets:
        needed = "give the optimizer, not a dict" if into_dict else "give the model too"
        raise ValueError(
            f"{source.path}: the optimizer was saved at tensor-parallel size {source.tp} with "
            f"{source.degree} shards, this run has {tp} and {degree}: to have it resharded, "
            f"{needed}"
        )
    source.parameters = saved or names
    source.use_layouts(targets)
    state, masters = {}, {}
    for number, field, values in source.state_at(targets, place.tp, degree, zero1):
        value = to_host(values[dp])
        if field != MASTERS:
            state.setdefault(number, {})[field] = value
        elif zero1:
            masters[number] = value
        elif value.dtype != targets[names[number]].dtype:
            raise ValueError(
                f"{source.path} holds {value.dtype} masters of {names[number]} and others, "
                "which need ZeRO-1"
            )
    groups = source.state_head()["param_groups"]
    result = {**live, "param_groups": groups, "base_state" if zero1 else "state": state}
    result.pop(MASTERS, None)
    return result | ({MASTERS: masters} if masters else {})


def load_optimizer(optimizer, state: dict) -> None:
    """Loads what `read_optimizer` gave, on every rank at the same time: ZeRO-1 gathers weights from
    its masters.
    """
    if isinstance(optimizer, dict):
        optimizer.update(state)
        return
    optimizer.load_state_dict(state)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without the trainer's wrapper
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        _keep_dtypes(optimizer, state["state"])


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Gives each field the dtype it was saved in; `load_state_dict` casts to that of the
    parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, fields in state.items():
        for field, value in fields.items():
            held = optimizer.state[parameters[number]][field]
            if isinstance(value, torch.Tensor) and held.dtype != value.dtype:
                optimizer.state[parameters[number]][field] = value.to(held.device)
