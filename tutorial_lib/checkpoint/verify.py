"""`verify`: is a checkpoint complete, readable, unaltered, and do its shards agree with one
another? What it finds sound can be loaded.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from ..parallel_layers.random import get_rng_state, set_rng_state
from ..storage import check_file
from . import tags
from .layout import Layout
from .shards import MASTERS, Shards

SMALL = ("scheduler.pt", "user_content.pt", "random_state.pt")


def verify(path: str | Path) -> list[str]:
    """What is wrong with a checkpoint, one line each; nothing if it is sound.

    Raises:
        FileNotFoundError: there is no complete checkpoint at `path`.
    """
    return list(problems_of(tags.locate(path)))


def problems_of(checkpoint: tags.Complete, unchanged: bool = False) -> Iterator[str]:
    """The same of a checkpoint that need not be published yet.

    Args:
        unchanged: its files were written just now, so their hashes and data are not read again.
    """
    found = [] if unchanged else list(_files(checkpoint))
    yield from found
    if found:  # what is inside broken files is no news
        return
    try:
        shards = Shards(checkpoint, check=False)
        yield from (f"{file} is missing" for file in shards.missing())
        for name in SMALL:
            if shards.has(name):
                _check_small(shards, name)
        for place in shards.found():
            _check_shard(shards, *place)
        if shards.layouts is None or shards.pp > 1:
            return
        for name, layout in shards.layouts.items():
            yield from _tensor(shards, name, layout, unchanged)
        for group in () if unchanged else shards.metadata["tied"]:
            for rank in range(shards.tp):
                first, *others = (shards.weight_of(name, rank) for name in group)
                if not all(torch.equal(first, other) for other in others):
                    file = shards.file("model", rank)
                    yield f"{file}: {', '.join(group)} are tied and differ"
        if shards.has_optimizer and shards.parameters:
            shards.state_head()
            for name in shards.parameters:
                for field in shards.fields(name):
                    shards.state_shards(name, field)
    except (OSError, ValueError) as error:
        yield str(error)


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


def _check_small(shards: Shards, name: str) -> None:
    value, file = shards.object(name), shards.path / name
    if name == "scheduler.pt" and not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not a dict")
    if name == "random_state.pt":
        before = get_rng_state()
        try:
            if len(states := list(value["ranks"])) != shards.mesh.get("world", len(states)):
                raise ValueError(f"{len(states)} states")
            for state in states:
                set_rng_state(state)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{file} does not hold the random states: {error}") from error
        finally:
            set_rng_state(before)


def _check_shard(shards: Shards, part: str, tp: int, dp: int, pp: int) -> None:
    value, file = shards.shard(part, tp, dp, pp), shards.file(part, tp, dp, pp)
    known = value if shards.layouts is None or shards.pp > 1 else shards.layouts
    for name in value if part == "model" else ():
        if torch.is_tensor(value[name]) and name not in known:
            raise ValueError(f"{file} holds {name}, which the metadata do not know")
    kinds = ("base_state" if shards.zero1 else "state", MASTERS, "shape_info", "sharding")
    for key in kinds if part == "optim" else ():
        if not isinstance(value.get(key, {}), dict):
            raise ValueError(f"{file}: {key} is not that of an optimizer")


def _tensor(shards: Shards, name: str, layout: Layout, unchanged: bool) -> Iterator[str]:
    """Shapes, dtypes, and what several ranks hold alike: replicated tensors, and shared parts of
    sharded ones.
    """
    before = None
    for rank in range(shards.tp):
        try:
            shards.weight_of(name, rank)
        except ValueError as error:
            before = error
            yield str(error)
    if before or unchanged or (layout.partition and max(layout.partition.replicas) == 1):
        return
    for rank, start in shards.differing(name):
        if layout.partition is None:
            yield f"{name} is replicated and differs between ranks 0 and {rank}"
        else:
            yield f"{name}: rows from {start} are shared and differ on rank {rank}"
