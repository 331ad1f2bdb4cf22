"""The state of an optimizer from a checkpoint into a run, whatever the mesh it was saved on.

Plain optimizers keep `state[number][field]`, each field as large as the rank's shard of the
parameter, or a scalar. ZeRO-1 keeps shards of these in `base_state` and `sharded_master_weights`.
"""

import torch

from ..parallel_layers import ranks
from ..parallel_layers.flat_shards import take_shard
from .layout import Layout
from .shards import MASTERS, Shards


def read_optimizer(
    source: Shards, targets: dict[str, Layout] | None, optimizer, names: list[str] | None
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
    if names is not None and saved is not None and set(names) != set(saved):
        other = ", ".join(sorted(set(names) ^ set(saved))[:3])
        raise ValueError(f"{folder} is of another optimizer: {other} on one side only")
    place, tp = ranks.my_place(), ranks.mesh()["tp"]
    live = optimizer if isinstance(optimizer, dict) else optimizer.state_dict()
    into_dict = isinstance(optimizer, dict)
    zero1 = source.zero1 if into_dict else "base_state" in live
    degree = place.replicas if zero1 else 1
    fits = source.tp == tp and zero1 == source.zero1 and (not zero1 or source.zero_degree == degree)
    if fits and (names == saved or None in (names, saved)):
        state = source.read("optim", place.tp, place.dp if zero1 else 0, place.pp)
        if into_dict or live.keys() - {MASTERS} <= state.keys():
            return state
    if into_dict or names is None or targets is None:
        needed = "give the optimizer, not a dict" if into_dict else "give the model too"
        raise ValueError(
            f"{source.path}: the optimizer was saved at tensor-parallel size {source.tp} with "
            f"{source.zero_degree} shards, this run has {tp} and {degree}: to have it resharded, "
            f"{needed}"
        )
    source.parameters = saved or names
    source.layouts = source.layouts or layouts_at(source, targets)
    return _resharded(source, targets, live, names, place, zero1)


def layouts_at(source: Shards, targets: dict[str, Layout]) -> dict[str, Layout]:
    """How a checkpoint that does not say so shards its tensors: as this model does, at the saved
    degree.

    Raises:
        ValueError: they cannot be sharded so; with the tensor and the degree.
    """
    found = {}
    for name, target in targets.items():
        try:
            found[name] = target.at(source.tp, pad=True)
        except ValueError as error:
            raise ValueError(
                f"{source.path} was saved with tensor-parallel size {source.tp} and does not say "
                f"how {name} is sharded: {error}"
            ) from error
    return found


def _resharded(
    source: Shards,
    targets: dict[str, Layout],
    live: dict,
    names: list[str],
    place: ranks.Place,
    zero1: bool,
) -> dict:
    state, masters = {}, {}
    for number, name in enumerate(names):
        for field in source.fields(name):
            value = source.state(name, field)
            if isinstance(value, list):
                value = source.to(name, value, targets[name], place.tp)
                size, rank = (place.replicas, place.dp) if zero1 else (1, 0)
                flat = take_shard(value, rank, size, value.dtype)
                value = flat if zero1 else flat.view(value.shape)
            (masters if field == MASTERS else state.setdefault(number, {}))[
                number if field == MASTERS else field
            ] = value
    if masters and not zero1:
        for number, master in masters.items():
            if master.dtype != targets[names[number]].dtype:
                raise ValueError(
                    f"{source.path} holds {master.dtype} masters of {names[number]} and others, "
                    "which need ZeRO-1"
                )
    result = {**live, "param_groups": _groups(source, live["param_groups"], names)}
    result["base_state" if zero1 else "state"] = state
    result.pop(MASTERS, None)
    return result | ({MASTERS: masters} if masters and zero1 else {})


def _groups(source: Shards, live: list[dict], names: list[str]) -> list[dict]:
    """The saved groups' settings with this optimizer's numbers of the same parameters."""
    saved = {
        frozenset(source.parameters[n] for n in group["params"]): group
        for group in source.state_head()["param_groups"]
    }
    groups = []
    for group in live:
        members = frozenset(names[n] for n in group["params"])
        if members not in saved:
            raise ValueError(
                f"{source.path}: the optimizer's group with {min(members, default='nothing')} has "
                "other parameters than when it was saved"
            )
        groups.append({**saved[members], "params": group["params"]})
    return groups


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
