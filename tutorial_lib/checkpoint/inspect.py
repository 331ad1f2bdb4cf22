"""`inspect`: what a folder of checkpoints, or one of them, holds."""

from collections import Counter
from pathlib import Path

import torch

from . import tags
from .reader import Reader
from .tensors import files_of, is_xser
from .tools import find


def inspect(path: str | Path) -> str:
    """A description of the checkpoint at `path`, or of the folder of checkpoints and its latest
    one.

    Raises:
        FileNotFoundError: there is no complete checkpoint at `path`.
    """
    path, lines = Path(path), []
    checkpoint = find(path)
    if checkpoint.path != path.resolve():
        for item in tags.complete(path):
            lines.append(
                f"{item.tag}: complete, step {item.step}"
                + (" (latest)" if item == checkpoint else "")
            )
        lines += [
            f"{half.name}: incomplete, left by an interrupted save"
            for half in tags.incomplete(path)
        ]
        lines.append("")
    return "\n".join(lines + _describe(checkpoint))


def _describe(checkpoint: tags.Complete) -> list[str]:
    reader = Reader(checkpoint, check=False)
    missing = {name for name in checkpoint.files if not (checkpoint.path / name).is_file()}
    missing |= {str(file.relative_to(reader.path)) for file in reader.missing()}
    size = sum(file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file())
    sizes = ", ".join(f"{axis} {n}" for axis, n in reader.mesh.items())
    form = (
        "one file a tensor (xser)"
        if any(is_xser(f) for f in reader.files())
        else "one file a shard"
    )
    lines = [
        f"checkpoint  {checkpoint.path}",
        f"step        {checkpoint.step}",
        f"mesh        {sizes}",
        f"size        {size / 1e6:.1f} MB in {sum(len(files_of(f)) for f in reader.files())} files "
        f"of tensors, {form}",
    ]
    if reader.layouts is None:
        who = "another library" if reader.metadata is None else "a dict without parameters' marks"
        lines.append(f"saved by {who}: full shapes and cuts are not recorded")
        first = next((f for f in reader.files() if f.parent.name == "model"), None)
        if first is not None:
            lines.append(
                "shard 0     "
                f"{_count({n: tuple(t.shape) for n, t in reader.lazy(first).index.items()}, None)}"
            )
    else:
        layouts = reader.layouts
        ties = reader.metadata["tied"]
        twice = {name for group in ties for name in group[1:]}
        once = {name: layout.shape for name, layout in layouts.items() if name not in twice}
        lines.append(f"model       {reader.metadata['architecture']}, {_count(once, layouts)}")
        lines.append(f"tied        {'; '.join(' = '.join(group) for group in ties) or 'nothing'}")
        cut = sum(layout.partition is not None for layout in layouts.values())
        lines.append(
            f"cut         {cut} tensors over {reader.tp} ranks, {len(layouts) - cut} on every rank"
        )
        optimizer = reader.metadata["optimizer"]
        zero = (
            f"ZeRO-1 over data-parallel groups of {reader.zero_degree}"
            if optimizer and optimizer["zero1"]
            else "on every data-parallel rank"
        )
        lines.append(f"optimizer   {'none' if optimizer is None else zero}")
    others = [n for n in ("scheduler.pt", "user_content.pt", "random_state.pt") if reader.has(n)]
    lines.append(f"besides     {', '.join(others) or 'nothing'}")
    lines.append(f"missing     {', '.join(sorted(missing)) or 'nothing'}")
    if layouts := reader.layouts:
        width = max(len(name) for name in layouts)
        lines += ["", *(f"{n:{width}}  {_form(x)}" for n, x in layouts.items())]
    return lines


def _count(shapes: dict[str, tuple[int, ...]], layouts) -> str:
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    if layouts is None:
        return f"{total:,} elements in {len(shapes)} tensors"
    dtypes = Counter(str(layouts[name].dtype).removeprefix("torch.") for name in shapes)
    kinds = ", ".join(f"{n} {dtype}" for dtype, n in dtypes.items())
    return f"{total:,} elements in {len(shapes)} tensors ({kinds})"


def _form(layout) -> str:
    text = (
        f"{'×'.join(map(str, layout.shape)) or 'scalar'} {str(layout.dtype).removeprefix('torch.')}"
    )
    cut = layout.partition
    if cut is None:
        return text
    text += f", cut along dim {cut.dim}"
    text += f", {len(cut.sizes)} fused" if len(cut.sizes) > 1 else ""
    text += f", ranks sharing a part: {cut.replicas}" if max(cut.replicas) > 1 else ""
    return text + (f", padded by {cut.pad}" if cut.pad else "")
