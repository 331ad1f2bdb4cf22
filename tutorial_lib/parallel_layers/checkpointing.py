"""Low-level `save` and `load`: one dict from each rank, without tags.

    <output_dir>/tp_rank_TT_pp_rank_PP[_dp_rank_DD]/checkpoint.pt

or, with `save_xser`, `<output_dir>/tp_rank_TT_pp_rank_PP[_dp_rank_DD]` and beside it
`….tensors/tensor_N.pt`: the files of `neuronx_distributed.parallel_layers.checkpointing`, each
whole or absent. `tutorial_lib.checkpoint` is built for more.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..storage import objects, xser
from . import parallel_state, ranks
from .sharding import partition_of


def _path(folder: str, is_xser: bool, master_dp_only: bool) -> Path:
    place = ranks.my_place()
    name = f"tp_rank_{place.tp:02d}_pp_rank_{place.pp:02d}" + (
        "" if master_dp_only else f"_dp_rank_{place.dp:02d}"
    )
    return Path(folder) / name if is_xser else Path(folder) / name / "checkpoint.pt"


def save(
    checkpoint: dict,
    output_dir: str,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Saves a dict of tensors and plain data from each rank. Every rank calls it.

    Args:
        checkpoint: what to save, usually `{"model": model.state_dict(), …}`.
        output_dir: the folder, on a file system that all ranks see.
        save_serially: one rank of a node at a time.
        save_xser: tensor by tensor, so that no more than one of them is on the host.
        down_cast_bf16: float32 tensors are saved as bfloat16, the optimizer's included.
        master_dp_only: only the first of the ranks with the same weights writes.

    Raises:
        ValueError: an object that is neither tensors nor plain data, with its place; a model whose
            weights are not finite, which never replaces a healthy one; on every rank.
        OSError: full disk, read-only folder, …, with the path; on every rank.
    """
    ranks.together(ranks.check_folder, output_dir)
    ranks.together(objects.check, checkpoint, "checkpoint")
    weights = checkpoint.get("model", checkpoint)
    ranks.together(objects.check_finite, weights if isinstance(weights, dict) else {}, "model")
    path = _path(output_dir, save_xser, master_dp_only)

    def write() -> None:
        if master_dp_only and ranks.my_place().dp > 0:
            return
        value = _to_bf16(checkpoint) if down_cast_bf16 else checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        xser.save(value, path, save_xser)

    ranks.in_turn(write, 1) if save_serially and not save_xser else ranks.together(write)


def _to_bf16(value):
    cast = {}

    def down(tensor: torch.Tensor) -> torch.Tensor:  # a tied tensor once
        if tensor.dtype != torch.float32:
            return tensor
        key = objects.identity(tensor)
        if key not in cast:
            cast[key] = tensor.detach().to(torch.bfloat16)
        return cast[key]

    return objects.map_tensors(value, down)


def load(
    chkpt_path: str,
    model: nn.Module | None = None,
    model_or_optimizer: Any = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = True,
) -> dict | None:
    """Loads what `save` wrote, tensors on the host, ranks of a node one at a time. Every rank calls
    it.

    Args:
        chkpt_path: the folder; with `sharded=False` one file with the full weights, which each rank
            takes its part of.
        model, model_or_optimizer: what to load into (`model` is the older name).
        model_key: the entry to load into it; None for the whole dict.
        load_xser, master_dp_only: as they were saved.
        strict: the file and the model have to have the same tensors.
        weights_only: has to be True: no code from a file is run.

    Returns:
        The dict, without the entry that was loaded; None if that is all.

    Raises:
        FileNotFoundError, ValueError: a file is missing, broken, of another model, or holds code;
            on every rank.
    """
    target = model if model is not None else model_or_optimizer

    def check() -> None:
        if not weights_only:
            raise ValueError(
                "weights_only=False would run code from the file: only tensors and plain data are "
                "loaded"
            )
        ranks.check_folder(chkpt_path)
        if not sharded and not isinstance(target, nn.Module):
            raise ValueError(
                "a checkpoint that is not sharded needs a module as model_or_optimizer, to know "
                f"each rank's part, not {target!r}"
            )
        if not (target is None or hasattr(target, "load_state_dict")):
            raise ValueError(f"model_or_optimizer {target!r} has no load_state_dict")
        if not isinstance(model_key, (str, type(None))):
            raise ValueError(f"model_key {model_key!r} is neither a name nor None")

    ranks.together(check)
    path = _path(chkpt_path, load_xser, master_dp_only) if sharded else Path(chkpt_path)

    def read() -> dict | None:
        found = xser.load(path, mmap=isinstance(target, nn.Module))
        if target is None:
            return found
        if model_key is not None and (not isinstance(found, dict) or model_key not in found):
            raise ValueError(f"{path} has no entry {model_key!r}")
        state = found if model_key is None else found.pop(model_key)
        if not sharded:
            state = get_sharded_model_dict(target, state)
        try:
            target.load_state_dict(
                state, **({"strict": strict} if isinstance(target, nn.Module) else {})
            )
        except (RuntimeError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is of another model or optimizer: {error}") from error
        if model_key is None:
            return None
        # The rest outlives the file, so it must not lie in it.
        return objects.to_host(found, copy=True)

    at_once = os.environ.get("NXD_SKIP_RENDEZVOUS") == "1"
    return ranks.together(read) if at_once else ranks.in_turn(read, 1)


def get_sharded_model_dict(model: nn.Module, model_state_dict: dict) -> dict:
    """This rank's part of full weights, by the marks of the model's parameters."""
    rank, result = parallel_state.get_tensor_model_parallel_rank(), dict(model_state_dict)
    for name, parameter in model.state_dict(keep_vars=True).items():
        if (
            name in result
            and isinstance(parameter, torch.Tensor)
            and (partition := partition_of(parameter)) is not None
        ):
            result[name] = partition.shard(result[name], rank)
    return result
