"""`load_checkpoint`: the latest complete checkpoint, or a named one, back into a run; at another
mesh too.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from ..parallel_layers import ranks
from ..parallel_layers.random import set_rng_state
from ..storage.objects import to_host
from . import background, layout, tags
from .optimizer_state import load_optimizer, read_optimizer
from .save import check_stateful, parameter_names
from .shards import Shards

MISFITS = (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError)


def has_checkpoint(checkpoint_dir_str: str) -> bool:
    """True if the folder holds a complete checkpoint."""
    return bool(tags.complete(checkpoint_dir_str))


def load_checkpoint(
    path: str,
    tag: str | None = None,
    model: torch.nn.Module | dict | None = None,
    optimizer=None,
    scheduler=None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    restore_random_state: bool | None = None,
):
    """Loads a checkpoint; every rank calls it. Weights first, then the optimizer, which may derive
    masters from them.

    A checkpoint of another tensor-parallel or data-parallel size is resharded on the way.

    Args:
        path: the folder of checkpoints.
        tag: which one; by default the complete one that was saved last.
        model, optimizer, scheduler: what to load into; a dict is filled.
        num_workers: how many ranks of a node read at a time.
        strict: the checkpoint and the model have to have the same tensors.
        restore_random_state: put the generators of this rank back too; by default if an optimizer
            is given, that is, if training goes on. At another mesh than the one that saved, they
            stay as they are, with a warning.

    Returns:
        The `user_content` that was saved, or None.

    Raises:
        RuntimeError: there is no complete checkpoint in the folder.
        FileNotFoundError: there is no such tag, or a file of it is missing.
        ValueError: a file is truncated, altered, or holds code; the model is another one; sizes
            that do not go together; several that may be the latest. On every rank.
    """
    background.finalize_checkpoint()

    def check() -> None:
        if use_zero1_dcp:
            raise ValueError("use_zero1_dcp is not supported")
        ranks.check_folder(path)
        ranks.waves(num_workers)
        check_stateful(model=model, optimizer=optimizer, scheduler=scheduler)

    ranks.together(check)
    source = ranks.together(Shards, ranks.from_rank_zero(lambda: _choose(Path(path), tag)))
    targets, ties = {}, []
    if isinstance(model, torch.nn.Module):
        targets, ties = layout.describe(model.state_dict(keep_vars=True))
        if source.layouts is None:
            ranks.from_rank_zero(lambda: _check_shared(source, targets))
    if model is not None:
        ranks.in_turn(lambda: _load_model(source, model, targets, ties, strict), num_workers)
    if optimizer is not None:
        names = parameter_names(model, optimizer)
        state = ranks.in_turn(
            lambda: read_optimizer(source, targets, optimizer, names), num_workers
        )
        ranks.together(_fill, optimizer, state, source.path / "optim", load_optimizer)
    if scheduler is not None:
        state = ranks.together(source.object, "scheduler.pt")
        load = dict.update if isinstance(scheduler, dict) else type(scheduler).load_state_dict
        ranks.together(_fill, scheduler, state, source.path / "scheduler.pt", load)
    if restore_random_state or (restore_random_state is None and optimizer is not None):
        ranks.together(_restore_random_state, source)
    return ranks.together(
        lambda: source.object("user_content.pt") if source.has("user_content.pt") else None
    )


def _choose(folder: Path, tag: str | None) -> tags.Complete:
    chosen = tags.latest(folder) if tag is None else tags.find(folder, tag)
    if halves := tags.incomplete(folder):
        names = ", ".join(half.name for half in halves)
        warnings.warn(
            f"{folder}: {names} incomplete, left by an interrupted save; loading {chosen.tag}",
            stacklevel=2,
        )
    return chosen


def _fill(target, state: dict, file: Path, load) -> None:
    """`load(target, state)`; raises its objections with the file."""
    try:
        load(target, state)
    except MISFITS as error:
        raise ValueError(f"{file} is of another {type(target).__name__}: {error}") from error


def _check_shared(source: Shards, targets: dict[str, layout.Layout]) -> None:
    """Checks that ranks agree on what they share, in a checkpoint of another library. Warns of
    replicated tensors that differ.

    Raises:
        ValueError: other ranks share a shard there than the neighbours that share it here.
    """
    source.use_layouts(targets)
    held, drifted = source.shard("model", 0), []
    for name in filter(held.__contains__, targets):
        rank, _ = next(source.differing(name), (0, 0))
        if rank and source.layouts[name].partition:
            raise ValueError(
                f"{source.file('model', rank)}: {name} differs from the previous rank's copy: key "
                f"and value heads are on the {source.tp} ranks in another order than here"
            )
        drifted += [name] if rank else []
    if drifted:
        warnings.warn(
            f"{source.path}: {', '.join(drifted)} are replicated and differ between the ranks that "
            "saved them; a rank takes its own, or at another size that of rank 0",
            stacklevel=2,
        )


def _load_model(source: Shards, model, targets: dict, ties: list[list[str]], strict: bool) -> None:
    """Loads this rank's file as it is, or resharded.

    Raises:
        ValueError: the checkpoint is of another model, or cannot be resharded; with both degrees.
    """
    place, tp = ranks.my_place(), ranks.mesh()["tp"]
    file = source.file("model", place.tp)
    if source.tp == tp:
        weights = source.shard("model", place.tp)
    elif isinstance(model, dict):
        raise ValueError(
            f"{source.path} was saved with tensor-parallel size {source.tp}, this run has {tp}: "
            "give the model, not a dict, to have it resharded"
        )
    else:
        weights = _resharded(source, targets, place.tp)
    if isinstance(model, dict):
        model.update(to_host(weights, copy=True))
        return
    weights = _settle_ties(weights, ties, file)
    _fill(model, weights, file, lambda model, state: model.load_state_dict(state, strict=strict))


def _resharded(source: Shards, targets: dict[str, layout.Layout], rank: int) -> dict:
    source.use_layouts(targets)
    result = dict.fromkeys(source.layouts)  # what is not in the model is unexpected
    for name in filter(result.__contains__, targets):
        saved, target = source.layouts[name], targets[name]
        if saved.shape != target.shape:
            raise ValueError(
                f"{source.path} (tensor-parallel size {source.tp}): {name} has full shape "
                f"{saved.shape}, {target.shape} here"
            )
        result[name] = source.to(name, source.weights(name), target, rank)
    return result


def _settle_ties(weights: dict, ties: list[list[str]], file: Path) -> dict:
    """Gives each name of a tied tensor the tensor that the file has under any of them.

    Raises:
        ValueError: the file has two different ones.
    """
    result = type(weights)(weights)
    if hasattr(weights, "_metadata"):
        result._metadata = weights._metadata
    for group in ties:
        present = [name for name in group if name in weights]
        for name in present[1:]:
            if not torch.equal(weights[name], weights[present[0]]):
                raise ValueError(
                    f"{file}: {present[0]} and {name} are one tensor in the model and differ in "
                    "the file"
                )
        result |= dict.fromkeys(group, weights[present[0]]) if present else {}
    return result


def _restore_random_state(source: Shards) -> None:
    there = source.has("random_state.pt")
    if there and source.mesh == ranks.mesh():
        state = source.object("random_state.pt")
        try:
            set_rng_state(state["ranks"][dist.get_rank()])
        except MISFITS as error:
            file = source.path / "random_state.pt"
            raise ValueError(f"{file} does not hold the random states: {error}") from error
    elif dist.get_rank() == 0:
        why = "does not hold any"
        if there:
            why = f"was saved on mesh {source.mesh}, not {ranks.mesh()}"
        warnings.warn(f"random states stay as they are: {source.path} {why}", stacklevel=2)
