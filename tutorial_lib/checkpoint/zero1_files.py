"""The files of `NeuronZero1Optimizer.save_sharded_state_dict`: `optim.dp_rank_DD.tp_rank_TT`, one
for each rank, without a model beside them: those of the vendor's library, so that each reads the
other's.

The optimizer's state of any mesh is read, by the same way as from a checkpoint, for a parameter
knows itself how it is cut. `save_checkpoint` is built for more.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ..backends import mark_step
from ..optimizer.shards import join_shards, shard_length
from ..parallel_layers import comm
from . import ranks, tensors
from .layout import layout_of
from .optimizer_state import MASTER, load_optimizer, read_optimizer
from .reader import Reader
from .tags import Complete

SHARD = re.compile(r"optim\.dp_rank_(\d+)\.tp_rank_(\d+)")


class _Folder(Reader):
    """A folder of these files as a checkpoint of which there is the optimizer only."""

    def __init__(self, folder: Path):
        super().__init__(Complete(folder.name, folder, None, 0, {}, {}))
        if missing := self.missing():
            raise FileNotFoundError(f"{missing[0]} is missing")

    def _shards(self, part: str) -> Iterator[tuple[int, int, int]]:
        if part == "optim" and self.path.is_dir():
            for file in self.path.iterdir():
                if match := SHARD.fullmatch(file.name):
                    yield int(match[1]), int(match[2]), 0

    def optimizer_file(self, dp: int, tp: int, pp: int = 0) -> Path:
        return _file(self.path, dp, tp)


def _file(folder: Path, dp: int, tp: int) -> Path:
    return folder / f"optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}"


def _by_rows(optimizer) -> dict:
    """The optimizer's state with each shard cut along dim 0, rows of zeros at the end, as the
    vendor's library (torch-xla's `ZeroRedundancyOptimizer`) has it.
    """
    state, here = optimizer.state_dict(), optimizer.sharding
    rank, size = here["rank"], here["size"]
    shapes = {number: torch.Size(info["shape"]) for number, info in state["shape_info"].items()}

    def cut(number: int, shard):
        if not isinstance(shard, torch.Tensor) or not shard.dim():  # a step count and the like
            return shard
        shards = comm.all_gather(shard, 0, optimizer.sharding_groups).chunk(size)
        rows = join_shards(shards, shapes[number] or (1,))
        length = shard_length(len(rows), size)
        part = rows[rank * length : (rank + 1) * length]
        return torch.cat([part, part.new_zeros(length - len(part), *rows.shape[1:])])

    result = {"state": state["state"], "param_groups": state["param_groups"], "shape_info": shapes}
    result["base_state"] = {
        number: {field: cut(number, shard) for field, shard in fields.items()}
        for number, fields in state["base_state"].items()
    }
    if MASTER in state:
        result[MASTER] = {number: cut(number, shard) for number, shard in state[MASTER].items()}
    return result


def save(optimizer, folder: str | Path, num_workers: int) -> None:
    """Writes this rank's state; see `NeuronZero1Optimizer.save_sharded_state_dict`."""
    ranks.together(ranks.check_folder, folder)
    ranks.together(ranks.waves, num_workers)
    place, folder, mesh = ranks.my_place(), Path(folder), ranks.mesh()
    state = {**_by_rows(optimizer), "dp_rank": place.dp, "tp_rank": place.tp}
    mark_step()  # on xla no rank could gather by itself when its turn to write comes

    def prepare() -> None:
        """Makes the folder, without what a larger mesh may have left there."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            match = SHARD.fullmatch(file.name)
            if match and (int(match[1]) >= place.replicas or int(match[2]) >= mesh["tp"]):
                file.unlink()

    ranks.from_rank_zero(prepare)
    ranks.in_turn(lambda: tensors.save_plain(state, _file(folder, place.dp, place.tp)), num_workers)


def load(optimizer, folder: str | Path, num_workers: int) -> None:
    """Loads this rank's state; see `NeuronZero1Optimizer.load_sharded_state_dict`."""
    ranks.together(ranks.check_folder, folder)
    ranks.together(ranks.waves, num_workers)
    source = ranks.together(_Folder, Path(folder))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    targets = {str(number): layout_of(parameter) for number, parameter in enumerate(parameters)}
    state = ranks.in_turn(
        lambda: read_optimizer(source, targets, optimizer, list(targets)), num_workers
    )
    ranks.together(load_optimizer, optimizer, state)
