"""Exercises: a stub that a reader fills in, and a check that says what is off, on which rank, and
why.

A stub returns None, as `...` does, so a notebook runs through with all of them untouched.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .tables import text

NOT_ATTEMPTED, CORRECT = "not attempted", "correct"


def check(name: str, found: Any, expected: Any, **options: Any) -> None:
    """Prints the `verdict` on an exercise of this name."""
    print(f"{name}: {verdict(found, expected, **options)}")


def verdict(
    found: Any,
    expected: Any,
    tolerance: float = 0.0,
    mistakes: Mapping[str, Any] | None = None,
    by_rank: bool = False,
) -> str:
    """`not attempted`, `correct`, or what is off by how much on which rank, because of what.

    Args:
        found: the answer; None stands for not attempted.
        expected: the right answer, of the same form.
        tolerance: largest absolute difference that counts as correct.
        mistakes: answers that a usual mistake gives, by their explanation.
        by_rank: all of these are lists with one answer for each rank, as `mesh.gather` gives them.
    """
    answers = found if by_rank else [found]
    right = expected if by_rank else [expected]
    if all(_blank(answer) for answer in answers):
        return NOT_ATTEMPTED
    if len(answers) != len(right):
        return f"{len(answers)} answers for {len(right)} ranks"
    faults = [_difference(answer, value, tolerance) for answer, value in zip(answers, right)]
    rank = next((rank for rank, fault in enumerate(faults) if fault is not None), None)
    if rank is None:
        return CORRECT
    where = f" on rank {rank}" if by_rank else ""
    reasons = [
        reason
        for reason, wrong in (mistakes or {}).items()
        if _difference(answers[rank], wrong[rank] if by_rank else wrong, tolerance) is None
    ]
    return faults[rank] + where + (f", because {reasons[0]}" if reasons else "")


def _blank(answer: Any) -> bool:
    """Nothing filled in: None, or as many of it as the question has parts."""
    if isinstance(answer, (list, tuple)):
        return bool(answer) and all(part is None for part in answer)
    return answer is None


def _difference(answer: Any, right: Any, tolerance: float) -> str | None:
    """What separates an answer from the right one, or None."""
    if answer is None:
        return "nothing returned"
    if isinstance(answer, (list, tuple)) and any(part is None for part in answer):
        return "a part of the answer is missing"
    try:
        answer, right = torch.as_tensor(answer), torch.as_tensor(right)
    except (TypeError, ValueError, RuntimeError):
        return None if answer == right else f"{answer!r} instead of {right!r}"
    if answer.shape != right.shape:
        return f"shape {tuple(answer.shape)} instead of {tuple(right.shape)}"
    if right.numel() == 0:
        return None
    answer, right = answer.double(), right.double()
    off = (answer - right).abs().max().item()
    if off <= tolerance:
        return None
    reordered = answer.dim() == 1 and torch.equal(answer.sort().values, right.sort().values)
    return "the right numbers in another order" if reordered else f"off by {text(off)}"
