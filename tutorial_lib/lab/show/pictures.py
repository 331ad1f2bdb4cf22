"""The course's pictures, in one style. Each is drawn from values of the reader's own run."""

import io
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from .tables import size

# Okabe and Ito's palette: eight colours that people with any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK, FAINT = "#222222", "#dddddd"
WIDTH = 6.4  # inches; a notebook's column
DPI = 200


class Picture:
    """A figure that a notebook shows as a PNG, at half its pixels so that it stays sharp."""

    def __init__(self, figure: Figure):
        self.figure = figure

    def _repr_png_(self) -> tuple[bytes, dict]:
        target = io.BytesIO()
        self.figure.savefig(
            target,
            format="png",
            dpi=DPI,
            bbox_inches="tight",
            facecolor="white",
            metadata={"Software": None},
        )
        # The width is in the PNG's header, at byte 16.
        return target.getvalue(), {"width": int.from_bytes(target.getvalue()[16:20], "big") // 2}

    def __repr__(self) -> str:
        return f"<picture: {self.figure.get_suptitle() or ', '.join(a.get_title() for a in self.figure.axes)}>"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _ink_on(fill: str) -> str:
    """The colour in which text can be read on `fill`: dark on a light one, by its luma (ITU-R BT.601)."""
    red, green, blue = to_rgb(fill)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _axes(height: float, columns: int = 1, title: str = "", **kwargs) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **kwargs)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    if title:
        axes[0].set_title(title, fontsize=10)
    return figure, list(axes)


def mesh_grid(tp_groups: Sequence[Sequence[int]], dp_groups: Sequence[Sequence[int]]) -> Picture:
    """The mesh of ranks: a row for each tensor-parallel group, a column for each data-parallel one.

    Args:
        tp_groups, dp_groups: the groups as lists of ranks (`get_tensor_model_parallel_group(as_list=True)`).
    """
    rows, columns = len(tp_groups), len(dp_groups)
    wide = columns > 4  # no room for words
    figure, (axes,) = _axes(0.9 + 0.62 * rows)
    axes.set(xlim=(-1.75, columns + 0.05), ylim=(rows + 0.1, -0.75))
    axes.axis("off")
    for row, group in enumerate(tp_groups):
        band = FancyBboxPatch(
            (0.06, row + 0.1),
            columns - 0.12,
            0.8,
            boxstyle="round,pad=0,rounding_size=0.1",
            fc="#f2f2f2",
            ec="none",
        )
        axes.add_patch(band)
        ranks = f"[{group[0]}, …, {group[-1]}]" if wide else list(group)
        axes.text(
            -0.05,
            row + 0.5,
            f"tensor-parallel group\n{ranks}",
            ha="right",
            va="center",
            fontsize=8,
            color=INK,
        )
        for rank in group:
            column = next(i for i, ranks in enumerate(dp_groups) if rank in ranks)
            fill = colour(column)
            box = FancyBboxPatch(
                (column + 0.16, row + 0.2),
                0.68,
                0.6,
                boxstyle="round,pad=0,rounding_size=0.08",
                fc=fill,
                ec="none",
            )
            axes.add_patch(box)
            name = str(rank) if wide else f"rank {rank}"
            place = dict(ha="center", va="center", color=_ink_on(fill), fontsize=10, weight="bold")
            axes.text(column + 0.5, row + 0.5, name, **place)
    labels = {
        column + 0.5: f"data-parallel group\n{list(group)}"
        for column, group in enumerate(dp_groups)
    }
    if wide:
        labels = {columns / 2: "data-parallel groups: the columns"}
    for x, label in labels.items():
        axes.text(x, -0.1, label, ha="center", va="bottom", fontsize=8, color=INK)
    return Picture(figure)


def slices(shape: tuple[int, int], parts: int, dim: int, title: str = "") -> Picture:
    """A weight of `shape` cut into equal `parts` along `dim`, each in the colour of the rank that holds it."""
    figure, (axes,) = _axes(2.0, title=title)
    rows, columns = shape
    height = 1.0
    width = min(max(columns / rows, 0.35), 3.0)
    axes.set(xlim=(-0.35, 3.6), ylim=(height + 0.05, -0.25), aspect="equal")
    axes.title.set(x=0.35 / 3.95, ha="left")  # above the weight's left edge
    axes.axis("off")
    for part in range(parts):
        x, y, w, h = 0, part * height / parts, width, height / parts
        if dim % 2:
            x, y, w, h = part * width / parts, 0, width / parts, height
        axes.add_patch(Rectangle((x, y), w, h, fc=colour(part), ec="white", lw=1.5))
        place = dict(
            ha="center", va="center", color=_ink_on(colour(part)), fontsize=8, weight="bold"
        )
        axes.text(x + w / 2, y + h / 2, f"rank {part}", **place)
    piece = (rows, columns // parts) if dim % 2 else (rows // parts, columns)
    axes.text(width / 2, -0.05, f"{columns:,}", ha="center", va="bottom", fontsize=8)
    axes.text(-0.05, height / 2, f"{rows:,}", ha="right", va="center", fontsize=8)
    sizes = f"{rows:,} × {columns:,} in all\n{piece[0]:,} × {piece[1]:,} on each rank"
    axes.text(width + 0.12, height / 2, sizes, va="center", fontsize=8)
    return Picture(figure)


def curves(
    series: Mapping[str, Sequence[float]],
    ylabel: str = "loss",
    xlabel: str = "step",
    title: str = "",
) -> Picture:
    """A line for each series over its steps, from 1. The later of two that coincide is dashed, so that both show."""
    figure, (axes,) = _axes(2.8, title=title)
    for index, (name, values) in enumerate(series.items()):
        style = "-" if index == 0 else (0, (4, 2 + index))
        axes.plot(
            range(1, len(values) + 1), values, color=colour(index), ls=style, lw=2, label=name
        )
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT, lw=0.6)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)
    return Picture(figure)


