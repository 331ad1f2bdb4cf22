"""Exercises: how answers are judged, which runs of a cell count, and, for every notebook, that
right answers pass and wrong ones get their reason. `exercises/NAME.md` holds these answers.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.distributed as dist

from notebooks import run
from tutorial_lib.lab import show
from tutorial_lib.lab.exercises.attempts import Attempts
from tutorial_lib.lab.exercises.judge import Exercise, judge, judge_on_rank
from tutorial_lib.lab.show.exercises import judge_here

from .notebook import Notebook, Traces, tagged

ANSWERS = Path(__file__).parent / "exercises"
BLOCK = re.compile(
    r"^## (\w+)$|^```python (setup|right|wrong)(?:: ([^\n]*))?\n(.*?)^```$", re.M | re.S
)


# --- one answer -----------------------------------------------------------------------------------


def test_values():
    wrong = {"that is the row": [4, 5, 6, 7], "count from 0": [2, 6]}

    def verdict(answer, right=[1, 5]):  # noqa: B006
        return judge("answer", answer, Exercise(right, wrong))

    for blank in (None, ..., [None, None]):
        assert verdict(blank) == "not attempted"
    for right in ([1, 5], (1, 5), torch.tensor([1, 5])):
        assert verdict(right) == "correct"
    assert verdict([4, 5, 6, 7]) == "not yet: that is the row"
    assert verdict([1, None]) == "not yet: a part of it is missing"
    assert verdict([5, 1]) == "not yet: the right numbers in another order"
    assert verdict([1, 6]) == "not yet"
    assert verdict(["1", 5]) == "not yet: '1' is not a number"
    assert verdict(5) == "not yet: it has to be a list"
    assert verdict("tp", "tp") == "correct" and verdict("dp", "tp") == "not yet"
    assert verdict(True, False) == "not yet"


@pytest.mark.parametrize(
    "right, rounded, others",
    [
        (27.125, [27, 27.1, 27.13, 27.12, 27.125], [28, 26, 27.2, 27.0625, 30, 0, -27]),
        (0.0357, [0.036, 0.0357], [0.04, 0.03, 0.35]),
        (37.5, [37, 38, 37.5], [36, 39]),
        (16384, [16384, 16384.0], [16000, 16383]),
        (0, [0, 0.0], [1e-9]),
    ],
)
def test_rounding_to_two_digits_is_right_but_a_count_is_exact(right, rounded, others):
    for answer in rounded:
        assert judge("answer", answer, Exercise(right)) == "correct", answer
    for answer in [*others, float("nan"), float("inf")]:
        assert judge("answer", answer, Exercise(right)) == "not yet", answer


TWICE = Exercise(
    right=lambda x: 2 * x,
    wrong={"it is squared": lambda x: x**2, "it is negative": lambda x: -2 * x},
    inputs=[(torch.tensor([2.0, 2.0]),), (torch.tensor([3.0, 1.0]),)],
)


def test_functions_are_run_on_every_input():
    def stub(x):
        """Twice x."""

    def in_place(x):
        return x.mul_(2)

    def nothing(x):
        x * 2

    assert judge("f", stub, TWICE) == judge("f", lambda x: None, TWICE) == "not attempted"
    assert judge("f", in_place, TWICE) == judge("f", lambda x: x + x, TWICE) == "correct"
    assert judge("f", lambda x: x * x, TWICE) == "not yet: it is squared"
    assert judge("f", nothing, TWICE) == "not yet: f([2, 2]) gave None"
    assert judge("f", lambda x: 2 * x[:1], TWICE) == (
        "not yet: f([2, 2]) gave [4]: its shape (1,) has to be (2,)"
    )
    assert judge("f", lambda x: x * 0 + 4, TWICE) == "not yet: f([3, 1]) gave [4, 4]"
    assert judge("f", 4, TWICE).startswith("not yet: f has to be a function")


def test_a_class_is_blank_if_its_methods_are():
    class Blank(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): ...

        @staticmethod
        def backward(ctx, grad): ...

    class Half(Blank):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad): ...

    inputs = [(torch.ones(1),)]
    exercise = Exercise(right=Half, inputs=inputs, use=lambda cls, x: cls.apply(x), wrong={})
    assert judge("cls", Blank, exercise) == "not attempted"
    assert judge("cls", Half, exercise) == "correct"


def test_an_error_is_an_attempt_and_is_shown():
    def f(x):
        return x + y  # noqa: F821

    def g(x):
        return torch.stack(x)

    found = judge_here({"f": f}, ["f"], TWICE)
    assert found.startswith("your code failed: NameError: name 'y' is not defined (at: return x")
    assert judge_here({"g": g}, ["g"], TWICE).endswith("(at: return torch.stack(x))")
    assert judge_here({}, ["f"], TWICE) == "f is not defined: run its cell"


# --- which run of a cell counts -------------------------------------------------------------------


def ran(attempts, source, cell=None, error=None):
    info = SimpleNamespace(raw_cell=source, cell_id=cell)
    attempts.note(SimpleNamespace(info=info, error_before_exec=None, error_in_exec=error))


@pytest.mark.parametrize("cell", [None, "a"])
@pytest.mark.parametrize(
    "source", ["answer = 3", "%%px\ndef answer(x):\n    return 3", "b, answer = 1, 2"]
)
def test_a_stale_answer_is_not_judged(source, cell):
    attempts = Attempts()
    assert attempts.obstacle("answer") is None, "no cell is known to define it"
    ran(attempts, source, cell)
    ran(attempts, "show.check_answer('exercise 1', 'answer', 3)", "b")
    assert attempts.obstacle("answer") is None
    assert "run its cell again" in attempts.obstacle("answer"), "it may have been emptied"
    ran(attempts, source, cell)
    assert attempts.obstacle("answer") is None
    ran(attempts, source, cell, ValueError("too late"))
    assert attempts.obstacle("answer").endswith("nothing is judged: ValueError: too late")
    ran(attempts, source, cell)
    ran(attempts, "%%px\n# answer = 3\n", cell)
    assert attempts.obstacle("answer") == "not attempted"
    ran(attempts, source, cell)
    ran(attempts, "other == answer", "c")
    assert attempts.obstacle("answer") is None


CHECK = """show.check_answer(
    "exercise 2", "my_reduce_scatter", by="meet_the_mesh.reduce_scatter", mesh=mesh
)"""
ANSWER = """%%px
def my_reduce_scatter(x, group):
    {}
    total = comm.all_reduce("sum", x, group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]
