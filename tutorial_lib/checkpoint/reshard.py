"""`reshard`: a checkpoint at another tensor-parallel and data-parallel degree, optimizer state and
masters with it.
"""

from contextlib import ExitStack
from pathlib import Path

from ..parallel_layers.utils import ensure_positive
from ..storage.xser import blank, is_xser, load, room_for, save
from .architectures import layout_at
from .layout import Layout, shard_name, to_json, write_metadata
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

    def write(aside: Path) -> None:
        write_metadata(aside, {**metadata, "mesh": mesh, "model": to_json(targets)})
        for rank in range(tp):
            _write_weights(shards, targets, rank, aside / "model" / shard_name(0, rank))
            if metadata["optimizer"] is not None:
                _write_state(shards, targets, rank, dp if shards.zero1 else 1, aside / "optim")
        for file in sorted(aside.glob("*/*.pt")) if xser else ():
            save(load(file, mmap=True), file, xser=True)
        for name in filter(shards.has, small):
            check_small(shards, name)
            save(shards.object(name), aside / name)

    write_checkpoint(output, shards.checkpoint.step, mesh, write)


def _write_weights(shards: Shards, targets: dict[str, Layout], rank: int, file: Path) -> None:
    first = {name: group[0] for group in shards.metadata["tied"] for name in group}
    blanks = {name: blank(x.local_shape(), x.dtype) for name, x in targets.items()}
    with room_for({name: blanks[first.get(name, name)] for name in targets}, file) as room:
        for name in progress([n for n in targets if first.get(n, n) == n], file.name):
            room[name].copy_(shards.to(name, shards.weights(name), targets[name], rank))


def _write_state(
    shards: Shards, targets: dict[str, Layout], tp: int, places: int, folder: Path
) -> None:
    """Writes the optimizer's state of one tensor-parallel rank, ZeRO-1's for each place."""
    state, masters, makers = {}, {}, []
    for number, field, value, make in shards.state_at(targets, tp, places, shards.zero1):
        if field == MASTERS:
            masters[number] = value
        else:
            state.setdefault(number, {})[field] = value
        makers += [(number, field, make)] if make else []
    head = shards.state_head()
    content = head | {"state": state}
    if shards.zero1:
        infos = _shape_info(shards, targets, head.get("shape_info", {}), places)
        content = head | {"state": {}, "base_state": state, "shape_info": infos}
        content |= {MASTERS: masters} if masters else {}
    with ExitStack() as stack:
        rooms = []
        for place in range(places):
            here = {"sharding": {"rank": place, "size": places}} if shards.zero1 else {}
            file = folder / shard_name(place, tp)
            rooms.append(stack.enter_context(room_for(content | here, file)))
        for number, field, make in progress(makers, f"optimizer {tp}"):
            for room, shard in zip(rooms, make(), strict=True):
                entries = room["base_state" if shards.zero1 else "state"]
                held = room[MASTERS][number] if field == MASTERS else entries[number][field]
                held.copy_(shard)


def _shape_info(shards: Shards, targets: dict[str, Layout], saved: dict, places: int) -> dict:
    """See `optimizer.zero1_state`."""
    infos = {}
    for number, name in enumerate(shards.parameters):
        shape, partition = targets[name].local_shape(), targets[name].partition
        infos[number] = saved.get(number, {}) | {"shape": list(shape)}
        infos[number]["padding"] = -shape.numel() % places
        if partition is not None:
            infos[number]["num_partitions"] = partition.parts
    return infos
