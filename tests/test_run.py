"""The command that executes notebooks: what it reports, and that a failure is one."""

import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from notebooks import run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of notebooks without ranks: 00 is well, 01 fails, and both write what they were
    given.
    """
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "EXECUTED", tmp_path / "executed")
    parameters = f'steps: int = 2  # how many\noutput_dir: str = "{tmp_path / "out"}"  # where'
    body = (
        "from tutorial_lib.lab import show\nclaims = show.Claims(output_dir, dict(steps=steps))\n"
        "claims.add('steps', steps, steps)\nprint(steps)"
    )
    for name, last in {"00_well": body, "01_ill": f"{body}\nclaims.add('wrong', 1, 2)"}.items():
        cells = [new_code_cell(parameters, metadata={"tags": ["parameters"]}), new_code_cell(last)]
        metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
        nbformat.write(new_notebook(cells=cells, metadata=metadata), tmp_path / f"{name}.ipynb")
    return tmp_path


@pytest.mark.slow
def test_tutorials_tries_all_reports_each_and_fails_if_one_did(folder, capsys):
    assert run.main(["tutorials"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("00_well") and first.endswith("s  1 of 1 claims hold")
    assert second.startswith("01_ill") and "ClaimError: wrong: measured 1, expected 2" in second
    assert {path.name for path in (folder / "executed").iterdir()} == {
        "00_well.ipynb", "00_well.html", "01_ill.ipynb", "01_ill.html"
    }  # fmt: skip
    assert "ClaimError" in (folder / "executed" / "01_ill.html").read_text()


def test_parameters_and_a_subset(folder, capsys):
    assert run.main(["tutorials", "00", "-p", "steps", "5"]) == 0
    written = json.loads((folder / "out" / "results.json").read_text())
    assert written["results"]["parameters"] == {"steps": 5}
    assert not (folder / "executed" / "01_ill.ipynb").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tutorials", "07"], "'07'; there are 00_well, 01_ill"),
        (["tutorials", "-p", "step", "5"], "no parameter 'step'"),
    ],
)
def test_unknown_names_are_refused(folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        run.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_refresh_writes_back_what_is_clean_and_nothing_else(folder, capsys):
    before = (folder / "01_ill.ipynb").read_bytes()
    assert run.main(["refresh"]) == 1
    well = nbformat.read(folder / "00_well.ipynb", 4)
    assert well.cells[1].outputs[0].text == "2\n" and "papermill" not in well.cells[1].metadata
    assert "tutorial_lib/lab/show/claims.py" in well.metadata["tutorial_lib"]["executed_from"]
    assert (folder / "01_ill.ipynb").read_bytes() == before
    written = (folder / "00_well.ipynb").read_bytes()
    assert run.main(["refresh", "00"]) == 0
    assert (folder / "00_well.ipynb").read_bytes() == written


def test_refresh_refuses_outputs_that_a_reader_should_not_see(folder, capsys):
    nb = nbformat.read(folder / "00_well.ipynb", 4)
    nb.cells[1].source = "import sys\nprint('careful', file=sys.stderr)"
    nbformat.write(nb, folder / "00_well.ipynb")
    assert run.main(["refresh", "00"]) == 1
    assert "cell 2 writes to stderr: careful" in capsys.readouterr().out


def test_a_page_colours_px_cells_describes_pictures_and_folds_what_is_folded(tmp_path):
    described = {"image/png": {"alt": "A"}}
    picture = new_output("display_data", {"image/png": "aGk="}, metadata=described)
    cells = [
        new_code_cell("%%px\nimport os", outputs=[picture]),
        new_code_cell("secret = 3", metadata={"jupyter": {"source_hidden": True}}),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "one.ipynb")
    page = run.page_of(tmp_path / "one.ipynb")
    assert re.search(r"%%px</span>\s*<span class=\"kn\">import</span>", page)
    assert 'alt="A"' in page and "secret" not in page


def test_copies_for_students(folder, monkeypatch, capsys):
    monkeypatch.setattr(run, "STUDENTS", folder / "students")
    (folder / "figures").mkdir()
    (folder / "figures" / "one.svg").write_text("<svg/>")
    assert run.main(["students", "00"]) == 0
    copies = sorted(path.name for path in run.STUDENTS.rglob("*.*"))
    assert copies == ["00_well.ipynb", "one.svg"]
