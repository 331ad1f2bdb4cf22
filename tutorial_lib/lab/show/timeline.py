"""A step by rank over time: computing, waiting, communicating."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tutorial_lib.lab import stopwatch
from tutorial_lib.lab.stopwatch import StepTimes

from .pictures import COLOURS, FAINT, INK, Picture, _axes, _box, _label, _legend_below

_FILLS = dict(zip(stopwatch.ACTIVITIES, (COLOURS[0], FAINT, COLOURS[1])))


def timeline(runs: Mapping[str, Sequence[StepTimes]], title: str = "") -> Picture:
    """For each named run a panel with one bar for each rank, all on the same scale of milliseconds.

    A thin line above a bar is a collective in flight while the rank computes.

    Args:
        runs: what `lab.stopwatch.record_times` recorded on each rank, in rank order, as
            `mesh.gather` gives it.
    """
    ranks = max(map(len, runs.values()))
    figure, panels = _axes(len(runs) * (0.5 + 0.24 * ranks) + 0.6, rows=len(runs), sharex=True)
    figure.suptitle(title, fontsize=10)
    described = []
    for axes, (name, recorded) in zip(panels, runs.items()):
        start = min(times.began for times in recorded)
        for rank, (times, done) in enumerate(zip(recorded, stopwatch.segments(recorded))):
            for activity, begun, ended in done:
                span = [(1e3 * (begun - start), 1e3 * (ended - begun))]
                axes.broken_barh(span, (rank - 0.3, 0.6), facecolors=_FILLS[activity])
            for call in times.calls:
                if call.waited > call.begun:
                    ends = 1e3 * (call.begun - start), 1e3 * (call.ended - start)
                    axes.hlines(rank - 0.4, *ends, color=COLOURS[1], lw=1.5)
        axes.set_yticks(range(len(recorded)), [f"rank {rank}" for rank in range(len(recorded))])
        axes.set_ylim(len(recorded) - 0.4, -0.7)
        axes.set_title(name, fontsize=9, loc="left", color=INK)
        described.append(f"{name}: {_described(recorded)}")
    _label(panels[-1], "milliseconds")
    _legend_below(figure, _FILLS)
    return Picture(figure, f"A bar of time for each rank. {'; '.join(described)}.")


def pipeline(
    stages: Mapping[str, Sequence[tuple[str, int, float, float]]], title: str = ""
) -> Picture:
    """For each stage of a pipeline a bar of time, with the numbers of the micro-batches.

    Args:
        stages: by name what a stage did: `(kind, micro-batch, from, to)`, of two kinds, in seconds
            on one clock.
    """
    figure, (axes,) = _axes(0.9 + 0.34 * len(stages), title=title)
    spans = [span for done in stages.values() for span in done]
    start, end = min(span[2] for span in spans), max(span[3] for span in spans)
    kinds = list(dict.fromkeys(span[0] for span in spans))
    for place, done in enumerate(stages.values()):
        axes.broken_barh([(0, 1e3 * (end - start))], (place - 0.37, 0.74), facecolors=FAINT)
        for kind, number, begun, ended in done:
            where = 1e3 * (begun - start), place - 0.37, 1e3 * (ended - begun), 0.74
            _box(axes, *where, COLOURS[kinds.index(kind)], str(number))
    axes.set(xlim=(0, 1e3 * (end - start)), ylim=(len(stages) - 0.5, -0.5))
    axes.set_yticks(range(len(stages)), list(stages))
    _label(axes, "milliseconds")
    _legend_below(figure, dict(zip(kinds, COLOURS)) | {"idle": FAINT})
    order = (
        f"{name}: {', '.join(f'{kind} {number}' for kind, number, *_ in done)}"
        for name, done in stages.items()
    )
    return Picture(figure, f"A pipeline by time. {'; '.join(order)}.")


def _described(recorded: Sequence[StepTimes]) -> str:
    """In words: the shares of the time of all ranks together."""
    total = sum(map(Counter, stopwatch.shares(recorded)), Counter())
    whole = total.total() or 1.0
    return ", ".join(f"{100 * total[activity] / whole:.0f} % {activity}" for activity in _FILLS)
