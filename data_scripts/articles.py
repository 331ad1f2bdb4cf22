"""Chosen articles of the corpus, by their place in the file, and who gets which."""

import heapq
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path


def texts_at(articles: Path, offsets: Iterable[int]) -> Iterator[str]:
    """The texts of the lines that start at these bytes."""
    with open(articles, "rb") as lines:
        for offset in offsets:
            lines.seek(offset)
            yield json.loads(lines.readline())["text"]


def deal(
    articles: Path, shards: int, held_out: float, seed: int, *, least: int = 1
) -> tuple[list[int], list[list[int]]]:
    """Deal whole articles to a held-out part and to shards of about equal size, in random order.

    Args:
        articles: JSON lines.
        shards: number of training shards.
        held_out: share of the bytes that the first articles of the order make up.
        seed: of the order.
        least: fewest articles of each part.

    Returns:
        Offsets of the held-out articles, and of each training shard's.

    Raises:
        ValueError: too few articles.
    """
    offsets, sizes = [], []
    position = 0
    with open(articles, "rb") as lines:
        for line in lines:
            offsets.append(position)
            sizes.append(len(line))
            position += len(line)
    order = list(range(len(offsets)))
    random.Random(f"{seed} deal").shuffle(order)
    cut = taken = 0
    while cut < len(order) and (cut < least or taken < held_out * position):
        taken += sizes[order[cut]]
        cut += 1
    if len(order) - cut < least * shards:
        raise ValueError(
            f"{len(offsets)} articles are too few for {shards} shards and a held-out part of "
            f"{held_out:.0%}, each of at least {least}"
        )
    parts: list[list[int]] = [[] for _ in range(shards)]
    fill = [(0, shard) for shard in range(shards)]
    for index in order[cut:]:
        filled, shard = heapq.heappop(fill)  # the one with the fewest bytes
        parts[shard].append(offsets[index])
        heapq.heappush(fill, (filled + sizes[index], shard))
    return [offsets[index] for index in order[:cut]], parts
