"""`save_checkpoint`: everything that a run needs to go on, written aside and published as a whole.

    <folder>/<tag>/checkpoint           a checkpoint was begun here
    <folder>/<tag>/model/<shard>        a state dict for each tensor-parallel rank
    <folder>/<tag>/optim/<shard>        likewise; ZeRO-1: for each data-parallel rank too
    <folder>/<tag>/scheduler.pt  user_content.pt  random_state.pt
    <folder>/<tag>/metadata.json        mesh, full shapes and layouts: what tools go by
    <folder>/<tag>/done                 complete; step, and the digest of every file

A shard is `dp_rank_DD_tp_rank_TT_pp_rank_PP.pt`, DD being 00 where data-parallel ranks hold the
same; with xser also `<shard>.info.pt` and `<shard>.tensors/tensor_N.pt`.
"""

import json
import shutil
from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from ..parallel_layers import ranks
from ..parallel_layers.random import get_rng_state
from ..parallel_layers.utils import ensure_positive
from ..storage import Digest, objects, xser
from . import background, layout, tags
from .verify import publish


def save_checkpoint(
    checkpoint_dir_str: str,
    tag: str,
    model: torch.nn.Module | dict | None = None,
    optimizer=None,
    scheduler=None,
    user_content=None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    step: int | None = None,
) -> None:
    """Saves a checkpoint; every rank calls it. It is complete or absent, whatever happens in
    between.

    Args:
        checkpoint_dir_str: the folder of checkpoints, on a file system that all ranks see.
        tag: name of this one; a complete one of that name is replaced once this one is complete.
        model, optimizer: with a `state_dict`, or state dicts. Masters of a ZeRO-1 optimizer are
            saved with it. A dict of tensors without their parameters' marks does not say how they
            are sharded: with several tensor-parallel ranks, the tools then ask for the model.
        scheduler: with a `state_dict`, or one.
        user_content: tensors and plain data, such as step and data position. Rank 0's is saved.
        num_workers: how many ranks of a node write at a time.
        use_xser: write tensor by tensor, so that no more than one of them is on the host.
        num_kept_ckpts: how many complete checkpoints stay; None or -1 keeps all.
        async_save: copy to the host and return; the copy is written meanwhile. One such save is
            under way at most: the next call (or `finalize_checkpoint`, to be called before the
            process group is destroyed) waits for it and raises its error.
        zero1_optimizer: the optimizer's state dict is a ZeRO-1 shard; found out by itself.
        step: the training step; by default `user_content`'s `global_step` or `step`, else the
            number at the end of the tag.

    Raises:
        ValueError: an argument out of range; weights that are not finite, which never replace
            healthy ones; an object that is neither tensors nor plain data, with its place.
        OSError: full disk, read-only folder, …, with the path. On every rank, like all errors.
    """
    background.finalize_checkpoint()

    def check() -> None:
        if use_zero1_dcp or avoid_saving_lower_precision_weights:
            raise ValueError(
                "use_zero1_dcp and avoid_saving_lower_precision_weights are not supported: all "
                "weights are saved"
            )
        ranks.check_folder(checkpoint_dir_str)
        tags.check_tag(tag)
        if num_kept_ckpts not in (None, -1):  # these keep all
            ensure_positive(num_kept_ckpts=num_kept_ckpts)
        ranks.waves(num_workers)
        if step is not None and (type(step) is not int or step < 0):
            raise ValueError(f"step is {step!r}, must be a non-negative integer")
        check_stateful(model=model, optimizer=optimizer, scheduler=scheduler)

    ranks.together(check)
    folder, tag, mesh, rank = Path(checkpoint_dir_str), str(tag), ranks.mesh(), dist.get_rank()
    step = _step(tag, user_content) if step is None else step
    weights, state = ranks.together(
        lambda: (_state_of(model, keep_vars=True), _state_of(optimizer))
    )

    def check_state() -> None:
        objects.check(weights, "model")
        objects.check(state, "optimizer")
        objects.check_finite(weights or {}, "model")  # masters are the weights, to more digits

    # This ends a step: on xla a graph that is still pending would run once for every tensor. That
    # changes the random state, which is therefore read after it.
    ranks.together(check_state)
    small = {"scheduler": _state_of(scheduler), "user_content": user_content}
    small["random_state"] = {"ranks": ranks.gather(get_rng_state())}
    zero1 = zero1_optimizer or "base_state" in (state or {})
    metadata = ranks.together(_metadata, model, optimizer, weights, state, zero1)
    files = ranks.together(_files, weights, state, small, zero1, use_xser, async_save)
    aside = folder / (tag + tags.INCOMPLETE)
    ranks.from_rank_zero(lambda: str(tags.begin(folder, tag)))

    def write() -> dict[str, Digest]:
        written = layout.write_metadata(aside, metadata) if rank == 0 else {}
        return written | write_files(aside, files)

    def finish(written: list[dict[str, Digest]]) -> None:
        publish(aside, step, dict(ChainMap(*written)), mesh)
        tags.rotate(folder, num_kept_ckpts, tag)

    def work(group=None) -> None:
        try:
            written = ranks.gather(ranks.in_turn(write, num_workers, group), group)
            ranks.from_rank_zero(lambda: finish(written), group)
        except Exception:
            if rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    background.start(work) if async_save else work()


