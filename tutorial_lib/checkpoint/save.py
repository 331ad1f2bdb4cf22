"""`save_checkpoint`: everything that a run needs to go on, written aside and published as a whole.

    <folder>/<tag>/checkpoint           a checkpoint was begun here
    <folder>/<tag>/model/<shard>        a state dict for each tensor- and pipeline-parallel rank
    <folder>/<tag>/optim/<shard>        likewise; ZeRO-1: for each data-parallel rank too
    <folder>/<tag>/scheduler.pt  user_content.pt  random_state.pt
    <folder>/<tag>/metadata.json        mesh, full shapes and layouts: what tools go by
    <folder>/<tag>/done                 complete; step, and the digest of every file

A shard is `dp_rank_DD_tp_rank_TT_pp_rank_PP.pt`, DD being 00 where data-parallel ranks hold the
same; with xser also `<shard>.info.pt` and `<shard>.tensors/tensor_N.pt`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..parallel_layers import ranks
from ..parallel_layers.random import get_rng_state
from ..storage import Digest, objects, xser
from . import background, layout, tags

Job = Callable[[Path], xser.Digests]  # writes something into the folder aside


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
            under way at most: the next call (or `finalize_checkpoint`) waits for it and raises its
            error.
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
        tags.check_kept(num_kept_ckpts)
        ranks.waves(num_workers)
        if step is not None and (type(step) is not int or step < 0):
            raise ValueError(f"step {step!r} must be an integer from 0 on")
        for name, what in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
            if not (what is None or isinstance(what, dict) or hasattr(what, "state_dict")):
                raise ValueError(f"{name} {what!r} does not have state_dict and is not a dict")

    ranks.together(check)
    folder, tag, mesh = Path(checkpoint_dir_str), str(tag), ranks.mesh()
    step = _step(tag, user_content) if step is None else step
    content = ranks.together(_Content, model, optimizer, scheduler, user_content, zero1_optimizer)
    jobs = content.jobs(use_xser, async_save)
    aside = folder / (tag + tags.INCOMPLETE)
    ranks.from_rank_zero(lambda: str(tags.begin(folder, tag)))

    def write() -> dict[str, Digest]:
        written = {}
        for job in jobs:
            written |= job(aside)
        return {str(path.relative_to(aside)): digest for path, digest in written.items()}

    def publish(files: dict[str, Digest]) -> None:
        tags.publish(aside, step, files, mesh)
        tags.rotate(folder, num_kept_ckpts, tag)

    if async_save:
        background.start(background.Save(aside, write, publish, ranks.predecessors(num_workers)))
        return
    try:
        written = ranks.in_turn(write, num_workers)
        files = {name: digest for part in ranks.gather(written) for name, digest in part.items()}
        ranks.from_rank_zero(lambda: publish(files))
    except Exception:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _step(tag: str, user_content) -> int | None:
    if isinstance(user_content, dict):
        for name in ("global_step", "step"):
            if type(user_content.get(name)) is int:
                return user_content[name]
    return tags.step_of(tag)


def _state_of(what, **options) -> dict | None:
    return what if what is None or isinstance(what, dict) else what.state_dict(**options)


class _Content:
    """What is saved, as seen by one rank."""

    def __init__(self, model, optimizer, scheduler, user_content, zero1: bool):
        self._model, self._optimizer = model, optimizer
        self._weights = _state_of(model, keep_vars=True)
        self._state = _state_of(optimizer)
        self._zero1 = zero1 or (self._state is not None and "base_state" in self._state)
        self._small = {
            "random_state": {"ranks": []},
            "scheduler": _state_of(scheduler),
            "user_content": user_content,
        }
        self._small = {name: value for name, value in self._small.items() if value is not None}

    def jobs(self, use_xser: bool, copy: bool) -> list[Job]:
        """What this rank has to write. With `copy` from copies on the host."""
        layouts, ties = ranks.together(layout.describe, self._weights or {})
        shards = ranks.together(self._shards, use_xser, copy)
        states = ranks.gather(get_rng_state())
        stages = {}  # each pipeline stage holds tensors of its own
        for part in ranks.gather(layout.to_json(layouts)):
            stages |= part
        if dist.get_rank() == 0:
            self._small["random_state"]["ranks"] = states
            metadata = self._metadata(stages, ties)
            shards.append(lambda aside: layout.write_metadata(aside, metadata))
        return shards + ranks.together(self._objects, copy)

    def _shards(self, use_xser: bool, copy: bool) -> list[Job]:
        place, jobs = ranks.my_place(), []
        first = next((t for t in (self._weights or {}).values() if torch.is_tensor(t)), None)
        if first is not None and first.device.type == "xla":
            import torch_xla

            torch_xla.sync()  # a graph that is still pending would run once for every tensor
        for name, value, shared in (
            ("model", self._weights, True),
            ("optim", self._state, not self._zero1),
        ):
            if value is None:
                continue
            objects.check(value, "optimizer" if name == "optim" else name)
            if name == "model":  # masters are the weights, to more digits
                objects.check_finite(value, name)
            if place.dp > 0 and shared and not use_xser:
                continue
            value = objects.to_host(value, copy=True) if copy else value
            among = (place.dp, place.replicas) if shared else (0, 1)
            file = f"{name}/{layout.shard_name(0 if shared else place.dp, place.tp, place.pp)}"
            jobs.append(
                lambda aside, value=value, file=file, among=among: xser.save(
                    value, aside / file, use_xser, *among
                )
            )
        return jobs

    def _objects(self, copy: bool) -> list[Job]:
        """The small files, which rank 0 writes. They are checked on every rank."""
        for name, value in self._small.items():
            objects.check(value, name)
        if dist.get_rank() > 0:
            return []
        held = {name: objects.to_host(value, copy) for name, value in self._small.items()}
        return [
            lambda aside, name=name, value=value: xser.save(value, aside / f"{name}.pt")
            for name, value in held.items()
        ]

    def _knows_layouts(self) -> bool:
        """False for `model.state_dict()`: its tensors are not the parameters, and do not have their
        marks.
        """
        given = self._model if isinstance(self._model, dict) else {}
        parts = [tensor for tensor in given.values() if isinstance(tensor, torch.Tensor)]
        marked = any(isinstance(tensor, torch.nn.Parameter) for tensor in parts)
        return marked or not parts or ranks.mesh()["tp"] == 1

    def _metadata(self, layouts: dict, ties: list[list[str]]) -> dict:
        # without the trainer's wrapper
        whole = getattr(self._model, "original_module", lambda: self._model)()
        config, names = (
            getattr(whole, "config", None),
            parameter_names(self._model, self._optimizer),
        )
        if hasattr(config, "to_json_string"):
            config = json.loads(config.to_json_string(use_diff=False))
        optimizer = {"zero1": self._zero1, "parameters": names}
        return {
            "mesh": ranks.mesh(),
            "architecture": type(whole).__name__,
            "config": config if isinstance(config, dict) else None,
            "model": layouts if self._knows_layouts() else None,
            "tied": ties,
            "optimizer": None if self._state is None else optimizer,
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
