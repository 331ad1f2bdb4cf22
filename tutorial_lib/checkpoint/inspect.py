"""`inspect`: what a folder of checkpoints, or one of them, holds."""

from collections import Counter
from pathlib import Path

import torch

from ..storage.xser import files_of, is_xser
from . import tags
from .shards import Shards
from .verify import SMALL


def inspect(path: str | Path) -> str:
    """A description of the checkpoint at `path`, or of the folder of checkpoints and its latest
    one.

    Raises:
        FileNotFoundError: there is no complete checkpoint at `path`.
    """
    path, lines = Path(path), []
    checkpoint = tags.locate(path)
    if checkpoint.path != path.resolve():
        for item in tags.complete(path):
            latest = " (latest)" if item == checkpoint else ""
            lines.append(f"{item.tag}: complete, step {item.step}{latest}")
        for half in tags.incomplete(path):
            lines.append(f"{half.name}: incomplete, left by an interrupted save")
        lines.append("")
    return "\n".join(lines + _describe(checkpoint))


def _describe(checkpoint: tags.Complete) -> list[str]:
    shards = Shards(checkpoint, check=False)
    files = [shards.file(*place) for place in shards.found()]
    missing = {name for name in checkpoint.files if not (checkpoint.path / name).is_file()}
    missing |= {str(file.relative_to(shards.path)) for file in shards.missing()}
    size = sum(file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file())
    form = "one file a tensor (xser)" if any(map(is_xser, files)) else "one file a shard"
    lines = [
        f"checkpoint  {checkpoint.path}",
        f"step        {checkpoint.step}",
        f"mesh        {', '.join(f'{axis} {n}' for axis, n in shards.mesh.items())}",
        f"size        {size / 1e6:.1f} MB in {sum(len(files_of(file)) for file in files)} files of "
        f"tensors, {form}",
    ]
    layouts = shards.layouts
    if layouts is None:
        who = "another library" if shards.metadata is None else "a dict without parameters' marks"
        lines.append(f"saved by {who}: full shapes and layouts are not recorded")
    else:
        ties = shards.metadata["tied"]
        twice = {name for group in ties for name in group[1:]}
        once = {name: layout for name, layout in layouts.items() if name not in twice}
        total = sum(torch.Size(layout.shape).numel() for layout in once.values())
        kinds = Counter(_name(layout.dtype) for layout in once.values())
        sharded = sum(layout.partition is not None for layout in layouts.values())
        optimizer = shards.metadata["optimizer"]
        where = "on every data-parallel rank"
        if optimizer and optimizer["zero1"]:
            where = f"ZeRO-1 over data-parallel groups of {shards.zero_degree}"
        lines += [
            f"model       {shards.metadata['architecture']}, {total:,} elements in {len(once)} "
            f"tensors ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})",
            f"tied        {'; '.join(' = '.join(group) for group in ties) or 'nothing'}",
            f"sharded     {sharded} tensors over {shards.tp} ranks, {len(layouts) - sharded} on "
            "every rank",
            f"optimizer   {'none' if optimizer is None else where}",
        ]
    lines.append(f"besides     {', '.join(filter(shards.has, SMALL)) or 'nothing'}")
    lines.append(f"missing     {', '.join(sorted(missing)) or 'nothing'}")
    width = max(map(len, layouts or [""]))
    return lines + [f"{name:{width}}  {_form(layout)}" for name, layout in (layouts or {}).items()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form(layout) -> str:
    text = f"{'×'.join(map(str, layout.shape)) or 'scalar'} {_name(layout.dtype)}"
    partition = layout.partition
    if partition is None:
        return text
    text += f", sharded along dim {partition.dim}"
    text += f", {len(partition.sizes)} fused" if len(partition.sizes) > 1 else ""
    shared = f", ranks that share a shard: {partition.replicas}"
    text += shared if max(partition.replicas) > 1 else ""
    return text + (f", padded by {partition.pad}" if partition.pad else "")