def write_files(folder: Path, files: Iterable[tuple]) -> dict[str, Digest]:
    """Writes files, each given as a name and the arguments of `xser.save`; digests by name."""
    written = {}
    for name, value, *how in files:
        written |= xser.save(value, folder / name, *how)
    return {str(path.relative_to(folder)): digest for path, digest in written.items()}


def check_stateful(**given) -> None:
    """Raises ValueError unless each has a state dict or is one, or is None."""
    for name, what in given.items():
        if not (what is None or isinstance(what, dict) or hasattr(what, "state_dict")):
            raise ValueError(f"{name} {what!r} does not have a state_dict and is not a dict")


def _step(tag: str, user_content) -> int | None:
    if isinstance(user_content, dict):
        for name in ("global_step", "step"):
            if type(user_content.get(name)) is int:
                return user_content[name]
    return tags.step_of(tag)


def _state_of(what, **options) -> dict | None:
    return what if what is None or isinstance(what, dict) else what.state_dict(**options)


def _files(
    weights: dict | None, state: dict | None, small: dict, zero1: bool, use_xser: bool, copy: bool
) -> list[tuple]:
    """The files that this rank writes, each as a name and the arguments of `xser.save`; with `copy`
    of copies on the host. All that is saved is checked, on every rank.
    """
    place, files = ranks.my_place(), []
    for name, value in small.items():
        objects.check(value, name)
    for part, value, shared in (("model", weights, True), ("optim", state, not zero1)):
        if value is not None and (use_xser or not shared or place.dp == 0):
            name = f"{part}/{layout.shard_name(0 if shared else place.dp, place.tp)}"
            among = (place.dp, place.replicas) if shared else (0, 1)
            files.append((name, value, use_xser, *among))
    if dist.get_rank() == 0:
        files += [(f"{name}.pt", value) for name, value in small.items() if value is not None]
    if copy:
        files = [(name, objects.to_host(value, True), *how) for name, value, *how in files]
    return files


def _metadata(model, optimizer, weights: dict | None, state: dict | None, zero1: bool) -> dict:
    layouts, ties = layout.describe(weights or {})
    whole = getattr(model, "original_module", lambda: model)()  # without the trainer's wrapper
    config = getattr(whole, "config", None)
    if hasattr(config, "to_json_string"):
        config = json.loads(config.to_json_string(use_diff=False))
    # The tensors of `model.state_dict()` are not the parameters, and do not have their marks.
    marked = any(isinstance(tensor, torch.nn.Parameter) for tensor in (weights or {}).values())
    known = marked or not layouts or ranks.mesh()["tp"] == 1 or not isinstance(model, dict)
    names = parameter_names(model, optimizer)
    return {
        "mesh": ranks.mesh(),
        "architecture": type(whole).__name__,
        "config": config if isinstance(config, dict) else None,
        "model": layout.to_json(layouts) if known else None,
        "tied": ties,
        "optimizer": None if state is None else {"zero1": zero1, "parameters": names},
    }


def parameter_names(model, optimizer) -> list[str] | None:
    """The names of the optimizer's parameters, in the order of its groups; None where one of them
    is not the model's.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(optimizer, "param_groups"):
        return None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    return None if None in found else found
