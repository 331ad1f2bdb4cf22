"""The files that hold what a rank saved: how they are named, in each form of folder."""

import re
from pathlib import Path

from .layout import SHARD

TAGGED = {part: f"{part}/{SHARD}" for part in ("model", "optim")}
# What `parallel_layers.save` writes, here and in the vendor's library: folders, or files with xser.
LOW_LEVEL = {"model": "tp_rank_{tp:02d}_pp_rank_{pp:02d}"}
# What `NeuronZero1Optimizer.save_sharded_state_dict` writes, here and there.
ZERO1 = {"optim": "optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}"}


def ranks_of(folder: Path, name: str) -> list[tuple[int, int, int]]:
    """`(dp, tp, pp)` of what has such a name in a folder. As numbers: rank 10 comes after 9."""
    number = re.compile(r"{(\w+):02d}")
    pattern, found = number.sub(r"(?P<\1>\\d{1,6})", name.replace(".", r"\.")), []
    for path in folder.glob(number.sub("*", name)):
        if match := re.fullmatch(pattern, path.relative_to(folder).as_posix()):
            ranks = {"dp": 0, "tp": 0, "pp": 0} | match.groupdict()
            found.append(tuple(map(int, ranks.values())))
    return sorted(found)
