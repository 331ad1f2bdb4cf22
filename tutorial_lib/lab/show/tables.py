"""Tables that read the same in JupyterLab, on GitHub (which drops styles), in exported HTML and in
a terminal.
"""

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_NUMBER = re.compile(rf"–|nan|[-+]?(inf|[\d,.]+(e[+-]?\d+)?)( (%|s|ms|{'|'.join(_UNITS)}))?")


class Table:
    """Rows of cells below a header. Numbers stand to the right, a column's fractions with the same
    decimals; rows in `marked` are bold and carry an arrow."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        caption: str = "",
        marked: set[int] = frozenset(),
    ):
        self.caption, self.marked = caption, marked
        self.columns = [str(column) for column in columns]
        self.rows = [list(row) for row in zip(*map(texts, zip(*rows)))]
        self._right = [all(map(_NUMBER.fullmatch, column)) for column in zip(*self.rows)]

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        drawn = []
        for number, line in enumerate(lines):
            places = zip(line, widths, self._right)
            cells = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in places]
            mark = "  ◀" if number - 1 in self.marked else ""
            drawn.append(("  ".join(cells) + mark).rstrip())
        drawn.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join(([self.caption] if self.caption else []) + drawn)

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str, marked: bool = False) -> str:
            drawn = []
            for cell, right in zip(cells, self._right):
                shown = f"<b>{html.escape(cell)}</b>" if marked else html.escape(cell)
                side = "right" if right else "left"
                # The attribute is for GitHub, the style for JupyterLab.
                drawn.append(f'<{tag} align="{side}" style="text-align: {side}">{shown}</{tag}>')
            return f"<tr>{''.join(drawn)}{'<td><b>◀</b></td>' if marked else ''}</tr>"

        body = "\n".join(line(row, "td", i in self.marked) for i, row in enumerate(self.rows))
        caption = f"<p>{html.escape(self.caption)}</p>\n" if self.caption else ""
        head = f"<thead>{line(self.columns, 'th')}</thead>"
        return f"{caption}<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>"


def text(value: Any) -> str:
    """A cell's text: thousands apart, five digits of a fraction, `–` for None, a tensor as its
    elements.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        inner = ("[{}]" if isinstance(item, (list, tuple)) else "{}" for item in value)
        return " ".join(form.format(text(item)) for form, item in zip(inner, value))
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1e5 else f"{value:,.5g}"
    return str(value)


def texts(values: Sequence[Any]) -> list[str]:
    """Cells of one quantity. Fractions but for a plain 0 get the decimals of the one that needs
    most, so they line up.
    """
    values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    shown = [text(value) for value in values]
    finite = [isinstance(value, float) and math.isfinite(value) for value in values]
    fractions = [i for i, value in enumerate(values) if finite[i] and value]
    if any("e" in shown[i] for i in fractions):
        return shown
    decimals = max((len(shown[i].partition(".")[2]) for i in fractions), default=0)
    for i in fractions:
        shown[i] = f"{values[i]:,.{decimals}f}"
    return shown


def size(nbytes: float) -> str:
    """A number of bytes in the largest binary unit that leaves a whole part: `6.0 MiB`."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} bytes"
    power = min(int(math.log2(abs(nbytes)) // 10), len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def table(rows: Sequence[Mapping[str, Any]], caption: str = "") -> Table:
    """A table of mappings that share their keys, in the first one's order."""
    columns = list(rows[0]) if rows else []
    return Table(columns, [[row[column] for column in columns] for row in rows], caption)


def by_rank(values: Mapping[str, Sequence[Any]], caption: str = "") -> Table:
    """One row for each quantity: a single cell where all ranks agree, and every rank's value where
    they do not.

    Args:
        values: for each quantity the ranks' values, in rank order.

    Returns: A table in which a row is marked if just one rank differs from all others; the last
        column names that rank.
    """
    (count,) = {len(ranks) for ranks in values.values()}
    rows, marked = [], set()
    for name, found in values.items():
        shown = texts(found)
        odd = [rank for rank, value in enumerate(shown) if shown.count(value) == 1]
        verdict = f"all {count} ranks agree" if len(set(shown)) == 1 else ""
        if len(odd) == 1 and count > 2 and len(set(shown)) == 2:
            verdict = f"rank {odd[0]} differs from the others"
            marked.add(len(rows))
        rows.append([name, *shown, verdict])
    return Table(["", *(f"rank {rank}" for rank in range(count)), ""], rows, caption, marked)


def compare(
    rows: Mapping[str, tuple[float | None, float]], unit: str = "", caption: str = ""
) -> Table:
    """`measured | expected | ratio` for each named pair; a measurement of None is one that this
    machine cannot make.
    """
    suffix = f" [{unit}]" if unit else ""
    lines = []
    for name, (measured, expected) in rows.items():
        ratio = None if measured is None or not expected else f"{measured / expected:.4f}"
        lines.append([name, measured, expected, ratio])
    columns = ["", f"measured{suffix}", f"expected{suffix}", "measured / expected"]
    return Table(columns, lines, caption)
