"""`load_checkpoint`: the latest complete checkpoint, or a named one, back into a run; at another
mesh too.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..parallel_layers.random import set_rng_state
from . import background, layout, ranks, reader, tags
from .optimizer_state import load_optimizer, read_optimizer
from .save import parameter_names


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

    A checkpoint of another tensor-parallel or data-parallel size is cut anew on the way.

    Args:
        path: the folder of checkpoints.
        tag: which one; by default the latest complete one, by its step.
        model, optimizer, scheduler: what to load into; a dict is filled.
        num_workers: how many ranks of a node read at a time.
        strict: the checkpoint and the model have to have the same tensors.
        restore_random_state: put the generators of this rank back too; by default if an optimizer
            is given, that is, if training goes on. At another mesh than the one that saved, they
            stay as they are, with a warning.

    Returns:
        The `user_content` that was saved, or None.

    Raises:
        RuntimeError: no complete checkpoint in the folder.
        FileNotFoundError: no such tag, or a file of it is missing.
        ValueError: a file is truncated, altered, or holds code; the model is another one; sizes
            that do not go together. With the file's name, on every rank.
    """
    background.finalize_checkpoint()

    def check() -> None:
        if use_zero1_dcp:
            raise ValueError("use_zero1_dcp is not supported")
        ranks.check_folder(path)
        ranks.waves(num_workers)
        if not (model is None or isinstance(model, (dict, torch.nn.Module))):
            raise ValueError(f"model {model!r} is neither a module nor a dict")
        for name, what in {"optimizer": optimizer, "scheduler": scheduler}.items():
            if not (what is None or isinstance(what, dict) or hasattr(what, "load_state_dict")):
                raise ValueError(f"{name} {what!r} has no load_state_dict and is no dict")

    ranks.together(check)
    chosen = ranks.from_rank_zero(lambda: _choose(Path(path), tag))
    source = ranks.together(reader.Reader, chosen)
    place, same = ranks.my_place(), ranks.together(_same_mesh, source)
    if model is not None:
        if source.layouts is None and not isinstance(model, dict):
            live = model.state_dict(keep_vars=True)
            ranks.from_rank_zero(lambda: _check_shared_parts(source, live))
        weights = ranks.in_turn(lambda: _weights(source, model, place, strict), num_workers)
        ranks.together(
            lambda: _load_model(model, weights, strict, source.model_file(place.tp, place.pp))
        )
        del weights
    if optimizer is not None:
        targets, names = None, parameter_names(model, optimizer)
        if isinstance(model, torch.nn.Module):
            targets, _ = layout.describe(model.state_dict(keep_vars=True))
        state = ranks.in_turn(
            lambda: read_optimizer(source, targets, optimizer, names), num_workers
        )
        ranks.together(_fill, optimizer, state, source.path / "optim", load_optimizer)
    if scheduler is not None:
        state = ranks.together(source.object, "scheduler.pt")
        ranks.together(_fill, scheduler, state, source.path / "scheduler.pt", _load_scheduler)
    if restore_random_state or (restore_random_state is None and optimizer is not None):
        ranks.together(_restore, source, same)
    return ranks.together(
        lambda: source.object("user_content.pt") if source.has("user_content.pt") else None
    )


def _load_scheduler(scheduler, state: dict) -> None:
    if isinstance(scheduler, dict):
        scheduler.update(state)
    else:
        scheduler.load_state_dict(state)


def _fill(target, state: dict, file: Path, load: Callable[[object, dict], None]) -> None:
    """`load(target, state)`; what that objects to is said with the file."""
    try:
        load(target, state)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        name = type(target).__name__
        raise ValueError(f"{file} is of another {name}: {error}") from error


def _choose(folder: Path, tag: str | None) -> tags.Complete:
    chosen = tags.latest(folder) if tag is None else tags.find(folder, tag)
    if halves := tags.incomplete(folder):
        names = ", ".join(half.name for half in halves)
        warnings.warn(
            f"{folder}: {names} incomplete, left by an interrupted save; loading {chosen.tag}",
            stacklevel=2,
        )
    return chosen


