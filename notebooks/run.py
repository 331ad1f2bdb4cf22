"""Executes the notebooks: `tutorials` for a reader, `refresh` for what is committed; `students`
writes copies to work in.

    python -m notebooks.run tutorials [NAME …] [-p name value …]
    python -m notebooks.run refresh [NAME …]
    python -m notebooks.run students [NAME …]

NAME is a notebook or the beginning of its name (`02`). `tutorials` writes
`build/executed/NAME.ipynb` and `.html`; `refresh` executes with the notebooks' own parameters,
cleans and writes back. Every notebook is tried; the exit status is 1 if one of them failed.
`students` writes `build/students/NAME.ipynb`, without solutions and outputs.
"""

import argparse
import ast
import html
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import papermill
from ipykernel.kernelspec import write_kernel_spec
from nbconvert import HTMLExporter
from nbconvert.filters import Highlight2HTML
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from notebooks.clean import KEY, ROOT, clean, faults, fingerprint, for_students

FOLDER = ROOT / "notebooks"
EXECUTED, STUDENTS = ROOT / "build" / "executed", ROOT / "build" / "students"
# nbconvert's page sets the library's source in the font of its prose, and breaks printed lines
# within a word.
STYLE = """<style>
.jp-OutputArea-output.jp-RenderedMarkdown pre {
  font: var(--jp-code-font-size) var(--jp-code-font-family);
}
.jp-OutputArea-output pre { word-break: normal; overflow-wrap: anywhere; }
.jp-RenderedMarkdown .highlight { margin-bottom: 1em; }
</style></head>"""
CELL_TIMEOUT = 600  # seconds; the mesh's own time-outs are far shorter
ENVIRONMENT = {
    "IPP_NONINTERACTIVE": "1",  # the ranks' output as text in rank order, and no progress widgets
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # nothing here needs the hub: say so at once where something tries
    "TQDM_MININTERVAL": "1",
}


def select(names: list[str]) -> list[Path]:
    """The notebooks whose names begin with one of `names`, all for none.

    Raises:
        ValueError: a name that fits no notebook.
    """
    every = sorted(FOLDER.glob("[0-9]*.ipynb"))
    wanted = [Path(name).stem for name in names]
    for name in wanted:
        if not any(path.stem.startswith(name) for path in every):
            raise ValueError(
                f"no notebook is called {name!r}; there are "
                f"{', '.join(path.stem for path in every)}"
            )
    return [
        path for path in every if not wanted or any(path.stem.startswith(name) for name in wanted)
    ]


def parameters_of(notebook: Path) -> dict[str, object]:
    """The notebook's parameters with their defaults."""
    found = papermill.inspect_notebook(str(notebook))
    return {name: ast.literal_eval(parameter["default"]) for name, parameter in found.items()}


