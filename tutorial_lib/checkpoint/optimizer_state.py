"""The state of an optimizer by parameter and field, whatever the mesh it was saved on, and back
into an optimizer.

Plain optimizers keep `state[number][field]`, each field as large as the rank's part of the
parameter, or a scalar. ZeRO-1 keeps in `base_state` (and `sharded_master_weights`) one of equal
chunks: here of the flattened part, in the vendor's library along dim 0. Put one behind the other
both are the part, row by row, and some padding.
"""

from functools import cached_property

import torch

from ..optimizer.shards import take_shard
from . import ranks
from .layout import Layout
from .lazy import LazyFile
from .reader import Reader
from .tensors import map_tensors

MASTER = "sharded_master_weights"


class SavedOptimizer:
    """The optimizer state of a checkpoint, by the names of the parameters.

    Raises:
        ValueError: the checkpoint does not say which parameter is which.
    """

    def __init__(
        self,
        source: Reader,
        names: list[str] | None = None,
        layouts: dict[str, Layout] | None = None,
    ):
        saved = (source.metadata or {}).get("optimizer") or {}
        self.names, self._layouts = saved.get("parameters") or names, layouts or source.layouts
        if self.names is None or self._layouts is None:
            raise ValueError(
                f"{source.path}: the optimizer was saved at tensor-parallel size {source.tp} and "
                f"{source.zero_degree} shards "
                "without the names of its parameters (save model and optimizer together): it can "
                "be loaded there only"
            )
        self._source, self.zero1 = source, source.zero1
        self._number = {name: number for number, name in enumerate(self.names)}
        self._first = source.lazy(source.optimizer_file(0, 0)).value

    @cached_property
    def head(self) -> dict:
        """All but what is kept for each parameter, such as the groups and their settings; read."""
        file = self._source.lazy(self._source.optimizer_file(0, 0))
        apart = ("state", "base_state", MASTER)
        return map_tensors({k: v for k, v in self._first.items() if k not in apart}, file.read)

    def _state(self, value: dict) -> dict:
        return value["base_state" if self.zero1 else "state"]

    def fields(self, name: str) -> list[str]:
        """What is kept for a parameter: `exp_avg`, …, and the master weight."""
        number = self._number[name]
        fields = list(self._state(self._first).get(number, {}))
        return fields + ([MASTER] if number in self._first.get(MASTER, {}) else [])

    def entry(self, name: str, field: str, file: LazyFile | None = None):
        """The field on one rank, by default the first; a tensor without its data."""
        value, number = self._first if file is None else file.value, self._number[name]
        return value[MASTER][number] if field == MASTER else self._state(value)[number][field]

    def is_cut(self, name: str, field: str) -> bool:
        """True if each rank has a part of the field; False for a step count and the like."""
        entry = self.entry(name, field)
        if not isinstance(entry, torch.Tensor) or entry.dim():
            return isinstance(entry, torch.Tensor)
        scalar = not self._layouts[name].shape  # all of whose state may be scalars
        return scalar and not self.zero1 and field != "step"

    def full(self, name: str, field: str):
        """The field for the full parameter; a scalar as it is."""
        layout, result = self._layouts[name], None
        for rank in layout.sources():
            part = self._part(name, field, rank, layout)
            if layout.partition is None or not self.is_cut(name, field):
                return part
            if result is None:
                result = torch.empty(layout.shape, dtype=part.dtype, device="cpu")
            layout.fill(result, part, rank)
        return result

    def _part(self, name: str, field: str, rank: int, layout: Layout):
        """The field for one tensor-parallel rank's part, its ZeRO-1 chunks put together."""
        places = range(self._source.zero_degree if self.zero1 else 1)
        files = [self._source.lazy(self._source.optimizer_file(place, rank)) for place in places]
        entries = [self.entry(name, field, file) for file in files]
        if not self.is_cut(name, field):
            whole = entries[0]
            return files[0].read(whole) if isinstance(whole, torch.Tensor) else whole
        shape = torch.Size(layout.local_shape())
        row = shape[1:].numel()  # the vendor pads by rows
        held = sum(entry.numel() for entry in entries)
        if not 0 <= held - shape.numel() < len(entries) * max(row, 1):
            raise ValueError(
                f"{self._source.path}: {field} of {name} has {held} elements, the parameter "
                f"{shape.numel()}"
            )
        part = torch.empty(shape, dtype=entries[0].dtype, device="cpu")
        rest = part.view(-1)
        for file, entry in zip(files, entries):
            here, rest = rest[: entry.numel()], rest[entry.numel() :]
            if entry.is_contiguous() and entry.dtype == part.dtype and entry.dim() and len(here):
                file.read_rows(entry, 0, here)  # into its place: memory holds it once
            else:
                here.copy_(file.read(entry).reshape(-1)[: len(here)])
        return part