def _same_mesh(source: reader.Reader) -> bool:
    """True if the mesh that saved has the sizes of this one.

    Raises:
        ValueError: another pipeline-parallel size, for which nothing is cut anew; with both.
    """
    now = ranks.mesh()
    if source.pp != now["pp"]:
        raise ValueError(
            f"{source.path} was saved with pipeline-parallel size {source.pp}, this run has "
            f"{now['pp']}"
        )
    return source.mesh == now


def _weights(source: reader.Reader, model, place: ranks.Place, strict: bool) -> dict:
    """This rank's state dict: its file as it lies there, or cut anew."""
    now = ranks.mesh()
    if source.tp == now["tp"]:
        return source.model_shard(place.tp, place.pp)
    if isinstance(model, dict):
        raise ValueError(
            f"{source.path} was saved with tensor-parallel size {source.tp}, this run has "
            f"{now['tp']}: "
            "give the model, not a dict, to have it cut anew"
        )
    targets, ties = layout.describe(model.state_dict(keep_vars=True))
    return source.resharded(targets, ties, place.tp, strict)


def _check_shared_parts(source: reader.Reader, live: dict) -> None:
    """Raises ValueError where another library wrote parts that several ranks share, and had other
    ranks share them than the neighbours that do here.
    """
    targets, _ = layout.describe(live)
    for name, saved in source.guess(targets).items():
        if saved.partition is None or max(saved.partition.replicas) == 1:
            continue
        for rank, _ in source.differing_parts(name, saved):
            raise ValueError(
                f"{source.model_file(rank)}: {name} is not what the rank before has of it. Key and "
                f"value heads lie on the {source.tp} ranks in another order than here, and there "
                "is nothing that says which"
            )


def _load_model(model, weights: dict, strict: bool, file: Path) -> None:
    if isinstance(model, dict):
        model.update(weights)
        return
    live = model.state_dict(keep_vars=True)
    _, ties = layout.describe(live)
    _settle_ties(weights, ties, file)
    missing, unexpected = sorted(live.keys() - weights.keys()), sorted(weights.keys() - live.keys())
    if strict and (missing or unexpected):
        raise ValueError(
            f"{file} is of another model: it lacks {_some(missing)}, and has {_some(unexpected)} "
            "in excess"
        )
    wrong = [
        f"{name} {tuple(weights[name].shape)}, here {tuple(live[name].shape)}"
        for name in live.keys() & weights.keys()
        if isinstance(live[name], torch.Tensor)
        and isinstance(weights[name], torch.Tensor)
        and weights[name].shape != live[name].shape
    ]
    if wrong:
        raise ValueError(f"{file} is of another model: {_some(sorted(wrong))}")
    if dist.get_rank() == 0 and (
        cast := [
            n
            for n in live
            if isinstance(live[n], torch.Tensor)
            and isinstance(weights.get(n), torch.Tensor)
            and weights[n].dtype != live[n].dtype
        ]
    ):
        first = cast[0]
        warnings.warn(
            f"{file}: {len(cast)} tensors change dtype, {first}: {weights[first].dtype} → "
            f"{live[first].dtype}",
            stacklevel=2,
        )
    model.load_state_dict(weights, strict=strict)


def _settle_ties(weights: dict, ties: list[list[str]], file: Path) -> None:
    """Gives each name of a tied tensor the tensor that the file has under any of them.

    Raises:
        ValueError: the file has two different ones.
    """
    for group in ties:
        present = [name for name in group if name in weights]
        for name in present[1:]:
            if not torch.equal(weights[name], weights[present[0]]):
                raise ValueError(
                    f"{file}: {present[0]} and {name} are one tensor in the model and differ in "
                    "the file"
                )
        for name in group:
            if present:
                weights[name] = weights[present[0]]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown or 'nothing'}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _restore(source: reader.Reader, same: bool) -> None:
    if source.has("random_state.pt") and same:
        set_rng_state(source.object("random_state.pt")["ranks"][dist.get_rank()])
    elif dist.get_rank() == 0:
        why = (
            f"was saved on mesh {source.mesh}, not {ranks.mesh()}"
            if source.has("random_state.pt")
            else "holds none"
        )
        warnings.warn(f"random states stay as they are: {source.path} {why}", stacklevel=2)