def execute(
    notebook: Path, output: Path | None = None, parameters: dict[str, object] | None = None
) -> NotebookNode:
    """Executes a notebook in its own folder, in a kernel of this very Python with this checkout
    first on its path.

    Args:
        output: where to write what was executed, also after an error.

    Raises:
        PapermillExecutionError: a cell failed.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="kernels-") as kernels:
        # A `python3` kernel that somebody registered for another environment must not win. Its log
        # tells of connections within this machine, and of the interrupt by which it is ended.
        write_kernel_spec(
            Path(kernels) / "kernels" / "python3", extra_arguments=["--log-level=CRITICAL"]
        )
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(ENVIRONMENT, JUPYTER_PATH=kernels, PYTHONPATH=os.pathsep.join(paths))
        try:
            return papermill.execute_notebook(
                notebook,
                output,
                parameters or {},
                kernel_name="python3",
                cwd=FOLDER,
                progress_bar=False,
                execution_timeout=CELL_TIMEOUT,
            )
        finally:
            os.environ.clear()
            os.environ.update(before)


def claims_of(notebook: Path, parameters: dict[str, object], since: float) -> str:
    """How many claims the run that began at `since` made and how many of them hold."""
    from tutorial_lib.lab.paths import resolve

    output_dir = {**parameters_of(notebook), **parameters}.get("output_dir")
    results = resolve(output_dir) / "results.json" if output_dir else None
    if results is None or not results.exists() or results.stat().st_mtime < since:
        return "no claims"
    claims = json.loads(results.read_text())["claims"]
    return f"{sum(claim['passed'] for claim in claims)} of {len(claims)} claims hold"


def tutorials(notebooks: list[Path], parameters: dict[str, object]) -> bool:
    """Executes into `EXECUTED`. A parameter goes to the notebooks that have it.

    Raises:
        ValueError: none of them has it.
    """
    known = {path: parameters_of(path) for path in notebooks}
    for name in parameters:
        if not any(name in own for own in known.values()):
            raise ValueError(
                f"no parameter {name!r} in {', '.join(path.stem for path in notebooks)}"
            )
    _make_folder(EXECUTED)

    def run(notebook: Path) -> str:
        output = EXECUTED / notebook.name
        own = {name: value for name, value in parameters.items() if name in known[notebook]}
        begun = time.time()
        try:
            execute(notebook, output, own)
        finally:
            if output.exists() and output.stat().st_mtime >= begun:
                output.with_suffix(".html").write_text(page_of(output), encoding="utf-8")
        return claims_of(notebook, own, begun)

    return _each(notebooks, run)


def page_of(notebook: Path) -> str:
    """An executed notebook as a page: `%%px` cells are coloured as Python, which nbconvert leaves
    black, folded cells show their outputs only, and pictures get the descriptions of their cells.
    """
    as_python = Highlight2HTML(pygments_lexer="ipython3")

    def highlight(source: str, language: str | None = None, metadata=None) -> str:
        if not source.startswith("%%px"):
            return as_python(source, language, metadata)
        return as_python("#" + source, language, metadata).replace("#%%px", "%%px", 1)

    exporter = HTMLExporter(template_name="lab", filters={"highlight_code": highlight})
    nb = nbformat.read(notebook, 4)
    for cell in nb.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata.transient = {"remove_source": True}
    page, _ = exporter.from_notebook_node(nb, {"metadata": {"name": notebook.stem}})
    descriptions = [
        output.metadata.get("image/png", {}).get("alt", "")
        for cell in nb.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    missing = 'alt="No description has been provided for this image"'
    for description in descriptions:
        page = page.replace(missing, f'alt="{html.escape(description)}"', 1)
    return page.replace("</head>", STYLE, 1)


def students(notebooks: list[Path]) -> bool:
    """Writes copies without solutions and outputs into `STUDENTS`, where they can be executed."""
    _make_folder(STUDENTS)
    for notebook in notebooks:
        copy = STUDENTS / notebook.name
        nbformat.write(for_students(nbformat.read(notebook, 4)), copy)
        print(os.path.relpath(copy))
    return True


def _make_folder(folder: Path) -> None:
    """Makes a folder for notebooks, with the pictures that their text shows."""
    folder.mkdir(parents=True, exist_ok=True)
    if (FOLDER / "figures").is_dir():
        shutil.copytree(FOLDER / "figures", folder / "figures", dirs_exist_ok=True)


def refresh(notebooks: list[Path]) -> bool:
    """Executes, cleans and writes back; a notebook with something in it that a reader should not
    see stays as it was.
    """

    def run(notebook: Path) -> str:
        begun = time.time()
        nb = clean(execute(notebook))
        nb.metadata[KEY] = {"executed_from": fingerprint(nb)}
        if found := faults(nb):
            raise RuntimeError("; ".join(found))
        aside = notebook.with_suffix(".ipynb.new")
        nbformat.write(nb, aside)
        aside.replace(notebook)
        return f"{claims_of(notebook, {}, begun)}, {notebook.stat().st_size:,} bytes"

    return _each(notebooks, run)


def _each(notebooks: list[Path], run) -> bool:
    """Runs each, with a line for it; True if all went well."""
    failed = []
    for notebook in notebooks:
        print(f"{notebook.stem:<40}", end=" ", flush=True)
        begun = time.perf_counter()
        try:
            outcome = run(notebook)
        except PapermillExecutionError as error:
            outcome = f"FAILED in cell {error.exec_count}: {error.ename}: {error.evalue}"
            failed.append(notebook.stem)
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {error}"
            failed.append(notebook.stem)
        print(f"{time.perf_counter() - begun:6.1f} s  {outcome}", flush=True)
    if failed:
        print(f"{len(failed)} of {len(notebooks)} failed: {', '.join(failed)}", file=sys.stderr)
    return not failed


def _value(text: str) -> object:
    """A parameter from the command line: a Python literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tutorials", "refresh", "students"):
        command = commands.add_parser(name)
        command.add_argument("names", nargs="*", metavar="NAME")
        if name == "tutorials":
            command.add_argument(
                "-p",
                nargs=2,
                action="append",
                default=[],
                metavar=("name", "value"),
                dest="parameters",
            )
    given = parser.parse_args(arguments)
    try:
        chosen = select(given.names)
        if given.command == "tutorials":
            done = tutorials(chosen, {name: _value(value) for name, value in given.parameters})
        else:
            done = {"refresh": refresh, "students": students}[given.command](chosen)
        return 0 if done else 1
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
