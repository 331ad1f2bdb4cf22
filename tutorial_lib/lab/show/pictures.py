"""The course's pictures, in one style. Each is drawn from values of the reader's own run."""

import io
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

from .tables import size

# Okabe and Ito's palette: eight colours that people with any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK, FAINT = "#222222", "#dddddd"
WIDTH = 6.4  # inches; a notebook's column
DPI = 200


class Picture:
    """A figure that a notebook shows as a PNG, at half its pixels so that it stays sharp.

    Args:
        alt: what it shows, in words, for those who do not see it.
    """

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def _repr_png_(self) -> tuple[bytes, dict]:
        drawn, target = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, dpi=DPI, bbox_inches="tight", facecolor="white")
        # Few colours and their blends: a third of the bytes.
        image = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        image.save(target, "png", optimize=True)
        return target.getvalue(), {"width": image.width // 2, "alt": self.alt}

    def __repr__(self) -> str:
        titles = [axes.get_title() for axes in self.figure.axes]
        return f"<picture: {self.figure.get_suptitle() or ', '.join(titles)}>"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _axes(
    height: float, rows: int = 1, columns: int = 1, title: str = "", **kwargs
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs).flatten()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    if title:
        axes[0].set_title(title, fontsize=10)
    return figure, list(axes)


def _write(axes: Axes, x: float, y: float, text: str, **style) -> None:
    axes.text(x, y, text, **{"fontsize": 8, "color": INK, "ha": "center", "va": "center"} | style)


def _box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, text: str = ""):
    """A rectangle from its upper left corner, with text in the colour that can be read on it.

    That is dark on a light colour, by its luma (ITU-R BT.601).
    """
    axes.add_patch(Rectangle((x, y), width, height, fc=fill, ec="white", lw=1.5))
    red, green, blue = to_rgb(fill)
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
    _write(axes, x + width / 2, y + height / 2, text, color=ink, weight="bold")


def _count_bytes(axis: Axis, largest: float, ticks: int) -> None:
    """Marks an axis at powers of two."""
    axis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(max(largest, 1) / ticks))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))


def _legend_below(figure: Figure, colours: Mapping[str, str]) -> None:
    handles = [Patch(color=fill, label=name) for name, fill in colours.items()]
    below = dict(ncols=len(handles), loc="outside lower center")
    figure.legend(handles=handles, frameon=False, fontsize=8, **below)


def _label(axes: Axes, xlabel: str, ylabel: str = "") -> None:
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)


def mesh_grid(tp_groups: Sequence[Sequence[int]], dp_groups: Sequence[Sequence[int]]) -> Picture:
    """The mesh of ranks: a row for each tensor-parallel group, a column for each data-parallel one.

    Args:
        tp_groups, dp_groups: the groups as lists of ranks
            (`get_tensor_model_parallel_group(as_list=True)`).
    """
    rows, columns = len(tp_groups), len(dp_groups)
    wide = columns > 4  # no room for words
    figure, (axes,) = _axes(0.9 + 0.62 * rows)
    axes.set(xlim=(-1.75, columns + 0.05), ylim=(rows + 0.1, -0.75))
    axes.axis("off")
    for row, group in enumerate(tp_groups):
        _box(axes, 0.06, row + 0.1, columns - 0.12, 0.8, "#f2f2f2")
        ranks = f"[{group[0]}, …, {group[-1]}]" if wide else list(group)
        _write(axes, -0.05, row + 0.5, f"tensor-parallel group\n{ranks}", ha="right")
        for rank in group:
            column = next(i for i, ranks in enumerate(dp_groups) if rank in ranks)
            name = str(rank) if wide else f"rank {rank}"
            _box(axes, column + 0.16, row + 0.2, 0.68, 0.6, colour(column), name)
    if wide:
        _write(axes, columns / 2, -0.1, "data-parallel groups: the columns", va="bottom")
    for column, group in enumerate([] if wide else dp_groups):
        _write(axes, column + 0.5, -0.1, f"data-parallel group\n{list(group)}", va="bottom")
    groups = f"tensor-parallel groups {list(tp_groups)}, columns data-parallel {list(dp_groups)}"
    return Picture(figure, f"A grid of {rows * columns} ranks; rows are {groups}.")


def slices(shape: tuple[int, int], parts: int, title: str = "") -> Picture:
    """A weight of `shape` in equal shards of its rows, each in the colour of its rank."""
    figure, (axes,) = _axes(2.0, title=title)
    rows, columns = shape
    width = min(max(columns / rows, 0.35), 3.0)
    axes.set(xlim=(-0.35, 3.6), ylim=(1.05, -0.25), aspect="equal")
    axes.title.set(x=0.35 / 3.95, ha="left")  # above the weight's left edge
    axes.axis("off")
    for rank in range(parts):
        _box(axes, 0, rank / parts, width, 1 / parts, colour(rank), f"rank {rank}")
    _write(axes, width / 2, -0.05, f"{columns:,}", va="bottom")
    _write(axes, -0.05, 0.5, f"{rows:,}", ha="right")
    sizes = f"{rows:,} × {columns:,} in all\n{rows // parts:,} × {columns:,} on each rank"
    _write(axes, width + 0.12, 0.5, sizes, ha="left")
    alt = f"A {rows} × {columns} weight, sharded by rows over {parts} ranks."
    return Picture(figure, f"{title}. {alt}" if title else alt)


