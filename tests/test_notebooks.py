"""Every notebook as a reader runs it: other parameters, exercises solved well and badly."""

import json
import re

import nbformat
import pytest
from papermill.exceptions import PapermillExecutionError

from notebooks import run
from tutorial_lib.backends import is_installed

from .notebook_cases import BAD_PARAMETERS, PARAMETER_SETS, QUICK, XLA_PARAMETERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = [path.stem for path in run.select([])]


def test_every_notebook_has_its_cases():
    for cases in (PARAMETER_SETS, BAD_PARAMETERS, QUICK):
        assert sorted(cases) == NAMES and all(cases.values())


# One more run of each of these is for `make test-full`; all other sets are for `make test-grid`.
IN_TEST_FULL = {
    "00_meet_the_mesh-0",
    "02_bert_tensor_parallel-0",
    "05_megatron_gpt_pretraining-0",
    "06_checkpoints-0",
}


def parameter_sets():
    for name, sets in PARAMETER_SETS.items():
        for i, parameters in enumerate(sets):
            case = f"{name}-{i}"
            marks = [] if case in IN_TEST_FULL else [pytest.mark.grid]
            yield pytest.param(name, parameters, id=case, marks=marks)


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


@pytest.mark.parametrize("name, parameters", list(parameter_sets()))
def test_runs_with_other_parameters(name, parameters, tmp_path):
    nb, results = execute(name, tmp_path, parameters)
    assert results["claims"] and all(claim["passed"] for claim in results["claims"])
    assert parameters.items() <= results["results"]["parameters"].items()
    assert not [
        o for cell in nb.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"
    ]


def metrics(results, name):
    return [m["MeasuredValue"] for m in results["results"]["metrics"] if m["MetricName"] == name]


@pytest.mark.skipif(not is_installed("torch_xla", "jax"), reason="needs torch-xla and jax")
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


def test_a_bad_parameter_of_papermill_ends_before_any_rank_starts(tmp_path):
    with pytest.raises(PapermillExecutionError, match="no parameter is called step"):
        execute("02_bert_tensor_parallel", tmp_path, {"step": 4})
    with pytest.raises(PapermillExecutionError, match="shard_mlp 'false' is not True") as caught:
        execute("02_bert_tensor_parallel", tmp_path, {"shard_mlp": "false"})
    assert caught.value.ename == "ValueError"
    ran = nbformat.read(tmp_path / "out.ipynb", 4)
    outputs = [output for cell in ran.cells for output in cell.get("outputs", [])]
    assert all(output.output_type != "stream" for output in outputs), (
        "the ranks report as they start"
    )


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
