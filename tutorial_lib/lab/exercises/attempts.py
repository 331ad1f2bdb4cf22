"""Which cells of the notebook have run: a check judges what its exercise's cell defined when it was
last run, not what an earlier attempt has left behind.
"""

import re
from typing import NamedTuple

from IPython import get_ipython


class Run(NamedTuple):
    """One run of a cell."""

    source: str
    cell: str | None  # the cell's id; None if the program that runs the notebook does not send it
    error: str  # that ended it; empty if it ended well

    def binds(self, name: str) -> bool:
        """Whether it defines a function or class of this name, or assigns to it."""
        defined = rf"^\s*(?:def|class)\s+{name}\b"
        assigned = rf"^[\w\s,]*\b{name}\b[\w\s,]*(?::[^=\n]+)?=(?!=)"
        return re.search(f"{defined}|{assigned}", self.source, re.MULTILINE) is not None

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing but magics, comments and `...`."""
        lines = (line.partition("#")[0].strip() for line in self.source.splitlines())
        return all(line in ("", "...") or line.startswith("%") for line in lines)


class Attempts:
    """Every run of a cell since this was made, and which of them were judged."""

    def __init__(self):
        self.runs: list[Run] = []
        self._judged: dict[str, int] = {}

    def note(self, result) -> None:
        """Takes in what IPython reports after a cell."""
        error = result.error_before_exec or result.error_in_exec
        shown = f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else ""
        self.runs.append(Run(result.info.raw_cell, getattr(result.info, "cell_id", None), shown))

    def obstacle(self, name: str) -> str | None:
        """Why what this name holds is not to be judged; None if it is, and it counts as judged."""
        last = max((i for i, run in enumerate(self.runs) if run.binds(name)), default=None)
        if last is None:
            return None
        run = self.runs[last]
        if run.error:
            return f"its cell failed, so nothing is judged: {run.error}"
        for later in self.runs[last + 1 :]:
            if later.cell == run.cell if run.cell is not None else later.is_empty:
                return "not attempted"
        if self._judged.get(name) == last:
            return "run its cell again first: each run of it is judged once"
        self._judged[name] = last
        return None


ATTEMPTS = Attempts()
if (shell := get_ipython()) is not None:
    shell.events.register("post_run_cell", ATTEMPTS.note)
