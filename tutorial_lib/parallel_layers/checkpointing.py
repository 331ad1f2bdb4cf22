"""Low-level `save` and `load`: one dict from each rank, without tags.

    <output_dir>/tp_rank_TT_pp_rank_PP/checkpoint.pt

as `neuronx_distributed.parallel_layers.checkpointing` writes it; each file is whole or absent. What
was saved with `save_xser` there, tensor by tensor, is read too. `tutorial_lib.checkpoint` is built
for more.
"""

from pathlib import Path

import torch
from torch import nn

from ..storage import objects, xser
from . import ranks


def _path(folder: str) -> Path:
    return Path(folder) / f"tp_rank_{ranks.my_place().tp:02d}_pp_rank_00"


def save(checkpoint: dict, output_dir: str, *, down_cast_bf16: bool = False) -> None:
    """Saves a dict of tensors and plain data from the first of the ranks with the same weights; on
    each node one rank at a time. Every rank calls it.

    Args:
        checkpoint: what to save, usually `{"model": model.state_dict(), …}`.
        output_dir: the folder, on a file system that all ranks see.
        down_cast_bf16: float32 tensors are saved as bfloat16, the optimizer's included.

    Raises:
        ValueError: an object that is neither tensors nor plain data, with its place; a model whose
            weights are not finite, which never replaces a healthy one; on every rank.
        OSError: full disk, read-only folder, …, with the path; on every rank.
    """

    def check() -> None:
        ranks.check_folder(output_dir)
        objects.check(checkpoint, "checkpoint")
        weights = checkpoint.get("model", checkpoint)
        objects.check_finite(weights if isinstance(weights, dict) else {}, "model")

    ranks.together(check)

    def write() -> None:
        if ranks.my_place().dp == 0:
            value = _to_bf16(checkpoint) if down_cast_bf16 else checkpoint
            _path(output_dir).mkdir(parents=True, exist_ok=True)
            xser.save(value, _path(output_dir) / "checkpoint.pt")

    ranks.in_turn(write, 1)


def _to_bf16(value):
    cast = {}

    def down(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        half = tensor.detach().to(torch.bfloat16)
        return cast.setdefault(objects.identity(tensor), half)  # a tied tensor once

    return objects.map_tensors(value, down)


def load(chkpt_path: str, model: nn.Module | None = None) -> dict:
    """Loads what `save` wrote, tensors on the host, ranks of a node one at a time. Every rank calls
    it.

    Args:
        chkpt_path: the folder.
        model: takes the entry `model`.

    Returns:
        The dict, without the entry that was loaded.

    Raises:
        FileNotFoundError, ValueError: a file is missing, broken, of another model, or holds code;
            on every rank.
    """

    def check() -> None:
        ranks.check_folder(chkpt_path)
        if not isinstance(model, (nn.Module, type(None))):
            raise ValueError(f"{model!r} is not a module to load into")

    ranks.together(check)

    def read() -> dict:
        path = _path(chkpt_path)
        if path.is_dir():
            path = path / "checkpoint.pt"
        found = xser.load(path, mmap=model is not None)
        if model is None:
            return found
        if not isinstance(found, dict) or "model" not in found:
            raise ValueError(f"{path} has no entry 'model'")
        try:
            model.load_state_dict(found.pop("model"))
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"{path} is of another model: {error}") from error
        return objects.to_host(found, copy=True)  # outlives the file, so it must not lie in it

    return ranks.in_turn(read, 1)
