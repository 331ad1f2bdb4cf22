"""The files of `NeuronZero1Optimizer.save_sharded_state_dict`: `optim.dp_rank_DD.tp_rank_TT`, one
for each rank, without a model beside them. Those of the vendor's library have the same names and
are read too.

State saved on any mesh can be read, in the same way as from a checkpoint, because each parameter
knows how it is sharded. `save_checkpoint` is built for more.
"""

from pathlib import Path

from ..backends import mark_step
from ..parallel_layers import ranks
from ..storage import xser
from .layout import layout_of
from .optimizer_state import load_optimizer, read_optimizer
from .shard_files import ZERO1, ranks_of
from .shards import Shards
from .tags import Complete


def save(optimizer, folder: str | Path, num_workers: int) -> None:
    """Writes this rank's state; see `NeuronZero1Optimizer.save_sharded_state_dict`."""
    ranks.together(ranks.check_folder, folder)
    ranks.together(ranks.waves, num_workers)
    place, tp, folder = ranks.my_place(), ranks.mesh()["tp"], Path(folder)
    state = optimizer.state_dict()
    mark_step()  # on xla no rank could compute by itself when its turn to write comes
    path = folder / ZERO1["optim"].format(dp=place.dp, tp=place.tp)

    def prepare() -> None:
        """Makes the folder, without what a larger mesh may have left there."""
        folder.mkdir(parents=True, exist_ok=True)
        for dp, rank, _ in ranks_of(folder, ZERO1["optim"]):
            if dp >= place.replicas or rank >= tp:
                (folder / ZERO1["optim"].format(dp=dp, tp=rank)).unlink()

    ranks.from_rank_zero(prepare)
    ranks.in_turn(lambda: xser.save(state, path), num_workers)


def _open(folder: Path) -> Shards:
    source = Shards(Complete(folder.name, folder), names=ZERO1)
    for file in source.missing():
        raise FileNotFoundError(f"{file} is missing")
    return source


def load(optimizer, folder: str | Path, num_workers: int) -> None:
    """Loads this rank's state; see `NeuronZero1Optimizer.load_sharded_state_dict`."""
    ranks.together(ranks.check_folder, folder)
    ranks.together(ranks.waves, num_workers)
    source = ranks.together(_open, Path(folder))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    targets = {str(number): layout_of(parameter) for number, parameter in enumerate(parameters)}
    state = ranks.in_turn(
        lambda: read_optimizer(source, targets, optimizer, list(targets)), num_workers
    )
    ranks.together(load_optimizer, optimizer, state)
