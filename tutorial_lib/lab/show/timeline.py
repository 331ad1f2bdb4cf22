"""A step by rank over time: computing, waiting, communicating."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tutorial_lib.lab.stopwatch import (
    COMMUNICATING,
    COMPUTING,
    WAITING,
    StepTimes,
    segments,
    shares,
)

from .pictures import COLOURS, FAINT, INK, WIDTH, Picture

_FILLS = {COMPUTING: COLOURS[0], WAITING: FAINT, COMMUNICATING: COLOURS[1]}


def timeline(runs: Mapping[str, Sequence[StepTimes]], title: str = "") -> Picture:
    """For each named run a panel with one bar for each rank, all on the same scale of milliseconds.

    A thin line above a bar is a collective in flight while the rank computes.

    Args:
        runs: what `lab.stopwatch.record_times` recorded on each rank, in rank order, as
            `mesh.gather` gives it.
    """
    ranks = max(map(len, runs.values()))
    figure = Figure(figsize=(WIDTH, len(runs) * (0.5 + 0.24 * ranks) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    described = []
    for axes, (name, recorded) in zip(panels, runs.items()):
        start = min(times.began for times in recorded)
        for rank, (times, done) in enumerate(zip(recorded, segments(recorded))):
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        described.append(f"{name}: {_described(recorded)}")
    panels[-1].set_xlabel("milliseconds", fontsize=9)
    handles = [Patch(color=fill, label=activity) for activity, fill in _FILLS.items()]
    figure.legend(handles=handles, ncols=3, loc="outside lower center", frameon=False, fontsize=8)
    return Picture(figure, f"A bar of time for each rank. {'; '.join(described)}.")


def _described(recorded: Sequence[StepTimes]) -> str:
    """In words: the shares of the time of all ranks together."""
    totals = shares(recorded)
    whole = sum(sum(total.values()) for total in totals) or 1.0
    return ", ".join(
        f"{100 * sum(total[activity] for total in totals) / whole:.0f} % {activity}"
        for activity in _FILLS
    )
