"""`reshard`: a checkpoint at another tensor-parallel and data-parallel degree, optimizer state and
masters with it.
"""

from pathlib import Path

import torch

from ..parallel_layers.flat_shards import shard_length, take_shard
from ..parallel_layers.utils import ensure_positive
from ..storage.xser import Digests, Filled, blank, is_xser, save
from .architectures import layout_at
from .layout import Layout, shard_name, to_json, write_metadata
from .merge import open_checkpoint
from .shards import MASTERS, Shards
from .tools import check_output, progress, write_checkpoint


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

    Random states belong to ranks that are no more, and are left out unless the mesh is the same.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size.
        dp: data-parallel size, which matters for the shards of ZeRO-1; by default as before.
        xser: tensor by tensor; by default as before.
        pad: pad a vocabulary that `tp` does not divide and that was not padded before.
        config, options: see `merge.open_checkpoint`; the optimizer's state is left out then.

    Raises:
        ValueError: a degree that does not fit, with the tensor and the numbers. For others see
            `tools`.
    """
    shards = open_checkpoint(source, config, options)
    output = check_output(output, source, shards.path)
    before = shards.metadata["mesh"]
    dp = before["dp"] if dp is None else dp
    ensure_positive(tp=tp, dp=dp)
    xser = is_xser(shards.file("model", 0)) if xser is None else xser
    settings = shards.metadata["config"]
    targets = {n: layout_at(n, x, tp, settings, pad) for n, x in shards.layouts.items()}
    mesh = {"world": tp * dp, "tp": tp, "dp": dp, "pp": 1, "cp": 1}
    small = ["scheduler.pt", "user_content.pt"] + ["random_state.pt"] * (mesh == before)

    def write(aside: Path) -> Digests:
        written = write_metadata(
            aside, {**shards.metadata, "mesh": mesh, "model": to_json(targets)}
        )
        for rank in range(tp):
            weights = {
                name: lambda name=name, rank=rank: shards.to(
                    name, shards.weight(name), targets[name], rank
                )
                for name in targets
            }
            file = aside / "model" / shard_name(0, rank)
            written |= write_weights(weights, targets, shards.metadata["tied"], file, xser)
        if shards.metadata["optimizer"] is not None:
            for rank in range(tp):
                written |= _write_state(
                    shards, targets, aside, rank, dp if shards.zero1 else 1, xser
                )
        for name in filter(shards.has, small):
            written |= save(shards.object(name), aside / name)
        return written

    write_checkpoint(output, shards.checkpoint.step, mesh, write)


def write_weights(
    weights: dict, targets: dict[str, Layout], tied: list[list[str]], file: Path, xser: bool
) -> Digests:
    """Writes the shards of one rank, each `weights[name]()` when its turn comes."""
    blanks = {name: blank(x.local_shape(), x.dtype) for name, x in targets.items()}
    first = {name: group[0] for group in tied for name in group}
    target = Filled({name: blanks[first.get(name, name)] for name in targets}, file, xser)
    for name in progress([n for n in targets if first.get(n, n) == n], file.name):
        target.put(blanks[name], weights[name]())
    return target.close()


def _write_state(
    shards: Shards, targets: dict[str, Layout], aside: Path, tp: int, places: int, xser: bool
) -> Digests:
    """Writes the optimizer's state of one tensor-parallel rank, ZeRO-1's for each place."""
    names, files, blanks, written = shards.parameters, [], [], {}
    for place in range(places):
        state, masters, mine = {}, {}, {}
        for number, name in enumerate(names):
            for field in shards.fields(name):
                value = shards.state_shards(name, field)
                if isinstance(value, list):
                    shape = targets[name].local_shape()
                    if shards.zero1:
                        shape = (shard_length(torch.Size(shape).numel(), places),)
                    value = mine[name, field] = blank(shape, value[0][0].dtype)
                if field == MASTERS:
                    masters[number] = value
                else:
                    state.setdefault(number, {})[field] = value
        content = _content(shards, targets, state, masters, place, places)
        blanks.append(mine)
        files.append(Filled(content, aside / "optim" / shard_name(place, tp), xser))
    for name, field in progress(blanks[0], f"optimizer {tp}"):
        value = shards.to(name, shards.state(name, field), targets[name], tp)
        for place, file in enumerate(files):
            shard = take_shard(value, place, places, value.dtype) if shards.zero1 else value
            file.put(blanks[place][name, field], shard)
    for file in files:
        written |= file.close()
    return written


def _content(
    shards: Shards, targets: dict[str, Layout], state: dict, masters: dict, place: int, places: int
) -> dict:
    """The state dict of an optimizer, as it is for this place."""
    head = shards.state_head()
    if not shards.zero1:
        return head | {"state": state}
    infos = {}
    for number, name in enumerate(shards.parameters):
        shape, info = list(targets[name].local_shape()), head["shape_info"].get(number)
        info = dict(info) if isinstance(info, dict) else {}
        if targets[name].partition is not None:
            info["num_partitions"] = targets[name].partition.parts
        padding = -torch.Size(shape).numel() % places
        infos[number] = info | {"shape": shape, "padding": padding}
    return {
        "state": {},
        "param_groups": head["param_groups"],
        "base_state": state,
        "shape_info": infos,
        "sharding": {"rank": place, "size": places},
        **({MASTERS: masters} if masters else {}),
    }
