"""What every committed notebook has to look like, and that the rules themselves notice what they
are for.
"""

import ast
import re
from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from notebooks import clean, run

from .notebook import code_cells, tagged

NOTEBOOKS = run.select([])
# Below the title.
BEATS = ["Parameters", "Start the mesh", "The picture", "Predict"]
BEATS += ["Build", "See", "Prove", "Your turn"]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
FORBIDDEN = re.compile(r"--noblock|tqdm\.auto|^!|^%%bash|ipywidgets", re.MULTILINE)
MAX_LINES, MAX_COLUMNS, MAX_CELLS, MAX_WORDS = 25, 100, 90, 2500

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@each
def test_parameters_are_typed_commented_literals_in_one_cell(path):
    nb = read(path)
    cells = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(cells) == 1
    for statement in ast.parse(cells[0].source).body:
        assert isinstance(statement, ast.AnnAssign) and statement.value, ast.unparse(statement)
        ast.literal_eval(statement.value)  # nothing derived
    found = papermill.inspect_notebook(str(path))
    assert all(parameter["help"] for parameter in found.values()), "one without a comment"
    assert {"backend", "world_size", "tp_size", "output_dir"} <= found.keys()


@each
def test_nine_beats(path):
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    outside = re.sub(r"```.*?```", "", "\n".join(texts), flags=re.DOTALL)
    headings = [line for line in outside.splitlines() if line.startswith("#")]
    titles = [line for line in headings if line.startswith("# ")]
    beats = [line.removeprefix("## ") for line in headings if line.startswith("## ")]
    assert len(titles) == 1 and headings[0] == titles[0], "one title, first"
    assert [beat.split(":")[0] for beat in beats] == BEATS
    assert not any(line.startswith("####") for line in headings), "a fourth level of headings"


@each
def test_cells_are_small_and_plain(path):
    nb = read(path)
    for cell in code_cells(nb):
        lines = cell.source.splitlines()
        assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_COLUMNS, cell.source
        assert not FORBIDDEN.search(cell.source), cell.source
    words = sum(len(cell.source.split()) for cell in nb.cells if cell.cell_type == "markdown")
    assert len(nb.cells) <= MAX_CELLS and words <= MAX_WORDS


@each
def test_every_exercise_has_a_check_and_a_solution(path):
    nb = read(path)
    names = [list(tagged(nb, kind)) for kind in ("exercise:", "check:", "solution:")]
    assert names[0] and names == names[:1] * 3
    checks = [cell for cell in code_cells(nb) if "show.check_answer(" in cell.source]
    assert all(cell.metadata.jupyter.source_hidden for cell in checks), "the answer is in sight"
    closes = [cell for cell in code_cells(nb) if "mesh.close()" in cell.source]
    assert not (checks and closes), "exercises need the ranks, which end with the kernel"


@each
def test_copies_for_students_show_no_answers(path):
    copy = clean.for_students(read(path))
    assert list(tagged(copy, "exercise:")) == list(tagged(read(path), "exercise:"))
    assert not tagged(copy, "solution:") and "</details>" not in str(copy.cells)
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(copy))


@each
def test_links_resolve(path):
    for cell in read(path).cells:
        for found in LINK.findall(cell.source) if cell.cell_type == "markdown" else []:
            target = (found[0] or found[1]).partition("#")[0]
            if target and not re.match(r"https?://|data:", target):
                assert (path.parent / target).exists(), f"{target} does not exist"


@each
def test_outputs_are_clean(path):
    assert clean.faults(read(path)) == []


@each
def test_outputs_are_fresh(path):
    assert clean.changes(read(path)) == [], "changed since it was executed: run `make notebooks`"


# --- the rules ------------------------------------------------------------------------------------


def executed(*outputs, source="print(1)", count=1, tags=()):
    metadata = {"tags": list(tags)} if tags else {}
    cell = new_code_cell(source, execution_count=count, outputs=[*outputs], metadata=metadata)
    return new_notebook(cells=[new_markdown_cell("# Title"), cell])


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


PRINTED = stream("1\n")
WIDGET = "application/vnd.jupyter.widget-view+json"
ERROR = new_output("error", ename="ValueError", evalue="3", traceback=["ValueError: 3"])