def curves(series: Mapping[str, Sequence[float]], title: str = "") -> Picture:
    """A loss curve for each series, from step 1. Later ones are dashed, so that all show."""
    figure, (axes,) = _axes(2.8, title=title)
    for index, (name, values) in enumerate(series.items()):
        style = "-" if index == 0 else (0, (4, 2 + index))
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, color=colour(index), ls=style, lw=2, label=name)
    _label(axes, "step", "loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.legend(frameon=False, fontsize=8)
    ends = (f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, values in series.items())
    return Picture(figure, f"Loss by step: {'; '.join(ends)}.")


def bars(
    measured: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]],
    title: str = "",
    ticks: Sequence[str] | None = None,
) -> Picture:
    """For each name a panel with one bar of bytes for each rank, and a line at its expected value.

    Args:
        measured, expected: for each name the ranks' values, in rank order.
        ticks: what the bars stand for, where that is not the ranks.
    """
    figure, panels = _axes(2.3, columns=len(measured), sharey=True)
    figure.suptitle(title, fontsize=10)
    largest = max(map(max, [*measured.values(), *expected.values()]))
    for axes, (name, values) in zip(panels, measured.items()):
        places = range(len(values))
        axes.bar(places, values, color=[colour(rank) for rank in places], width=0.7)
        ends = [rank - 0.45 for rank in places], [rank + 0.45 for rank in places]
        axes.hlines(expected[name], *ends, color=INK, lw=1.6, label="formula")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(places, ticks)
        axes.set_xlabel("rank" if ticks is None else "", fontsize=8)
        _count_bytes(axes.yaxis, largest, 5)
    panels[0].legend(frameon=False, fontsize=8)
    sizes = (f"{name}: {', '.join(map(size, values))}" for name, values in measured.items())
    return Picture(figure, f"Bars of bytes. {'; '.join(sizes)}.")


def strips(rows: Mapping[str, Sequence[tuple[int, int]]], title: str = "") -> Picture:
    """For each name a row of tokens, `(number, length)` from the left: a colour for each number."""
    figure, (axes,) = _axes(0.8 + 0.26 * len(rows), title=title)
    numbers = list(dict.fromkeys(number for row in rows.values() for number, _ in row))
    longest = max(sum(length for _, length in row) for row in rows.values())
    axes.set(xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5))
    for place, row in enumerate(rows.values()):
        left = 0
        for number, length in row:
            name = str(number) if length > 0.05 * longest else ""
            _box(axes, left, place - 0.37, length, 0.74, colour(numbers.index(number)), name)
            left += length
    _label(axes, "token")
    axes.set_yticks(range(len(rows)), list(rows))
    parts = (
        f"{name}: {', '.join(f'{length} of {number}' for number, length in row)}"
        for name, row in rows.items()
    )
    return Picture(figure, f"Rows of tokens. {'; '.join(parts)}.")


def stacked(rows: Mapping[str, Mapping[str, float]], limit: float, title: str = "") -> Picture:
    """A bar of bytes for each row, its kinds side by side in one colour each; a line at `limit`."""
    figure, (axes,) = _axes(1.1 + 0.36 * len(rows), title=title)
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    left = [0.0] * len(rows)
    for index, kind in enumerate(kinds):
        values = [row.get(kind, 0) for row in rows.values()]
        axes.barh(list(rows), values, left=left, height=0.7, color=colour(index))
        left = [start + value for start, value in zip(left, values)]
    axes.axvline(limit, color=INK, lw=1.6)
    _count_bytes(axes.xaxis, max(limit, *left), 8)
    axes.invert_yaxis()
    _legend_below(figure, {kind: colour(index) for index, kind in enumerate(kinds)})
    sums = (f"{name} {size(sum(row.values()))}" for name, row in rows.items())
    return Picture(figure, f"Stacked bars of bytes: {', '.join(sums)}; the limit is {size(limit)}.")


def growth(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    points: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    title: str,
) -> Picture:
    """A line for each series over `x` and marks at `points`, with both axes logarithmic."""
    figure, (axes,) = _axes(3.0, title=title)
    for index, (name, values) in enumerate(series.items()):
        axes.plot(x, values, color=colour(index), lw=2, ls="-" if index == 0 else "--", label=name)
    for index, (name, found) in enumerate(points.items(), start=len(series)):
        axes.plot(*zip(*found), "o", color=colour(index), ms=6, label=name)
    axes.set(xscale="log", yscale="log")
    _label(axes, xlabel, ylabel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(color=FAINT, lw=0.6)
    axes.legend(frameon=False, fontsize=8)
    ends = (f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, values in series.items())
    return Picture(figure, f"{ylabel} by {xlabel}, both logarithmic: {'; '.join(ends)}.")
