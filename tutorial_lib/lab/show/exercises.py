"""The check of an exercise: judges what its cell has left behind, here or on the ranks."""

import os
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from IPython import get_ipython

from tutorial_lib.lab.exercises.attempts import ATTEMPTS
from tutorial_lib.lab.exercises.judge import Exercise, judge, named
from tutorial_lib.lab.mesh.failures import RankError
from tutorial_lib.lab.mesh.reports import PACKAGE_DIR


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
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        library = PACKAGE_DIR, os.path.dirname(torch.__file__)
        line = next((f for f in frames if not f.filename.startswith(library)), frames[0]).line
        return f"your code failed: {type(error).__name__}: {error} (at: {line})"
