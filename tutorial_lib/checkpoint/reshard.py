"""`reshard`: a checkpoint at another tensor-parallel and data-parallel degree, optimizer state and
masters with it.
"""

from collections.abc import Iterator
from pathlib import Path

from ..parallel_layers.utils import ensure_positive
from ..storage.xser import is_xser, spilled
from .architectures import layout_at
from .layout import Layout, shard_name, to_json
from .shards import MASTERS, Shards
from .tools import check_output, mesh_of, open_checkpoint, progress, write_checkpoint
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

    Random states belong to ranks that are no more, and are left out unless the mesh is the same.

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

    def files(aside: Path) -> Iterator[tuple]:
        for rank in range(tp):
            weights = _weights(shards, targets, rank, aside / "room")
            yield f"model/{shard_name(0, rank)}", weights, xser
            if metadata["optimizer"] is not None:
                states = _states(shards, targets, rank, dp if shards.zero1 else 1, aside / "room")
                for place, state in enumerate(states):
                    yield f"optim/{shard_name(place, rank)}", state, xser
        for name in filter(shards.has, small):
            check_small(shards, name)
            yield name, shards.object(name)

    metadata = {**metadata, "mesh": mesh, "model": to_json(targets)}
    write_checkpoint(output, shards.checkpoint.step, metadata, files)


def _weights(shards: Shards, targets: dict[str, Layout], rank: int, room: Path) -> dict:
    """The weights of one tensor-parallel rank, each written to `room` and mapped from there."""
    first = {name: group[0] for group in shards.metadata["tied"] for name in group}
    once = {
        name: spilled(shards.to(name, shards.weights(name), targets[name], rank), room)
        for name in progress([n for n in targets if first.get(n, n) == n], f"model {rank}")
    }
    return {name: once[first.get(name, name)] for name in targets}


def _states(
    shards: Shards, targets: dict[str, Layout], tp: int, places: int, room: Path
) -> list[dict]:
    """The optimizer's state of one tensor-parallel rank, ZeRO-1's for each place, likewise."""
    states, masters = [{} for _ in range(places)], [{} for _ in range(places)]
    found = shards.state_at(targets, tp, places, shards.zero1)
    for number, field, values in progress(found, f"optimizer {tp}"):
        for place, value in enumerate(spilled(list(values), room)):
            if field == MASTERS:
                masters[place][number] = value
            else:
                states[place].setdefault(number, {})[field] = value
    head = shards.state_head()
    if not shards.zero1:
        return [head | {"state": states[0]}]
    head |= {"state": {}, "shape_info": _shape_info(shards, targets, head, places)}
    return [
        head
        | {"base_state": states[place], "sharding": {"rank": place, "size": places}}
        | ({MASTERS: masters[place]} if masters[place] else {})
        for place in range(places)
    ]


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
