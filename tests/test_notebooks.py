"""Every notebook as a reader runs it: with other parameters, with bad ones, and with exercises solved well and ill."""

import json
import re

import nbformat
import pytest
from papermill.exceptions import PapermillExecutionError

from notebooks import run

from .notebook_cases import BAD_PARAMETERS, MISTAKES, PARAMETER_SETS, QUICK, XLA_PARAMETERS
from .pool import needs_xla

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = [path.stem for path in run.select([])]


def test_every_notebook_has_its_cases():
    for cases in (PARAMETER_SETS, BAD_PARAMETERS, MISTAKES, QUICK):
        assert sorted(cases) == NAMES
    assert all(len(sets) >= 3 for sets in PARAMETER_SETS.values())
    assert all(MISTAKES.values()) and all(BAD_PARAMETERS.values())


# Cases from this number on are for `make test-grid`, so that `make test-full` takes less than an hour.
PARAMETERS_IN_TEST_FULL = {
    **dict.fromkeys(NAMES, 0),
    "00_meet_the_mesh": 1,
    "02_bert_tensor_parallel": 1,
    "05_megatron_gpt_pretraining": 1,
    "06_checkpoints": 1,
}
MISTAKES_IN_TEST_FULL = {name: 0 for name in NAMES if not name.startswith("00")}
BAD_IN_TEST_FULL = dict.fromkeys(NAMES, 1)


def cases(table, limits=None):
    limits = limits or {}
    return [
        pytest.param(
            name,
            case,
            id=f"{name}-{i}",
            marks=[pytest.mark.grid] if i >= limits.get(name, i + 1) else [],
        )
        for name, each in table.items()
        for i, case in enumerate(each)
    ]


def execute(nb_or_name, tmp_path, parameters):
    """Executes into `tmp_path` and returns the notebook, and what it wrote to results.json."""
    path = tmp_path / "in.ipynb"
    if isinstance(nb_or_name, str):
        path = run.FOLDER / f"{nb_or_name}.ipynb"
    else:
        nbformat.write(nb_or_name, path)
    nb = run.execute(
        path, tmp_path / "out.ipynb", {**parameters, "output_dir": str(tmp_path / "out")}
    )
    return nb, json.loads((tmp_path / "out" / "results.json").read_text())


@pytest.mark.parametrize("name, parameters", cases(PARAMETER_SETS, PARAMETERS_IN_TEST_FULL))
def test_runs_with_other_parameters(name, parameters, tmp_path):
    nb, results = execute(name, tmp_path, parameters)
    assert results["claims"] and all(claim["passed"] for claim in results["claims"])
    assert parameters.items() <= results["results"]["parameters"].items()
    assert not [
        o for cell in nb.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"
    ]


def metrics(results, name):
    return [m["MeasuredValue"] for m in results["results"]["metrics"] if m["MetricName"] == name]


@needs_xla
@pytest.mark.grid
@pytest.mark.parametrize("name, parameters", XLA_PARAMETERS.items())
def test_runs_on_xla_with_the_losses_of_the_cpu_and_a_second_time_without_compiling(
    name, parameters, tmp_path, monkeypatch
):
    monkeypatch.setenv("TUTORIAL_XLA_CACHE", str(tmp_path / "cache"))
    _, cpu = execute(name, tmp_path, parameters)
    (_, cold), (_, warm) = (
        execute(name, tmp_path, {**parameters, "backend": "xla"}) for _ in range(2)
    )
    for results in (cold, warm):
        assert results["claims"] and all(claim["passed"] for claim in results["claims"])
        assert metrics(results, "Final loss") == pytest.approx(metrics(cpu, "Final loss"), rel=1e-5)
    (compiled,), (again,) = metrics(cold, "Compilations"), metrics(warm, "Compilations")
    assert compiled > 0 and again == 0, (compiled, again)


@pytest.mark.parametrize("name, case", cases(BAD_PARAMETERS, BAD_IN_TEST_FULL))
def test_bad_parameters_end_in_a_value_error_with_the_numbers_before_any_rank_starts(
    name, case, tmp_path
):
    parameters, numbers = case
    with pytest.raises(PapermillExecutionError) as caught:
        execute(name, tmp_path, parameters)
    assert caught.value.ename == "ValueError"
    assert all(str(number) in caught.value.evalue for number in numbers), caught.value.evalue
    ran = nbformat.read(tmp_path / "out.ipynb", 4)
    printed = [
        o.text for cell in ran.cells for o in cell.get("outputs", []) if o.output_type == "stream"
    ]
    assert not printed, "the ranks report as they start"


def tagged(nb, prefix):
    """Cells by what follows the prefix in their tags."""
    return {
        tag.removeprefix(prefix): cell
        for cell in nb.cells
        for tag in cell.metadata.get("tags", [])
        if tag.startswith(prefix)
    }


def verdicts(name, answers, tmp_path):
    """What the checks print if these answers, by exercise, are written into the notebook."""
    nb = nbformat.read(run.FOLDER / f"{name}.ipynb", 4)
    for exercise, cell in tagged(nb, "exercise:").items():
        cell.source = answers.get(exercise, cell.source)
    ran, _ = execute(nb, tmp_path, QUICK[name])
    return {
        exercise: "".join(o.text for o in cell.outputs if o.output_type == "stream")
        for exercise, cell in tagged(ran, "check:").items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_checks_accept_the_solutions(name, tmp_path):
    nb = nbformat.read(run.FOLDER / f"{name}.ipynb", 4)
    solutions = {
        exercise: re.search(r"```python\n(.*?)\n```", cell.source, re.DOTALL)[1]
        for exercise, cell in tagged(nb, "solution:").items()
    }
    found = verdicts(name, solutions, tmp_path)
    assert found.keys() == solutions.keys()
    assert all(text.strip().endswith(": correct") for text in found.values()), found


@pytest.mark.parametrize("name, mistakes", cases(MISTAKES, MISTAKES_IN_TEST_FULL))
def test_checks_reject_mistakes_and_say_what_is_wrong(name, mistakes, tmp_path):
    answers = {exercise: answer for exercise, (answer, _) in mistakes.items()}
    found = verdicts(name, answers, tmp_path)
    for exercise, (_, explanation) in mistakes.items():
        assert "correct" not in found[exercise] and explanation in found[exercise], found[exercise]
