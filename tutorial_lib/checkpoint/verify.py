"""`verify`: is a checkpoint complete, readable, unaltered, and do its shards agree with one
another?
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from . import tags
from .files import check_file
from .layout import Layout
from .reader import Reader
from .tools import find, progress


def verify(path: str | Path) -> list[str]:
    """What is wrong with a checkpoint, one line each; nothing if it is sound.

    Raises:
        FileNotFoundError: there is no complete checkpoint at `path`.
    """
    checkpoint = find(path)
    problems = list(_files(checkpoint))
    if problems:
        return problems  # what is inside broken files is no news
    try:
        reader = Reader(checkpoint, check=False)
        problems += _shards(reader)
        if reader.layouts is None:
            return problems
        for name, layout in progress(reader.layouts.items(), "verify"):
            problems += _tensor(reader, name, layout)
        problems += _ties(reader)
    except (OSError, ValueError) as error:
        problems.append(str(error))
    return problems


def _files(checkpoint: tags.Complete) -> Iterator[str]:
    for name, digest in progress(checkpoint.files.items(), "hashes"):
        try:
            check_file(checkpoint.path / name, digest)
        except (OSError, ValueError) as error:
            yield str(error)
    known = set(checkpoint.files) | {tags.STARTED, tags.DONE}
    for file in sorted(checkpoint.path.rglob("*")) if checkpoint.files else ():
        if file.is_file() and str(file.relative_to(checkpoint.path)) not in known:
            yield f"{file} does not belong to the checkpoint"


def _shards(reader: Reader) -> Iterator[str]:
    yield from (f"{file} is missing" for file in reader.missing())
    for file in reader.files():
        try:
            reader.lazy(file)
        except (OSError, ValueError) as error:
            yield str(error)


def _tensor(reader: Reader, name: str, layout: Layout) -> Iterator[str]:
    """Shapes, dtypes, and what several ranks hold alike: replicated tensors, and shared parts of
    sharded ones.
    """
    whole, right = None, True
    for rank in range(reader.tp):
        file = reader.lazy(reader.model_file(rank))
        if name not in file.index:
            yield f"{file.path} holds no tensor {name}"
            right = False
            continue
        entry = file.index[name]
        if tuple(entry.shape) != layout.local_shape() or entry.dtype != layout.dtype:
            wanted = f"{layout.local_shape()} {layout.dtype}"
            yield f"{file.path}: {name} is {tuple(entry.shape)} {entry.dtype}, not {wanted}"
            right = False
            continue
        if layout.partition is None:
            shard = file[name]
            if whole is None:
                whole = shard
            elif not torch.equal(whole, shard):
                yield f"{name} is replicated and differs between ranks 0 and {rank}"
    if right and layout.partition is not None and max(layout.partition.replicas) > 1:
        for rank, start in reader.differing_parts(name, layout):
            yield f"{name}: rows from {start} are shared and differ on rank {rank}"


def _ties(reader: Reader) -> Iterator[str]:
    for group in reader.metadata["tied"]:
        for rank in range(reader.tp):
            file = reader.lazy(reader.model_file(rank))
            first, *others = (file[name] for name in group)
            if not all(torch.equal(first, other) for other in others):
                yield f"{file.path}: {', '.join(group)} are tied and differ"