"""


@pytest.mark.slow
def test_an_exercise_on_ranks_after_everything_else_has_run():
    with Notebook() as notebook:
        notebook.run(
            "from tutorial_lib.lab import show\nfrom tutorial_lib.lab.mesh import Mesh\n"
            "mesh = Mesh(world_size=2, tp_size=2, timeout=5)\nmesh.start()"
        )
        assert "not defined on rank 0" in notebook.run(CHECK)
        notebook.run("%%px\nfrom tutorial_lib.parallel_layers import comm")
        notebook.run("%%px\ndef my_reduce_scatter(x, group): ...")
        assert notebook.run(CHECK) == "exercise 2: not attempted\n"
        notebook.run(ANSWER.format("x = x / dist.get_world_size(group)"))
        assert "exercise 2: not yet: it is the mean" in notebook.run(CHECK)
        notebook.run(ANSWER.format("if rank == 1: raise ValueError('not on rank 1')"))
        failed = notebook.run(CHECK)
        assert failed.startswith("exercise 2: your code failed. rank 1: ValueError: not on rank 1")
        notebook.run(ANSWER.format("if rank == 1: return x"))
        assert "rank 0 waited in all_reduce" in notebook.run(CHECK)
        notebook.run(ANSWER.format(""))
        assert notebook.run(CHECK).endswith("exercise 2: correct\n")
        assert "run its cell again" in notebook.run(CHECK)
        notebook.fail(ANSWER.format("") + "raise KeyError('later')", within=20)
        assert "its cell failed, so nothing is judged: RankError" in notebook.run(CHECK)
        traces = Traces(notebook.kernel)
    traces.assert_gone(within=10)


# --- every notebook -------------------------------------------------------------------------------


def answers_to(name: str) -> dict[str, dict]:
    """By exercise: `setup`, and the answers with words of their verdict."""
    found = {}
    for exercise, kind, words, source in BLOCK.findall((ANSWERS / f"{name}.md").read_text()):
        if exercise:
            case = found[exercise] = {"setup": "", "answers": []}
        elif kind == "setup":
            case["setup"] = source
        else:
            case["answers"].append((source, words or "correct"))
    return found


def verdicts(setup: str, sources: list[str], name: str, asked: dict) -> list[str]:
    """What the check says to each of these cells, in this process or (`mesh`) on this rank."""
    found = []
    for source in sources:
        namespace = {"torch": torch, "dist": dist, "device": torch.device("cpu")}
        if asked["mesh"]:
            namespace |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        exec(setup, namespace)
        try:
            exec(source.removeprefix("%%px\n"), namespace)
            if asked["mesh"]:
                found.append(judge_on_rank(namespace, name, asked["exercise"]))
            else:
                names = [part.strip() for part in name.split(",")]
                found.append(judge_here(namespace, names, asked["exercise"]))
        except Exception as error:
            found.append(f"your code failed: {type(error).__name__}: {error}")
    return found


def cases():
    for path in sorted(ANSWERS.glob("*.md")):
        for exercise in answers_to(path.stem):
            yield pytest.param(path.stem, exercise, id=f"{path.stem}-{exercise}")


@pytest.mark.parametrize("name, exercise", list(cases()))
def test_right_answers_pass_and_wrong_ones_get_their_reason(name, exercise, ranks, monkeypatch):
    case = answers_to(name)[exercise]
    stub, check, solution = (
        tagged(nbformat.read(run.FOLDER / f"{name}.ipynb", 4), kind)[exercise].source
        for kind in ("exercise:", "check:", "solution:")
    )
    solution = re.search(r"```python\n(.*?)\n```", solution, re.DOTALL)[1]
    answers = [(stub, "not attempted"), (solution, "correct"), *case["answers"]]

    asked = {}

    def note(title, answer, right=None, *, wrong=None, by=None, mesh=None):
        asked.update(name=answer, exercise=by or Exercise(right, wrong or {}), mesh=mesh)

    monkeypatch.setattr(show, "check_answer", note)
    namespace = {"show": show, "mesh": "the mesh"}
    if "mesh=mesh" not in check:
        exec(case["setup"], namespace)
    exec(check, namespace)
    arguments = case["setup"], [source for source, _ in answers], asked.pop("name"), asked
    if asked["mesh"]:
        by_rank = ranks(verdicts, *arguments, world_size=4, tp=2)
        assert by_rank == [by_rank[0]] * 4
        found = by_rank[0]
    else:
        found = verdicts(*arguments)
    for (source, words), verdict in zip(answers, found):
        assert words in verdict, f"{source}\n{verdict}"
        assert (verdict == "correct") == (words == "correct"), source
    counts = [words == "correct" for _, words in case["answers"]]
    assert counts.count(True) >= 2 and counts.count(False) >= 4


def test_every_notebook_has_answers_to_its_exercises():
    for path in ANSWERS.glob("*.md"):
        nb = nbformat.read(run.FOLDER / f"{path.stem}.ipynb", 4)
        assert list(answers_to(path.stem)) == list(tagged(nb, "exercise:"))