def bars(
    measured: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]] | None = None,
    title: str = "",
    nbytes: bool = True,
    ticks: Sequence[str] | None = None,
) -> Picture:
    """For each name a panel with one bar a rank, and a line across it at the value that was expected there.

    Args:
        measured, expected: for each name the ranks' values, in rank order.
        nbytes: the values are bytes.
        ticks: what the bars stand for, where that is not the ranks.
    """
    figure, panels = _axes(2.3, len(measured), sharey=True)
    figure.suptitle(title, fontsize=10)
    for axes, (name, values) in zip(panels, measured.items()):
        axes.bar(
            range(len(values)),
            values,
            color=[colour(rank) for rank in range(len(values))],
            width=0.7,
        )
        for rank, value in enumerate(expected[name] if expected else []):
            label = "formula" if axes is panels[0] and rank == 0 else None
            axes.plot([rank - 0.45, rank + 0.45], [value, value], color=INK, lw=1.6, label=label)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(values)), ticks)
        if ticks is None:
            axes.set_xlabel("rank", fontsize=8)
        if nbytes:
            highest = max(map(max, [*measured.values(), *(expected or {}).values()]))
            axes.yaxis.set_major_locator(
                MultipleLocator(2 ** math.ceil(math.log2(max(highest, 1) / 5)))
            )
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    if expected:
        panels[0].legend(frameon=False, fontsize=8)
    return Picture(figure)


def strips(
    rows: Mapping[str, Sequence[tuple[int, int]]], title: str = "", xlabel: str = "token"
) -> Picture:
    """For each name a row of pieces from the left, `(number, length)`: a colour for each number."""
    figure, (axes,) = _axes(0.8 + 0.26 * len(rows), title=title)
    numbers = list(dict.fromkeys(number for row in rows.values() for number, _ in row))
    for place, row in enumerate(rows.values()):
        left, whole = 0, sum(length for _, length in row)
        for number, length in row:
            fill = colour(numbers.index(number))
            axes.barh(place, length, left=left, height=0.74, color=fill, edgecolor="white", lw=1.2)
            if length > 0.05 * whole:
                middle = left + length / 2
                axes.text(
                    middle,
                    place,
                    str(number),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=_ink_on(fill),
                )
            left += length
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    return Picture(figure)


def stacked(rows: Mapping[str, Mapping[str, float]], limit: float, title: str = "") -> Picture:
    """A bar of bytes for each row, its parts side by side in one colour each, and a line at `limit`."""
    figure, (axes,) = _axes(0.9 + 0.36 * len(rows), title=title)
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    left = dict.fromkeys(rows, 0.0)
    for index, part in enumerate(parts):
        values = [row.get(part, 0) for row in rows.values()]
        axes.barh(
            list(rows),
            values,
            left=list(left.values()),
            height=0.7,
            color=colour(index),
            label=part,
        )
        left = {name: left[name] + value for name, value in zip(rows, values)}
    axes.axvline(limit, color=INK, lw=1.6)
    axes.xaxis.set_major_locator(
        MultipleLocator(2 ** math.ceil(math.log2(max(limit, *left.values()) / 8)))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.invert_yaxis()
    axes.legend(
        frameon=False, fontsize=8, ncols=len(parts), loc="upper center", bbox_to_anchor=(0.4, -0.12)
    )
    return Picture(figure)


def growth(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
) -> Picture:
    """A line for each series over `x` and marks at `points`, with both axes logarithmic."""
    figure, (axes,) = _axes(3.0, title=title)
    for index, (name, values) in enumerate(series.items()):
        axes.plot(x, values, color=colour(index), lw=2, ls="-" if index == 0 else "--", label=name)
    for index, (name, found) in enumerate((points or {}).items()):
        axes.plot(*zip(*found), "o", color=colour(len(series) + index), ms=6, label=name)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(color=FAINT, lw=0.6)
    axes.legend(frameon=False, fontsize=8)
    return Picture(figure)
