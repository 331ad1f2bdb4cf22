"""What the ranks print, as the reader sees it: in rank order, what is equal once, and live while a
cell takes long.
"""

import os
import re
import time
from collections.abc import Mapping

from IPython.display import publish_display_data

from tutorial_lib.lab.mesh.failures import name_ranks
from tutorial_lib.lab.mesh.ranks import Rank

LIVE_AFTER = 2.0  # seconds after which a cell's output on its first rank is shown as it comes
_CELL_FILE = re.compile(r"<ipython-input-[\w-]+>")


def by_rank(texts: Mapping[int, str], world_size: int) -> str:
    """One block of text, ordered by rank; ranks that printed the same share one entry.

    Args:
        texts: what each rank printed.
        world_size: with it, `[all 4 ranks]` instead of a list of them.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        if text := as_shown(texts[rank]).rstrip():
            ranks_of.setdefault(text, []).append(rank)
    blocks = []
    for text, ranks in ranks_of.items():
        everyone = len(ranks) == world_size > 1
        label = f"[all {world_size} ranks]" if everyone else f"[{name_ranks(ranks)}]"
        blocks.append(f"{label}\n{text}" if "\n" in text else f"{label} {text}")
    return "\n".join(blocks)


def as_shown(text: str) -> str:
    """The text as a reader wants it.

    Of a line that was overwritten (progress bars) the last state is left, as on a terminal. A cell
    is called so, and not by the name that IPython gives it. Gloo's greetings are left out.
    """
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    lines = (_CELL_FILE.sub("cell", line) for line in lines if not line.startswith("[Gloo] Rank "))
    return "\n".join(lines)


class LiveOutput:
    """Shows what the ranks print: of a long cell the first rank's lines at once, the rest in rank
    order at the end.

    Notebooks that run without a reader (IPP_NONINTERACTIVE=1) show everything at the end.
    """

    def __init__(self, ranks: dict[int, Rank]):
        self._ranks, self._first = ranks, min(ranks)
        self._began = time.monotonic()
        self._live = os.environ.get("IPP_NONINTERACTIVE", "") in ("", "0")
        self._begun = False  # whether some of it is out already

    def tick(self) -> None:
        """Called while the cell runs."""
        if not self._live or time.monotonic() - self._began < LIVE_AFTER:
            return
        output = self._ranks[self._first].output
        complete, newline, rest = "".join(output).rpartition("\n")
        if newline:
            output[:] = [rest]
            if not self._begun:
                print(f"[rank {self._first}]")
            self._begun = True
            print(as_shown(complete), flush=True)

    def finish(self, world_size: int) -> None:
        """Called when the cell has ended, well or not."""
        texts = {rank: "".join(one.output) for rank, one in self._ranks.items()}
        if text := by_rank(texts, world_size):
            print(text)
        for one in self._ranks.values():
            for data, metadata in one.displays:
                publish_display_data(data, metadata)
