"""`verify`: is a checkpoint complete, readable, unaltered, and do its shards agree with one
another? What it finds sound can be loaded, and nothing else is published.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ..parallel_layers.random import get_rng_state, set_rng_state
from ..storage import Digest, check_file
from . import tags
from .shards import Shards

SMALL = ("scheduler.pt", "user_content.pt", "random_state.pt")


def verify(path: str | Path) -> list[str]:
    """What is wrong with a checkpoint, one line each; nothing if it is sound.

    Raises:
        FileNotFoundError, RuntimeError: there is no complete checkpoint at `path`.
    """
    checkpoint = tags.locate(path)
    if problems := list(_files(checkpoint)):  # what is inside broken files is no news
        return problems
    checkpoint = replace(checkpoint, files={})  # compared above
    return list(_problems(checkpoint, data=True))


def publish(aside: Path, step: int | None, files: dict[str, Digest], mesh: dict[str, int]) -> None:
    """Turns a folder whose files are written into the complete checkpoint of its tag.

    Raises:
        ValueError: `verify` would not find it sound; with the first problem.
    """
    for problem in _problems(tags.Complete(aside.name, aside, mesh=mesh), data=False):
        raise ValueError(f"{aside} is not published: {problem}")
    tags.publish(aside, step, files, mesh)


def _files(checkpoint: tags.Complete) -> Iterator[str]:
    for name, digest in checkpoint.files.items():
        try:
            check_file(checkpoint.path / name, digest)
        except (OSError, ValueError) as error:
            yield str(error)
    known = set(checkpoint.files) | {tags.STARTED, tags.DONE}
    for file in sorted(checkpoint.path.rglob("*")) if checkpoint.files else ():
        name = str(file.relative_to(checkpoint.path))
        if not file.is_dir() and (name not in known or not file.is_file()):
            yield f"{file} does not belong to the checkpoint"


def _problems(checkpoint: tags.Complete, data: bool) -> Iterator[str]:
    """What is wrong inside files that are as they were written; reads all that there is.

    Args:
        data: also compare what ranks share, and try out the random states.
    """
    try:
        shards = Shards(checkpoint, blanks=not data)
        yield from (f"{file} is missing" for file in shards.missing())
        for name in filter(shards.has, SMALL if data else SMALL[:2]):
            check_small(shards, name)
        for place in shards.found():
            shards.shard(*place)
        for name, layout in (shards.layouts or {}).items():
            for rank in range(shards.tp):
                shards.weight(name, rank)
            for rank, start in shards.differing(name) if data else ():
                if layout.partition is None:
                    yield f"{name} is replicated and differs between ranks 0 and {rank}"
                else:
                    yield f"{name}: rows from {start} are shared and differ on rank {rank}"
        for group in shards.metadata["tied"] if data and shards.layouts else ():
            for rank in range(shards.tp):
                first, *others = (shards.weight(name, rank) for name in group)
                if not all(torch.equal(first, other) for other in others):
                    file = shards.file("model", rank)
                    yield f"{file}: {', '.join(group)} are tied and differ"
        if shards.has_optimizer and shards.layouts and shards.parameters:
            shards.state_head()
            for _ in shards.state():
                pass
    except (OSError, ValueError) as error:
        yield str(error)


def check_small(shards: Shards, name: str) -> None:
    """Raises ValueError if one of the small files does not hold what it should."""
    value, file = shards.object(name), shards.path / name
    if name == "scheduler.pt" and not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not a dict")
    if name == "random_state.pt":
        before = get_rng_state()
        try:
            if len(states := list(value["ranks"])) != shards.mesh.get("world", len(states)):
                raise ValueError(f"{len(states)} states for {shards.mesh['world']} ranks")
            for state in states:
                set_rng_state(state)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{file} does not hold the random states: {error}") from error
        finally:
            set_rng_state(before)
