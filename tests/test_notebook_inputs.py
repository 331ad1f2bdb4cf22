"""What a notebook is given: bad parameters end before a rank starts, and a run touches only what it
made.
"""

import ast
import json
import os
import random
import re
import subprocess
import sys

import nbformat
import pytest

from notebooks import run
from tutorial_lib.lab import show
from tutorial_lib.lab.check_parameters import check_parameters
from tutorial_lib.lab.run_folder import MARKER, new_run

from .notebook import code_cells
from .notebook_cases import BAD_PARAMETERS

each = pytest.mark.parametrize("path", run.select([]), ids=lambda path: path.stem)


class Beginning:
    """A notebook up to the check of its parameters and of what follows from them."""

    def __init__(self, path):
        cells = [cell.source for cell in code_cells(nbformat.read(path, 4))]
        start = next(i for i, cell in enumerate(cells) if "new_run(" in cell)
        self.declaration = cells[0]
        self.code = [compile(cell, path.stem, "exec") for cell in cells[:start]]
        self.defaults = {}
        exec(self.code[0], self.defaults)
        self.kinds = {n: kind.__name__ for n, kind in self.defaults["__annotations__"].items()}

    def check(self, **changes):
        namespace = {}
        exec(self.code[0], namespace)
        namespace.update(changes)
        for cell in self.code[1:]:
            exec(cell, namespace)
        return namespace


HUGE = [2**31, 10**30, -(10**30)]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
OTHERS = [None, [], {}, b"x", 1j]
BAD = {
    "int": [True, "", "four", "4", 0.5, 4.0, -1, *HUGE, *NOT_FINITE, *OTHERS],
    "float": [True, "", "much", "0.1", "1e-3", -1, -0.5, 1, 1e308, *HUGE, *NOT_FINITE, *OTHERS],
    "bool": ["", "true", "false", "True", 0, 1, 1.0, *NOT_FINITE, *OTHERS],
    "str": ["", " ", "a\0b", "\n", True, 4, 0.5, *NOT_FINITE, *OTHERS],
}


@each
def test_every_parameter_refuses_what_its_kind_excludes_by_name(path):
    notebook = Beginning(path)
    for name, kind in notebook.kinds.items():
        for value in BAD[kind]:
            with pytest.raises(ValueError, match=f"^{name} ") as caught:
                notebook.check(**{name: value})
            assert repr(value) in str(caught.value)


@each
def test_parameters_that_do_not_fit_together_end_in_a_value_error_with_the_numbers(path):
    notebook, draw, outcomes = Beginning(path), random.Random(0), set()
    values = {
        "int": [1, 2, 3, 4, 5, 8, 16, 32, 33, 128, 1000, 2**31 - 1],
        "float": [1e-12, 0.1, 0.999],
        "bool": [True, False],
    }
    for _ in range(60):
        names = [n for n, kind in notebook.kinds.items() if kind in values and draw.random() < 0.3]
        changes = {name: draw.choice(values[notebook.kinds[name]]) for name in names}
        try:
            notebook.check(**changes)
            outcomes.add("fits")
        except ValueError as error:
            assert re.search(r"\d", str(error)), error
            outcomes.add("refused")
    assert outcomes == {"fits", "refused"}


@pytest.mark.slow  # a dry run of each published model
@each
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(path):
    notebook = Beginning(path)
    for parameters, numbers in BAD_PARAMETERS[path.stem]:
        with pytest.raises(ValueError) as caught:
            notebook.check(**parameters)
        assert all(str(number) in str(caught.value) for number in numbers), caught.value


def test_an_integer_for_a_fraction_becomes_one():
    namespace = {"__annotations__": {"dropout": float}, "dropout": 0}
    assert check_parameters(namespace, dropout=0) == {"dropout": 0.0}
    assert isinstance(namespace["dropout"], float)


def test_in_ipython_the_cell_itself_is_read_and_unknown_parameters_are_refused():
    """Python 3.14 keeps the annotation of the last statement that IPython ran."""
    declaration = 'steps: int = 2  # how many\noutput_dir: str = "out"  # where'
    shell = ["", declaration, "# Parameters\nsteps = 3\n"]
    namespace = {"steps": 3, "output_dir": "out", "In": shell}
    assert check_parameters(namespace) == {"steps": 3, "output_dir": "out"}
    namespace["In"].append('# Parameters\nsteps = 3\nstep = "x"\n')
    said = "no parameter is called step; there are steps, output_dir"
    with pytest.raises(ValueError, match=said):
        check_parameters(namespace)


# --- what a run touches ---------------------------------------------------------------------------


