"""What a cell that ran on several ranks shows: its output by rank, and if it failed, whose fault it was."""

import re
from collections.abc import Iterable, Mapping

_CELL_FILE = re.compile(r"\S*/ipykernel_\d+/\d+\.py")


class MeshError(RuntimeError):
    """What was asked for cannot be done with the ranks as they are."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, as the kernel's own frames say nothing about the fault."""
        return f"{type(self).__name__}: {self}".splitlines()


class RankError(MeshError):
    """A cell failed on one or more ranks. The message begins with the error of the rank that caused it.

    Attributes:
        reports: for each rank that failed or hung, what it said (`tutorial_lib.lab.mesh.engine.report`).
    """

    def __init__(self, message: str, reports: dict[int, dict] | None = None):
        super().__init__(message)
        self.reports = reports or {}


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2, 3`."""
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def by_rank(texts: Mapping[int, str], world_size: int) -> str:
    """One block of text, ordered by rank; ranks that printed the same share one entry.

    Args:
        texts: what each rank printed.
        world_size: with it, `[all 4 ranks]` instead of a list of them.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        text = as_shown(texts[rank]).rstrip()
        if text:
            ranks_of.setdefault(text, []).append(rank)
    blocks = []
    for text, ranks in ranks_of.items():
        label = (
            f"[all {world_size} ranks]"
            if len(ranks) == world_size > 1
            else f"[{name_ranks(ranks)}]"
        )
        blocks.append(f"{label}\n{text}" if "\n" in text else f"{label} {text}")
    return "\n".join(blocks)


def as_shown(text: str) -> str:
    """The text as a reader wants it.

    Of a line that was overwritten (progress bars) the last state is left, as on a terminal. A cell
    is called so, and not by the file that holds its source, whose name differs from rank to rank.
    Gloo's greetings are left out.
    """
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    lines = (_CELL_FILE.sub("cell", line) for line in lines if not line.startswith("[Gloo] Rank "))
    return "\n".join(lines)


def describe_failure(reports: Mapping[int, dict], finished: Iterable[int] = ()) -> str:
    """Who is to blame, first and in full; who waited, in one line.

    Args:
        reports: by rank, `{"error": …, "frames": […], "line": …, "waited_in": …}`. A rank that was
            still inside the cell has no `error`; one that died has no frames.
        finished: ranks that ended the cell without an error.
    """
    waiting = {rank: r for rank, r in reports.items() if r["waited_in"]}
    stuck = {
        rank: r for rank, r in reports.items() if not r["waited_in"] and r.get("error") is None
    }
    guilty = {rank: r for rank, r in reports.items() if rank not in waiting and rank not in stuck}
    parts = []
    for ranks, first in _same(guilty, key=lambda r: (r["error"], tuple(r["frames"]))):
        parts.append(
            "\n".join(
                [f"{name_ranks(ranks)}: {first['error']}", *("  " + f for f in first["frames"])]
            )
        )
    waits = [
        f"{name_ranks(ranks)} waited in {first['waited_in']} (at: {first['line']})"
        for ranks, first in _same(waiting, key=lambda r: (r["waited_in"], r["line"]))
    ]
    if waits and not guilty:
        absent = (
            [f"{name_ranks(finished)} never arrived: the cell had ended there"] if finished else []
        )
        absent += [
            f"{name_ranks(ranks)} never arrived: still at: {first['line']}"
            for ranks, first in _same(stuck, key=lambda r: r["line"])
        ]
        if not absent and len(waits) > 1:
            absent = ["each waited for the others, in different collectives"]
        waits = ["; ".join(waits + absent)]
    elif stuck:
        waits += [
            f"{name_ranks(ranks)} still ran (at: {first['line']})"
            for ranks, first in _same(stuck, key=lambda r: r["line"])
        ]
    return "\n".join(parts + waits)


def _same(reports: Mapping[int, dict], key) -> list[tuple[list[int], dict]]:
    """Ranks with equal reports together, in the order of their first rank."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(reports):
        groups.setdefault(key(reports[rank]), []).append(rank)
    return [(ranks, reports[ranks[0]]) for ranks in groups.values()]
