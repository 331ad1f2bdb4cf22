"""The errors of a mesh, and whose fault it was when a cell failed on several ranks."""

from collections.abc import Iterable, Mapping


class MeshError(RuntimeError):
    """What was asked for cannot be done with the ranks as they are."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, as the kernel's own frames say nothing about
        the fault.
        """
        return f"{type(self).__name__}: {self}".splitlines()


class RankError(MeshError):
    """A cell failed on one or more ranks. The message begins with the error of the rank that caused
    it.
    """


class MeshInterrupted(KeyboardInterrupt):
    """The reader interrupted a cell that ran on the ranks."""

    def _render_traceback_(self) -> list[str]:
        return f"KeyboardInterrupt: {self}".splitlines()


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2, 3`."""
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def describe_failure(reports: Mapping[int, dict], finished: Iterable[int] = ()) -> str:
    """Who is to blame, first and in full; who waited, in one line.

    Args:
        reports: by rank, `{"error": …, "frames": […], "line": …, "waited_in": …, "tensor": …}`. A
            rank that was still inside the cell has no `error`; one that died has no frames.
        finished: ranks that ended the cell without an error.
    """
    guilty, waiting, stuck = {}, {}, {}
    for rank, r in reports.items():
        kind = waiting if r["waited_in"] else stuck if r["error"] is None else guilty
        kind[rank] = r
    lines = []
    for ranks, first in _same(guilty, key=lambda r: (r["error"], tuple(r["frames"]))):
        lines += [f"{name_ranks(ranks)}: {first['error']}", *("  " + f for f in first["frames"])]
    tensors = {r["tensor"] for r in waiting.values()}
    waits = []
    for ranks, first in _same(waiting, key=lambda r: (r["waited_in"], r["line"], r["tensor"])):
        of = f" of {first['tensor']}" if len(tensors) > 1 and first["tensor"] else ""
        at = f" (at: {first['line']})" if first["line"] else ""  # a check waits outside of cells
        waits.append(f"{name_ranks(ranks)} waited in {first['waited_in']}{of}{at}")
    places = [(name_ranks(n), first["line"]) for n, first in _same(stuck, lambda r: r["line"])]
    if waits and not guilty:
        absent = [f"{who} never arrived: still at: {line}" for who, line in places]
        if finished:
            absent.insert(0, f"{name_ranks(finished)} never arrived: the cell had ended there")
        if not absent and len(waits) > 1:
            shapes = len({(r["waited_in"], r["line"]) for r in waiting.values()}) == 1
            differ = "with tensors of different shapes" if shapes else "in different collectives"
            absent = [f"each waited for the others, {differ}"]
        waits = ["; ".join(waits + absent)]
    else:
        waits += [f"{who} still ran (at: {line})" for who, line in places]
    return "\n".join(lines + waits)


def _same(reports: Mapping[int, dict], key) -> list[tuple[list[int], dict]]:
    """Ranks with equal reports together, in the order of their first rank."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(reports):
        groups.setdefault(key(reports[rank]), []).append(rank)
    return [(ranks, reports[ranks[0]]) for ranks in groups.values()]