@pytest.mark.parametrize(
    "nb, fault",
    [
        (executed(PRINTED, count=2), "execution counts"),
        (executed(), "no outputs"),
        (executed(ERROR), "ends in ValueError: 3"),
        (executed(stream("careful", "stderr")), "stderr: careful"),
        (executed(new_output("display_data", {WIDGET: {}})), "widget"),
        (executed(stream("wrote /home/reader/x.pt")), "/home/reader"),
        (executed(stream(f"wrote {clean.ROOT}/x.pt")), str(clean.ROOT)),
        (executed(new_output("display_data", {"text/html": "<a href='/tmp/x'>"})), "/tmp/x"),
        (executed(stream("x" * clean.MAX_BYTES)), "more than 307,200"),
    ],
)
def test_faults_are_found(nb, fault):
    assert any(fault in found for found in clean.faults(nb)), clean.faults(nb)


def test_faultless_outputs_have_no_faults():
    assert clean.faults(executed(PRINTED)) == []
    assert clean.faults(executed(ERROR, tags=["raises-exception"])) == []
    picture = new_output("display_data", {"image/png": "abc/home/reader/"})
    assert clean.faults(executed(picture)) == []
    assert clean.faults(executed(stream("~/home/x and data/home/y"))) == []


def test_cleaning_keeps_outputs_and_drops_traces_of_the_run():
    nb = executed(stream("a"), stream("b"), stream("c", "stderr"), count=7)
    kept = {"tags": ["parameters"], "nbmake": {"mock": {"steps": 2}}}
    nb.cells[1].metadata.update(kept, papermill={"duration": 1}, execution={"x": 1})
    nb.cells.insert(1, new_code_cell("steps = 3", metadata={"tags": ["injected-parameters"]}))
    nb.metadata.update(
        papermill={}, widgets={}, kernelspec={"name": "mine"}, language_info={"version": "3.11.7"}
    )
    done = clean.clean(nb)
    assert nb.cells[1].source == "steps = 3", "the argument is left alone"
    # As JupyterLab gets them from the kernel: else it marks the notebook as changed.
    names = dict(name="python3", language="python", display_name="Python 3 (ipykernel)")
    assert done.metadata == {"kernelspec": names, "language_info": {"version": "3.11.7"}}
    (cell,) = code_cells(done)
    assert cell.metadata == kept and cell.execution_count == 1
    assert cell.outputs == [stream("ab"), stream("c", "stderr")]
    assert clean.clean(done) == done


def test_fingerprint_covers_what_the_cells_import_directly_or_not(monkeypatch, tmp_path):
    monkeypatch.setattr(clean, "ROOT", tmp_path)
    files = {
        "tutorial_lib/__init__.py": "",
        "tutorial_lib/a.py": "from . import b\nfrom .sub.c import thing\nfrom .pack import value",
        "tutorial_lib/b.py": "try:\n    import data_scripts.prepare\nfinally:\n    pass\n"
        "def late():\n    from . import unrelated",
        "tutorial_lib/sub/__init__.py": "from tutorial_lib import unrelated",
        "tutorial_lib/pack/__init__.py": "from .inner import value",
        "tutorial_lib/pack/inner.py": "value = 1",
        "tutorial_lib/sub/c.py": "from ..d import x",
        "tutorial_lib/d.py": "x = 1",
        "tutorial_lib/unrelated.py": "y = 1",
        "data_scripts/prepare.py": "import os",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    nb = new_notebook(
        cells=[
            new_code_cell("%%px\nfrom tutorial_lib import a\n%px x = 1"),
            new_markdown_cell("text"),
        ]
    )
    nb.metadata[clean.KEY] = {"executed_from": clean.fingerprint(nb)}
    assert list(nb.metadata[clean.KEY]["executed_from"]) == [
        "code cells", "data_scripts/prepare.py",
        "tutorial_lib/a.py", "tutorial_lib/b.py", "tutorial_lib/d.py",
        "tutorial_lib/pack/__init__.py", "tutorial_lib/pack/inner.py", "tutorial_lib/sub/c.py",
    ]  # fmt: skip
    assert clean.changes(nb) == []
    nb.cells[1].source = "other text"
    (tmp_path / "tutorial_lib/unrelated.py").write_text("y = 2")
    assert clean.changes(nb) == []
    (tmp_path / "tutorial_lib/d.py").write_text("x = 2")
    assert clean.changes(nb) == ["tutorial_lib/d.py"]
    nb.cells[0].source += "\nprint(1)"
    assert clean.changes(nb) == ["code cells", "tutorial_lib/d.py"]
    assert "code cells" in clean.changes(new_notebook(cells=nb.cells)), "never executed by refresh"
