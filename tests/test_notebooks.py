"""Every notebook as a reader runs it: other parameters, exercises solved well and badly."""

import json
import re

import nbformat
import pytest
from papermill.exceptions import PapermillExecutionError

from notebooks import run
from tutorial_lib.backends import is_installed

from .notebook import code_cells, printed, tagged
from .notebook_cases import BAD_PARAMETERS, PARAMETER_SETS, QUICK, XLA_PARAMETERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = [path.stem for path in run.select([])]
HAS_XLA = is_installed("torch_xla", "jax")


def test_every_notebook_has_its_cases():
    for cases in (PARAMETER_SETS, BAD_PARAMETERS, QUICK):
        assert sorted(cases) == NAMES and all(cases.values())


# In `make test-full` the exercises of these are solved with the first of the other parameters, and
# those of the rest with as little as will do; all other sets are for `make test-grid`.
IN_TEST_FULL = (
    "00_meet_the_mesh", "02_bert_tensor_parallel", "05_megatron_gpt_pretraining", "06_checkpoints"
)  # fmt: skip


def execute(nb_or_name, tmp_path, parameters):
    """Executes into `tmp_path` and returns the notebook, and what it wrote to results.json."""
    path = tmp_path / "in.ipynb"
    if isinstance(nb_or_name, str):
        path = run.FOLDER / f"{nb_or_name}.ipynb"
    else:
        nbformat.write(nb_or_name, path)
    parameters = parameters | {"output_dir": str(tmp_path / "out")}
    nb = run.execute(path, tmp_path / "out.ipynb", parameters)
    return nb, json.loads((tmp_path / "out" / "results.json").read_text())


def passed(nb, results, parameters):
    """That the notebook's claims hold, with these parameters, and nothing went to stderr."""
    assert results["claims"] and all(claim["passed"] for claim in results["claims"])
    assert parameters.items() <= results["results"]["parameters"].items()
    outputs = [output for cell in code_cells(nb) for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]


OTHERS = {
    f"{name}-{i}": (name, parameters)
    for name, sets in PARAMETER_SETS.items()
    for i, parameters in enumerate(sets)
    if i > 0 or name not in IN_TEST_FULL
}


@pytest.mark.grid
@pytest.mark.parametrize("name, parameters", OTHERS.values(), ids=OTHERS)
def test_runs_with_other_parameters(name, parameters, tmp_path):
    passed(*execute(name, tmp_path, parameters), parameters)


def metrics(results, name):
    return [m["MeasuredValue"] for m in results["results"]["metrics"] if m["MetricName"] == name]


@pytest.mark.skipif(not HAS_XLA, reason="needs torch-xla and jax")
@pytest.mark.grid
@pytest.mark.parametrize("name, parameters", XLA_PARAMETERS.items())
def test_runs_on_xla_with_the_losses_of_the_cpu_and_a_second_time_without_compiling(
    name, parameters, tmp_path, monkeypatch
):
    monkeypatch.setenv("TUTORIAL_XLA_CACHE", str(tmp_path / "cache"))
    _, cpu = execute(name, tmp_path, parameters)
    _, cold = execute(name, tmp_path, {**parameters, "backend": "xla"})
    compiled = set((tmp_path / "cache").iterdir())
    _, warm = execute(name, tmp_path, {**parameters, "backend": "xla"})
    for results in (cold, warm):
        assert results["claims"] and all(claim["passed"] for claim in results["claims"])
        assert metrics(results, "Final loss") == pytest.approx(metrics(cpu, "Final loss"), rel=1e-5)
    # By the ranks that were started last, and by all that came before them.
    assert metrics(warm, "Compilations") == [0]
    assert compiled and set((tmp_path / "cache").iterdir()) == compiled


def test_a_bad_parameter_of_papermill_ends_before_any_rank_starts(tmp_path):
    with pytest.raises(PapermillExecutionError, match="no parameter is called step"):
        execute("02_bert_tensor_parallel", tmp_path, {"step": 4})
    with pytest.raises(PapermillExecutionError, match="shard_mlp 'false' is not True") as caught:
        execute("02_bert_tensor_parallel", tmp_path, {"shard_mlp": "false"})
    assert caught.value.ename == "ValueError"
    ran = nbformat.read(tmp_path / "out.ipynb", 4)
    assert not any(printed(cell.outputs) for cell in code_cells(ran)), (
        "ranks report when they start"
    )


@pytest.mark.parametrize("name", NAMES)
def test_checks_accept_the_solutions(name, tmp_path):
    parameters = PARAMETER_SETS[name][0] if name in IN_TEST_FULL else QUICK[name]
    if parameters.get("backend") == "xla" and not HAS_XLA:
        parameters = QUICK[name]
    nb = nbformat.read(run.FOLDER / f"{name}.ipynb", 4)
    solutions, exercises = tagged(nb, "solution:"), tagged(nb, "exercise:")
    assert solutions.keys() == exercises.keys()
    for exercise, cell in exercises.items():
        cell.source = re.search(r"```python\n(.*?)\n```", solutions[exercise].source, re.DOTALL)[1]
    ran, results = execute(nb, tmp_path, parameters)
    passed(ran, results, parameters)
    checks = tagged(ran, "check:")
    assert checks.keys() == solutions.keys()
    for cell in checks.values():
        assert printed(cell.outputs).strip().endswith(": correct"), cell.outputs
