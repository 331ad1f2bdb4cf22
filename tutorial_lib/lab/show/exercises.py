"""Exercises: a stub that a reader fills in, and a check that says what is off, on which rank, and
why.

A stub returns None, as `...` does, so a notebook runs through with all of them untouched.
"""

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from IPython import get_ipython

from tutorial_lib.lab.exercises.attempts import ATTEMPTS
from tutorial_lib.lab.exercises.judge import Exercise, judge, named
from tutorial_lib.lab.mesh import RankError

from .tables import text

NOT_ATTEMPTED, CORRECT = "not attempted", "correct"


def check_answer(
    title: str,
    name: str,
    right: Any = None,
    *,
    wrong: Mapping[str, Any] | None = None,
    by: str | None = None,
    mesh: Any = None,
) -> None:
    """Prints the verdict on what an exercise's cell has left under a name, since it was last run.

    Args:
        title: of the exercise.
        name: of the reader's value, function or class; for several values, names with commas.
        right: the right value, a tuple of them for several names.
        wrong: wrong values, by what to say about them.
        by: in place of these, the `module.function` of `tutorial_lib.lab.exercises` that makes the
            `Exercise`.
        mesh: where the answer is, if a `%%px` cell defines it: every rank runs it.
    """
    names = [part.strip() for part in name.split(",")]
    verdict = ATTEMPTS.obstacle(names[0])
    if verdict is None and mesh is not None:
        ranks = "__import__('tutorial_lib.lab.exercises.judge', fromlist=['judge'])"
        try:
            verdict = mesh.gather(f"{ranks}.judge_on_rank(globals(), {name!r}, {by!r})")[0]
        except RankError as error:
            verdict = f"your code failed. {error}"
    elif verdict is None:
        verdict = judge_here(get_ipython().user_ns, names, by or Exercise(right, wrong or {}))
    print(f"{title}: {verdict}")


def judge_here(namespace: Mapping[str, Any], names: list[str], exercise: Exercise | str) -> str:
    """The verdict on what this process holds under these names."""
    missing = [name for name in names if name not in namespace]
    if missing:
        return f"{missing[0]} is not defined: run its cell"
    if isinstance(exercise, str):
        exercise = named(exercise, namespace)
    answer = [namespace[name] for name in names]
    try:
        return judge(names[0], answer[0] if len(answer) == 1 else answer, exercise)
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        return f"your code failed: {type(error).__name__}: {error} (at: {line})"


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