def content(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def begin(output_dir, name="06_checkpoints", data_dir=None, parameters=None):
    """What the cells of a notebook do, and a file of the run."""
    folder = new_run(name, str(output_dir), data_dir)
    claims = show.Claims(folder.parent, parameters or {})
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / f"step_{len(parameters or {})}").write_text("model")
    return claims


@each
def test_every_notebook_writes_into_a_folder_of_its_own(path):
    source = "\n".join(cell.source for cell in code_cells(nbformat.read(path, 4)))
    own = ", data_dir" if "data_dir: str" in source else ""
    assert f'new_run("{path.stem}", output_dir{own})' in source
    assert "Claims(output.parent, parameters)" in source
    plain = re.sub(r"^%.*", "", source, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(plain)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("rmtree", "remove")):
            assert ast.unparse(node.args[0]).startswith(("output / ", "old")), ast.unparse(node)
    assert source.count("resolve(output_dir)") == 0


def test_a_rerun_replaces_what_the_notebook_made_and_nothing_else(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.txt").write_text("work of months")
    (tmp_path / "checkpoints").mkdir()
    begin(tmp_path, parameters={"steps": 8}).add("first", 1, 1)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "thesis")
    begin(tmp_path, parameters={"steps": 4, "seed": 1})
    found = content(tmp_path)
    results = json.loads(found.pop("results.json"))
    assert results["results"]["parameters"] == {"steps": 4, "seed": 1} and not results["claims"]
    assert found == {
        "run/.made_by_notebook": "06_checkpoints",
        "run/checkpoints/step_2": "model",
        "thesis/draft.txt": "work of months",
    }


def marked(folder, owner):
    folder.mkdir()
    (folder / MARKER).write_text(owner)
    (folder / "mine.txt").write_text("x")


def elsewhere(output):
    marked(output / "elsewhere", "06_checkpoints")
    (output / "run").symlink_to(output / "elsewhere")


OTHERS_FILES = {
    "somebody's folder of that name": lambda output: (output / "run" / "mine").mkdir(parents=True),
    "that of another notebook": lambda output: marked(output / "run", "02_bert_tensor_parallel"),
    "a link to such a folder": elsewhere,
    "a link to nowhere": lambda output: (output / "run").symlink_to(output / "nowhere"),
    "a file": lambda output: (output / "run").write_text("x"),
    "a marker that is a folder": lambda output: (output / "run" / MARKER).mkdir(parents=True),
    "results of a training script": lambda output: (output / "results.json").write_text(
        '{"results": {"parameters": {}, "metrics": []}}'
    ),
    "other results": lambda output: (output / "results.json").write_text("[1]"),
    "a folder of results": lambda output: (output / "results.json").mkdir(),
    "a pipe of results": lambda output: os.mkfifo(output / "results.json"),
}


@pytest.mark.parametrize("make", OTHERS_FILES.values(), ids=OTHERS_FILES)
def test_what_others_made_is_refused_by_name_and_stays(tmp_path, make):
    make(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match="run|results.json"):
        begin(tmp_path)
    assert all(path.lstat().st_mtime_ns == time for path, time in before.items() if path.is_file())
    assert before.keys() <= set(tmp_path.rglob("*"))


def test_output_dir_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for output_dir in (tmp_path / "file", tmp_path / "file" / "x", "/proc/x", tmp_path / "loop"):
        with pytest.raises(ValueError, match=f"output_dir '{output_dir}' cannot be used"):
            begin(output_dir)


def test_data_inside_of_a_folder_that_is_emptied_are_refused(tmp_path):
    for data_dir in (tmp_path / "run", tmp_path / "run" / "data"):
        with pytest.raises(ValueError, match="which a notebook empties"):
            begin(tmp_path, data_dir=str(data_dir))
    begin(tmp_path, data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="which a notebook empties"):
        begin(tmp_path / "run" / "checkpoints", "02_bert_tensor_parallel")


def test_a_run_in_progress_is_left_alone_and_one_that_died_is_replaced(tmp_path):
    program = (
        "import sys\nfrom tutorial_lib.lab.run_folder import new_run\n"
        f"(new_run('06_checkpoints', {str(tmp_path)!r}) / 'half').write_text('x')\n"
        "print('made', flush=True)\nsys.stdin.read()"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as other:
        assert other.stdout.readline() == "made\n"
        with pytest.raises(ValueError, match="in use by another run"):
            begin(tmp_path)
        assert (tmp_path / "run" / "half").exists()
        other.kill()
    begin(tmp_path)
    assert not (tmp_path / "run" / "half").exists()
