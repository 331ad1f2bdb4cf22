"""Tensors on their way from one cut to another, a megabyte of rows at a time.

What the processor's cache holds is copied at several times the speed of what it does not, and
memory holds little whatever the size of a tensor. A block is `(first row, rows)`; a scalar counts
as one row.
"""

from collections.abc import Iterator

import torch

from .layout import Layout
from .lazy import LazyFile
from .reader import Reader

BLOCK = 1 << 20  # bytes

Block = tuple[int, torch.Tensor]


def stored_blocks(
    file: LazyFile, entry: torch.Tensor, first: int = 0, count: int | None = None
) -> Iterator[Block]:
    """Rows `first` to `first + count` of a tensor of a file."""
    if entry.dim() == 0 or not entry.is_contiguous():
        whole = file.read(entry)
        whole = whole.reshape(1) if entry.dim() == 0 else whole
        yield first, whole[first : None if count is None else first + count]
        return
    end = entry.size(0) if count is None else first + count
    step = rows_in_block(entry)
    for row in range(first, end, step):
        block = torch.empty(
            (min(step, end - row), *entry.shape[1:]), dtype=entry.dtype, device="cpu"
        )
        file.read_rows(entry, row, block)
        yield row, block


def rows_in_block(tensor: torch.Tensor) -> int:
    return max(BLOCK // max(tensor.shape[1:].numel() * tensor.element_size(), 1), 1)


def full_blocks(reader: Reader, name: str, layout: Layout) -> Iterator[Block]:
    """The full tensor, without padding, of shards that are cut by `layout`; in any order."""
    entries = {rank: reader.entry(name, rank, layout) for rank in layout.sources()}
    for file, entry in entries.values():
        if entry.dtype != layout.dtype:
            raise ValueError(f"{file.path}: {name} is {entry.dtype}, {layout.dtype} was expected")
    cut = layout.partition
    if cut is None:
        yield from stored_blocks(*entries[0])
    elif cut.dim == 0:
        for rank, (file, entry) in entries.items():
            for start, local, length in layout.partition.pieces(rank):
                for row, block in stored_blocks(file, entry, local, length):
                    yield start + row - local, block
    else:
        parts = [stored_blocks(file, entry) for file, entry in entries.values()]
        for each in zip(*parts, strict=True):
            first, rows = each[0]
            block = rows.new_empty((len(rows), *layout.shape[1:]))
            for rank, (_, part) in zip(entries, each):
                layout.fill(block, part, rank)
            yield first, block


def shard_blocks(layout: Layout, rank: int, block: Block) -> Iterator[Block]:
    """What of a block of the full tensor belongs to the shard of `rank`, by the shard's rows.

    Padding along dim 0 is left out: the file has zeros there already.
    """
    first, rows = block
    cut = layout.partition
    if cut is None:
        yield block
    elif cut.dim == 0:
        for start, local, length in layout.partition.pieces(rank):
            for row, part in overlap(block, start, length):
                yield local + row, part
    else:
        part = rows.new_zeros((len(rows), *layout.local_shape()[1:]))
        for start, local, length in layout.partition.pieces(rank):
            part.narrow(cut.dim, local, length).copy_(rows.narrow(cut.dim, start, length))
        yield first, part


def overlap(block: Block, start: int, length: int) -> Iterator[Block]:
    """The rows of a block that lie in the `length` rows from `start` on, counted from there."""
    first, rows = block
    low, high = max(first, start), min(first + len(rows), start + length)
    if low < high:
        yield low - start, rows[low - first : high - first]
