"""`convert`: a checkpoint from one file a shard to one file a tensor (xser), or back."""

from pathlib import Path

import torch

from .blocks import stored_blocks
from .files import digest_of
from .layout import METADATA
from .lazy import LazyFile
from .stream import sink
from .tensors import Digests, map_tensors
from .tools import check_output, copy_objects, open_checkpoint, progress, write_checkpoint

OBJECTS = ("scheduler.pt", "user_content.pt", "random_state.pt")


def convert(source: str | Path, output: str | Path, xser: bool) -> None:
    """Writes the same checkpoint in the other form. Works for the vendor's checkpoints too.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: the checkpoint to be, `<folder>/<tag>`.
        xser: into one file a tensor; otherwise into one file a shard.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: see `tools`.
    """
    reader = open_checkpoint(source)
    output = check_output(output, source, reader.path)
    if missing := reader.missing():
        raise FileNotFoundError(f"{missing[0]} is missing")

    def write(aside: Path) -> Digests:
        written = copy_objects(reader, aside, OBJECTS)
        if reader.metadata is not None:
            (aside / METADATA).write_bytes((reader.path / METADATA).read_bytes())
            written[aside / METADATA] = digest_of(aside / METADATA)
        for file in progress(reader.files(), "convert"):
            written |= _rewrite(reader.lazy(file), aside / file.relative_to(reader.path), xser)
        return written

    write_checkpoint(output, reader.step, reader.mesh, lambda aside: reader.sound(write, aside))


def _rewrite(source: LazyFile, path: Path, xser: bool) -> Digests:
    target = sink(source.value, path, xser)
    todo: dict[int, torch.Tensor] = {}
    map_tensors(source.value, lambda tensor: todo.setdefault(id(tensor), tensor))
    for described in todo.values():
        for first, rows in stored_blocks(source, described):
            target.put_rows(described, first, rows)
    return target.close()
