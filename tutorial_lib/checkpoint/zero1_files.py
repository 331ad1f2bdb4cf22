"""The files of `NeuronZero1Optimizer.save_sharded_state_dict`: `optim.dp_rank_DD.tp_rank_TT`, one
for each rank, without a model beside them. Those of the vendor's library have the same names and
are read too.

The optimizer's state of any mesh is read, by the same way as from a checkpoint, for a parameter
knows itself how it is sharded. `save_checkpoint` is built for more.
"""

import re
from pathlib import Path

from ..backends import mark_step
from ..parallel_layers import ranks
from ..storage import xser
from .layout import layout_of
from .optimizer_state import load_optimizer, read_optimizer
from .shards import Shards
from .tags import Complete

SHARD = re.compile(r"optim\.dp_rank_(\d{1,6})\.tp_rank_(\d{1,6})")


class _Folder(Shards):
    """A folder of these files as a checkpoint of which there is the optimizer only."""

    def __init__(self, folder: Path):
        super().__init__(Complete(folder.name, folder, None, 0, {}, {}))
        for file in self.missing():
            raise FileNotFoundError(f"{file} is missing")

    def _found(self, part: str) -> list[tuple[int, int, int]]:
        names = self.path.glob("optim.dp_rank_*") if part == "optim" else ()
        matches = [SHARD.fullmatch(file.name) for file in names]
        return sorted((int(match[1]), int(match[2]), 0) for match in matches if match)

    def file(self, part: str, tp: int, dp: int = 0) -> Path:
        return self.path / f"optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}"


def save(optimizer, folder: str | Path, num_workers: int) -> None:
    """Writes this rank's state; see `NeuronZero1Optimizer.save_sharded_state_dict`."""
    ranks.together(ranks.check_folder, folder)
    ranks.together(ranks.waves, num_workers)
    place, tp, folder = ranks.my_place(), ranks.mesh()["tp"], Path(folder)
    state = optimizer.state_dict()
    mark_step()  # on xla no rank could compute by itself when its turn to write comes
    path = folder / f"optim.dp_rank_{place.dp:02d}.tp_rank_{place.tp:02d}"

    def prepare() -> None:
        """Makes the folder, without what a larger mesh may have left there."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            match = SHARD.fullmatch(file.name)
            if match and (int(match[1]) >= place.replicas or int(match[2]) >= tp):
                file.unlink()

    ranks.from_rank_zero(prepare)
    ranks.in_turn(lambda: xser.save(state, path), num_workers)


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
