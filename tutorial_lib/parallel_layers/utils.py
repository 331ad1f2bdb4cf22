"""Checks of sizes and ids, with errors that name the numbers."""

from numbers import Integral

import torch


def ensure_positive(**sizes: int) -> None:
    """Raises ValueError, with its name, for a size that is not a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is {size!r}, must be a positive integer")


def ensure_divisibility(numerator: int, denominator: int, what: str = "") -> None:
    """Raises ValueError, naming both numbers, unless `denominator` divides `numerator`."""
    if denominator < 1 or numerator % denominator:
        raise ValueError(
            f"{what + ': ' if what else ''}{numerator} is not divisible by {denominator}"
        )


def divide(numerator: int, denominator: int, what: str = "") -> int:
    """`numerator / denominator`, exact or a ValueError that names both numbers."""
    ensure_divisibility(numerator, denominator, what)
    return numerator // denominator


def padding_of(size: int, parts: int, multiple: int = 1) -> int:
    """Zeros to append so that `parts` ranks get equal shares, each a multiple of `multiple`.

    GPT-2's vocabulary of 50257 gets 943 on 8 ranks with a multiple of 128: 51200 in all.
    """
    ensure_positive(size=size, parts=parts, pad_alignment_size_per_rank=multiple)
    return -size % (parts * multiple)


def ids_outside(
    ids: torch.Tensor, size: int, what: str, ignore: int | None = None
) -> torch.Tensor | None:
    """None if every id is in `[0, size)` (or `ignore`); ranks with equal ids get equal answers.

    On an accelerator, which would stall to look at the values, it returns the mask of the ids
    outside instead, for the caller to put NaN there.

    Raises:
        ValueError: ids that are not integers; on the host, an id outside.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ValueError(f"each {what} is an integer, not {ids.dtype}")
    ids = ids.to(torch.int64)  # a byte is never -100
    outside = (ids < 0) | (ids >= size)
    if ignore is not None:
        outside &= ids != ignore
    if ids.device.type != "cpu":
        return outside
    if outside.any():
        raise ValueError(f"{what} {ids[outside][0].item()} is outside of [0, {size})")
    return None
