"""`merge`: the shards of a checkpoint into one safetensors file, or a folder that Hugging Face's
`from_pretrained` opens.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..storage import replaced_by, reserve, write_text
from .architectures import model_of
from .layout import Layout
from .shards import Shards
from .tools import check_output, open_checkpoint, progress

TYPES = {  # by safetensors' names
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def merge(
    source: str | Path, output: str | Path, config: str | Path | None = None, **options
) -> Path:
    """Merges the weights of a checkpoint.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: a file that ends in `.safetensors`, for the names that the tensors have here, or a
            folder to be, for Hugging Face's.
        config, options: see `tools.open_checkpoint`.

    Returns:
        The safetensors file.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: see `tools`; an architecture that is not
            known, a broken file.
    """
    shards = open_checkpoint(source, config, options)
    output = check_output(output, source, shards.path)
    if output.suffix == ".safetensors":
        target, names = output, {name: (name,) for name in once(shards)}
    else:
        target, cls = output / "model.safetensors", model_of(shards.metadata["config"])
        names = {name: cls.published_names(name) for name in once(shards)}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced_by(target) as aside:
        _write(shards, names, aside)
    if target != output:
        write_config(shards, output)
    return target


def once(shards: Shards) -> list[str]:
    """The names of the tensors, of tied ones the first."""
    twice = {name for group in shards.metadata["tied"] for name in group[1:]}
    return [name for name in shards.layouts if name not in twice]


def write_config(shards: Shards, folder: Path) -> None:
    settings = shards.metadata["config"]
    classes = settings.get("architectures") or [shards.metadata["architecture"]]
    text = json.dumps(settings | {"architectures": classes}, indent=2, sort_keys=True)
    write_text(folder / "config.json", text + "\n")


def matrices(layout: Layout, names: Sequence[str]) -> list[list[int]]:
    """The shapes of the matrices that are fused, row below row, in a tensor of that layout: one for
    each of their names.
    """
    if len(names) == 1:
        return [list(layout.shape)]
    return [[size, *layout.shape[1:]] for size in layout.partition.sizes]


def _write(shards: Shards, names: dict[str, tuple[str, ...]], path: Path) -> None:
    """Writes the tensors in safetensors' format, one after the other: the length of a header, which
    says where each tensor is; the header; their data, the largest elements first, so that each is
    at a multiple of its element's size. They are copied into a mapping of the file, one at a time.
    """
    header, at, starts = {"__metadata__": {"format": "pt"}}, 0, {}
    for name in sorted(names, key=lambda name: -shards.layouts[name].dtype.itemsize):
        layout, starts[name] = shards.layouts[name], at
        if (dtype := layout.dtype) not in TYPES:
            raise ValueError(f"{name} is {dtype}, which a safetensors file does not hold")
        for theirs, shape in zip(names[name], matrices(layout, names[name]), strict=True):
            start, at = at, at + torch.Size(shape).numel() * dtype.itemsize
            header[theirs] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, at]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    first = path.stat().st_size
    os.truncate(path, first + at)
    reserve(path)
    room = torch.from_file(str(path), shared=True, size=first + at, dtype=torch.uint8)
    for name, start in progress(starts.items(), "merge"):
        layout = replace(shards.layouts[name], partition=None)
        length = layout.local_shape().numel() * layout.dtype.itemsize
        whole = room[first + start :][:length].view(layout.dtype).view(layout.shape)
        shards.to(name, shards.weights(name), layout, 0, whole)
