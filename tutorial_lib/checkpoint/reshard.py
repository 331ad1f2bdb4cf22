"""`reshard`: a checkpoint at another tensor-parallel and data-parallel degree, optimizer state and
masters with it.
"""

from pathlib import Path

import torch

from ..parallel_layers.ranks import mesh_of
from ..parallel_layers.utils import ensure_positive
from ..storage import Digest, sealed
from ..storage.xser import is_xser, save_blank
from .architectures import layout_at
from .layout import Layout, shard_name, to_json
from .save import write_files
from .shards import MASTERS, Shards
from .tools import check_output, open_checkpoint, progress, write_checkpoint
from .verify import check_small


def reshard(
    source: str | Path,
    output: str | Path,
    tp: int,
    dp: int | None = None,
    xser: bool | None = None,
    pad: bool = False,
    config: str | Path | None = None,
    **options,
) -> None:
    """Writes a checkpoint at other degrees.

    Random states belong to the ranks that saved them, and are kept only if the mesh is the same.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size.
        dp: data-parallel size, which matters for the shards of ZeRO-1; by default as before.
        xser: tensor by tensor; by default as before.
        pad: pad a vocabulary that `tp` does not divide and that was not padded before.
        config, options: see `tools.open_checkpoint`; the optimizer's state is left out then.

    Raises:
        ValueError: a degree that does not fit, with the tensor and the numbers. For others see
            `tools`.
    """
    shards = open_checkpoint(source, config, options)
    output = check_output(output, source, shards.path)
    metadata, before = shards.metadata, shards.metadata["mesh"]
    dp = before["dp"] if dp is None else dp
    ensure_positive(tp=tp, dp=dp)
    xser = is_xser(shards.file("model", 0)) if xser is None else xser
    targets = {n: layout_at(n, x, tp, metadata["config"], pad) for n, x in shards.layouts.items()}
    mesh = mesh_of(tp, dp)
    small = ["scheduler.pt", "user_content.pt"] + ["random_state.pt"] * (mesh == before)

    def write(aside: Path) -> dict[str, Digest]:
        written = {}
        for rank in range(tp):
            files = _write_weights(shards, targets, rank, aside, xser)
            if metadata["optimizer"] is not None:
                places = dp if shards.zero1 else 1
                files += _write_states(shards, targets, rank, places, aside, xser)
            written |= {str(file.relative_to(aside)): sealed(file) for file in files}
        for name in filter(shards.has, small):
            check_small(shards, name)
            written |= write_files(aside, [(name, shards.object(name))])
        return written

    metadata = {**metadata, "mesh": mesh, "model": to_json(targets)}
    write_checkpoint(output, shards.checkpoint.step, metadata, write)


def _write_weights(
    shards: Shards, targets: dict[str, Layout], rank: int, folder: Path, xser: bool
) -> list[Path]:
    """Writes the weights of one tensor-parallel rank, one tensor at a time; their files."""
    first = {name: group[0] for group in shards.metadata["tied"] for name in group}
    once = {name: targets[name].blank() for name in targets if first.get(name, name) == name}
    blanks = {name: once[first.get(name, name)] for name in targets}
    held, files = save_blank(blanks, folder / "model" / shard_name(0, rank), xser)
    for name in progress(once, f"model {rank}"):
        shards.to(name, shards.weights(name), targets[name], rank, held[name])
    return files


def _write_states(
    shards: Shards, targets: dict[str, Layout], tp: int, places: int, folder: Path, xser: bool
) -> list[Path]:
    """Writes the optimizer's state of a tensor-parallel rank, ZeRO-1's for each place; likewise."""
    head, states, files = shards.state_head(), [], []
    shape_info = _shape_info(shards, targets, head, places)
    for place in range(places):
        zero1 = {"base_state": {}, "sharding": {"rank": place, "size": places}}
        own = {"state": {}, "shape_info": shape_info, **zero1} if shards.zero1 else {"state": {}}
        states.append(head | own)
    mesh = targets, tp, places, shards.zero1
    for number, field, values in shards.state_at(*mesh, blank=True):
        for state, value in zip(states, values, strict=True):
            entries, key = _entry(state, number, field)
            entries[key] = value
    for place, state in enumerate(states):
        name = folder / "optim" / shard_name(place, tp)
        states[place], written = save_blank(state, name, xser)
        files += written
    for number, field, values in progress(shards.state_at(*mesh), f"optimizer {tp}"):
        for state, value in zip(states, values, strict=True):
            entries, key = _entry(state, number, field)
            if isinstance(entries[key], torch.Tensor):
                entries[key].copy_(value)
    return files


def _entry(state: dict, number: int, field: str) -> tuple[dict, int | str]:
    """Where a state dict has what an optimizer keeps for a parameter."""
    if field == MASTERS:
        return state.setdefault(MASTERS, {}), number
    kept = state["base_state" if "base_state" in state else "state"]
    return kept.setdefault(number, {}), field


def _shape_info(shards: Shards, targets: dict[str, Layout], head: dict, places: int) -> dict:
    """See `optimizer.zero1_state`."""
    saved, infos = head.get("shape_info", {}), {}
    for number, name in enumerate(shards.parameters):
        shape, partition = targets[name].local_shape(), targets[name].partition
        infos[number] = saved.get(number, {}) | {"shape": list(shape)}
        infos[number]["padding"] = -shape.numel() % places
        if partition is not None:
            infos[number]["num_partitions"] = partition.parts
    return infos