def read_optimizer(
    source: Reader, targets: dict[str, Layout] | None, optimizer, names: list[str] | None
) -> dict:
    """This rank's state dict of an optimizer, cut anew where the mesh or the kind of optimizer is
    another.

    Args:
        targets: the layout of each parameter here, by its name.
        names: of the optimizer's parameters, in the order of its groups.

    Raises:
        FileNotFoundError: the checkpoint has no optimizer state. A fresh optimizer is never taken
            instead.
        ValueError: it is of other parameters, or cannot be cut so; with both sizes.
    """
    if not source.has_optimizer:
        raise FileNotFoundError(
            f"{source.path / 'optim'} is missing: the checkpoint was saved without an optimizer"
        )
    live = optimizer if isinstance(optimizer, dict) else optimizer.state_dict()
    saved_names = ((source.metadata or {}).get("optimizer") or {}).get("parameters")
    if names is not None and saved_names is not None and set(names) != set(saved_names):
        other = sorted(set(names) ^ set(saved_names))
        raise ValueError(
            f"{source.path / 'optim'} is of another optimizer: {', '.join(other[:3])} on one side "
            "only"
        )
    state = _as_saved(
        source,
        live,
        names == saved_names or None in (names, saved_names),
        isinstance(optimizer, dict),
    )
    return _cut_anew(source, targets, live, names) if state is None else state


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


def _as_saved(source: Reader, live: dict, same_order: bool, into_dict: bool) -> dict | None:
    """The state as it lies in this rank's file, if it fits as it is; None where it has to be cut
    anew.
    """
    place, tp = ranks.my_place(), ranks.mesh()["tp"]
    zero1 = source.zero1 if into_dict else "base_state" in live
    degree = place.replicas if zero1 else 1
    fits = source.tp == tp and zero1 == source.zero1 and (not zero1 or source.zero_degree == degree)
    if fits and same_order:
        state = source.optimizer_shard(place.dp if zero1 else 0, place.tp, place.pp)
        if into_dict or live.keys() - {MASTER} <= state.keys():
            return state
    if into_dict:
        raise ValueError(
            f"{source.path}: the optimizer was saved at tensor-parallel size {source.tp} with "
            f"{source.zero_degree} shards, "
            f"this run has {tp} and {degree}: to have it cut anew, give the optimizer, not a dict"
        )
    return None


def _cut_anew(
    source: Reader, targets: dict[str, Layout] | None, live: dict, names: list[str] | None
) -> dict:
    place, tp = ranks.my_place(), ranks.mesh()["tp"]
    if names is None or targets is None:
        raise ValueError(
            f"{source.path}: the optimizer was saved at tensor-parallel size {source.tp} with "
            f"{source.zero_degree} shards, "
            f"this run has {tp} and {place.replicas if 'base_state' in live else 1}: to have it "
            "cut anew, give the model too"
        )
    saved = SavedOptimizer(source, names, source.layouts or source.guess(targets))
    return _resharded(saved, targets, live, names, place)


def _resharded(
    saved: SavedOptimizer,
    targets: dict[str, Layout],
    live: dict,
    names: list[str],
    place: ranks.Place,
) -> dict:
    zero1 = "base_state" in live
    state, masters = {}, {}
    for number, name in enumerate(names):
        for field in saved.fields(name):
            value = saved.full(name, field)
            if saved.is_cut(name, field):
                value = targets[name].cut(value, place.tp)
                value = take_shard(value, place.dp, place.replicas, value.dtype) if zero1 else value
            if field == MASTER:
                masters[number] = value
            else:
                state.setdefault(number, {})[field] = value
    if masters and not zero1:
        lossy = [
            n for i, n in enumerate(names) if i in masters and masters[i].dtype != targets[n].dtype
        ]
        if lossy:
            raise ValueError(
                f"the checkpoint holds {masters[0].dtype} masters of {lossy[0]} and others, which "
                "need ZeRO-1"
            )
    result = {**live, "param_groups": _groups(saved, live["param_groups"], names)}
    result["base_state" if zero1 else "state"] = state
    result.pop(MASTER, None)
    return result | ({MASTER: masters} if masters and zero1 else {})


def _groups(saved: SavedOptimizer, live: list[dict], names: list[str]) -> list[dict]:
    """The saved groups' settings with this optimizer's numbers of the same parameters."""
    by_names = {
        frozenset(saved.names[n] for n in group["params"]): group
        for group in saved.head["param_groups"]
    }
    groups = []
    for group in live:
        members = frozenset(names[n] for n in group["params"])
        if members not in by_names:
            raise ValueError(
                f"the optimizer's group with {min(members, default='nothing')} has other parameters "
                "than when it was saved"
            )
        groups.append({**by_names[members], "params": group["params"]})
    return groups


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
