"""`inspect`: what a folder of checkpoints, or one of them, holds."""

from collections import Counter
from pathlib import Path

import torch

from ..storage.xser import is_xser
from . import tags
from .layout import Layout
from .merge import once
from .shards import Shards
from .verify import SMALL


def inspect(path: str | Path) -> str:
    """A description of the checkpoint at `path`, or of the folder of checkpoints and its latest
    one.

    Raises:
        FileNotFoundError, RuntimeError: there is no complete checkpoint at `path`.
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
    shards = Shards(checkpoint)
    missing = {name for name in checkpoint.files if not (checkpoint.path / name).is_file()}
    missing |= {str(file.relative_to(shards.path)) for file in shards.missing()}
    size = sum(file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file())
    xser = any(is_xser(shards.file(*place)) for place in shards.found())
    form = "one file a tensor (xser)" if xser else "one file a shard"
    found = {
        "checkpoint": checkpoint.path,
        "step": checkpoint.step,
        "mesh": ", ".join(f"{axis} {n}" for axis, n in shards.mesh.items()),
        "size": f"{size / 1e6:.1f} MB, {form}",
        **_describe_model(shards),
        "besides": ", ".join(filter(shards.has, SMALL)) or "nothing",
        "missing": ", ".join(sorted(missing)) or "nothing",
    }
    lines += [f"{what:11} {text}" for what, text in found.items()]
    width = max(map(len, shards.layouts or [""]))
    return "\n".join(
        lines + [f"{n:{width}}  {_form(x)}" for n, x in (shards.layouts or {}).items()]
    )


def _describe_model(shards: Shards) -> dict[str, str]:
    if not shards.layouts:
        return {"model": "full shapes and layouts are not recorded"}
    layouts, ties, optimizer = shards.layouts, shards.metadata["tied"], shards.metadata["optimizer"]
    tensors = [layouts[name] for name in once(shards)]
    total = sum(torch.Size(layout.shape).numel() for layout in tensors)
    kinds = Counter(str(layout.dtype).removeprefix("torch.") for layout in tensors)
    sharded = sum(layout.partition is not None for layout in layouts.values())
    where = "none" if optimizer is None else "on every data-parallel rank"
    if optimizer and optimizer["zero1"]:
        where = f"ZeRO-1 over data-parallel groups of {shards.degree}"
    return {
        "model": f"{shards.metadata['architecture']}, {total:,} elements in {len(tensors)} tensors "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.items())})",
        "tied": "; ".join(" = ".join(group) for group in ties) or "nothing",
        "sharded": f"{sharded} tensors over {shards.tp} ranks, {len(layouts) - sharded} on every "
        "rank",
        "optimizer": where,
    }


def _form(layout: Layout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    words = [f"{'×'.join(map(str, layout.shape)) or 'scalar'} {dtype}"]
    if (partition := layout.partition) is not None:
        shared = max(partition.replicas) > 1
        words += [f"sharded along dim {partition.dim}"]
        words += [f"{len(partition.sizes)} fused"] if len(partition.sizes) > 1 else []
        words += [f"ranks that share a shard: {partition.replicas}"] if shared else []
        words += [f"padded by {partition.pad}"] if partition.pad else []
    return ", ".join(words)
