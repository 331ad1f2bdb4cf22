"""The folders that `parallel_layers.save` writes, here and in the vendor's library, which have
neither a tag nor metadata: `tp_rank_TT_pp_rank_PP/checkpoint.pt`, or a file `tp_rank_TT_pp_rank_PP`
with xser.
"""

import re
from pathlib import Path

from .shards import Shards
from .tags import Complete

FOLDER = re.compile(r"tp_rank_(\d{1,6})_pp_rank_(\d{1,6})")


class LowLevelShards(Shards):
    """Reads the model that is in such a folder.

    Raises:
        FileNotFoundError, ValueError: a shard is missing or broken, or does not hold a model.
    """

    def __init__(self, path: Path):
        super().__init__(Complete(path.name, path, step=None, sequence=0, files={}, mesh={}))

    def _found(self, part: str) -> list[tuple[int, int, int]]:
        matches = [FOLDER.fullmatch(item.name) for item in self.path.iterdir()]
        found = sorted((0, *map(int, match.groups())) for match in matches if match)
        return found if part == "model" else []

    def file(self, part: str, tp: int, dp: int = 0) -> Path:
        item = self.path / f"tp_rank_{tp:02d}_pp_rank_00"
        return item if item.is_file() else item / "checkpoint.pt"

    def shard(self, part: str, tp: int, dp: int = 0) -> dict:
        held = super().shard(part, tp, dp).get("model")
        if not isinstance(held, dict):
            raise ValueError(f"{self.file(part, tp)} does not have an entry 'model' with tensors")
        return held


def is_low_level(path: str | Path) -> bool:
    return any(Path(path).glob("tp_rank_*_pp_rank_*"))
