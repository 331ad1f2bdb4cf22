"""Texts of a file of JSON lines, by blocks of bytes, so that several processes can share a file."""

import json
from collections.abc import Iterator
from pathlib import Path

BLOCK = 1 << 20  # bytes


def blocks(path: Path) -> list[tuple[int, int]]:
    """(Start, stop) of each block, in bytes."""
    size = path.stat().st_size
    return [(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]


def read_block(path: Path, keys: tuple[str, ...], start: int, stop: int) -> list[list[str]]:
    """The texts of each key, of the lines that begin in bytes `start` to `stop`.

    Raises:
        ValueError: a line is not an object with texts in these keys, with the line's number.
    """
    columns: list[list[str]] = [[] for _ in keys]
    with open(path, "rb") as lines:
        if start:
            lines.seek(start - 1)
            lines.readline()  # of the line that began before, if only its end
        while (position := lines.tell()) < stop:
            if not (line := lines.readline()).strip():
                continue
            try:
                entry = json.loads(line)
                for column, key in zip(columns, keys):
                    if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
                        raise ValueError(f"not an object with a text in {key!r}")
                    entry[key].encode()  # half of a surrogate pair is not a character
                    column.append(entry[key])
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {_number(path, position)}: {error}: {line[:60]!r}"
                ) from error
    return columns


def texts(path: Path, keys: tuple[str, ...]) -> Iterator[str]:
    """All texts of the file, one after the other; a block of it is in memory."""
    for part in blocks(path):
        for column in read_block(path, keys, *part):
            yield from column


def _number(path: Path, position: int) -> int:
    """Number, from 1, of the line that begins at this byte."""
    with open(path, "rb") as lines:
        return 1 + sum(1 for _ in iter(lines.readline, b"") if lines.tell() <= position)
