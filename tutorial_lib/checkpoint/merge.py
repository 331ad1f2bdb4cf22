"""`merge`: the shards of a checkpoint into one safetensors file, or a folder that Hugging Face's
`from_pretrained` opens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ..storage import write_file, write_text
from .architectures import model_of
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
    write_file(target, lambda file: _write(shards, names, file))
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


def whole(shards: Shards, name: str, count: int) -> Sequence[torch.Tensor]:
    """The full tensor of that name, or the `count` matrices that are fused in it."""
    held, partition = shards.weights(name), shards.layouts[name].partition
    full = partition.merge(held) if partition else held[0]
    return full.split(partition.sizes, partition.dim) if count > 1 else [full]


def _write(shards: Shards, names: dict[str, tuple[str, ...]], file: BinaryIO) -> None:
    """Writes the tensors in safetensors' format, one after the other: the length of a header, which
    says where each tensor is; the header; their data, the largest elements first, so that each is
    at a multiple of its element's size.
    """
    layouts, header, at = shards.layouts, {"__metadata__": {"format": "pt"}}, 0
    order = sorted(names, key=lambda name: -layouts[name].dtype.itemsize)
    for name in order:
        shape, dtype, partition = layouts[name].shape, layouts[name].dtype, layouts[name].partition
        if dtype not in TYPES:
            raise ValueError(f"{name} is {dtype}, which a safetensors file does not hold")
        for number, theirs in enumerate(names[name]):
            shape = list(shape)
            if len(names[name]) > 1:
                shape[partition.dim] = partition.sizes[number]
            start, at = at, at + torch.Size(shape).numel() * dtype.itemsize
            header[theirs] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, at]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in progress(order, "merge"):
        for matrix in whole(shards, name, len(names[name])):
            file.write(matrix.reshape(-1).view(torch.uint8).numpy())
