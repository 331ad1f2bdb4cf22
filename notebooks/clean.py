"""What a committed notebook looks like: how an executed one is cleaned, what is still wrong with
it, and whether it is stale.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tutorial_lib", "data_scripts")
MAX_BYTES = 300 * 1024
KEY = "tutorial_lib"  # of our notebook metadata
EXPECTED_ERROR = "raises-exception"
_MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:home|Users|root|tmp|var/folders)/[\w.-]+")


def clean(nb: NotebookNode) -> NotebookNode:
    """Strips an executed notebook of traces of the tool that ran it and of the time it ran.

    Warnings and errors stay: `faults` names them, and they are fixed at their source.
    """
    nb = nbformat.from_dict(json.loads(json.dumps(nb)))
    nb.metadata = NotebookNode(
        {key: nb.metadata[key] for key in ("language_info", KEY) if key in nb.metadata}
    )
    # Both as JupyterLab gets them from a kernel: it marks a notebook that says otherwise as changed
    # when it opens it.
    nb.metadata.setdefault("language_info", NotebookNode(name="python"))
    nb.metadata.kernelspec = NotebookNode(
        name="python3", language="python", display_name="Python 3 (ipykernel)"
    )
    nb.cells = [
        cell for cell in nb.cells if "injected-parameters" not in cell.metadata.get("tags", [])
    ]
    for number, cell in enumerate((c for c in nb.cells if c.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = list(_merged(cell.outputs))
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
    for cell in nb.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = NotebookNode(
            {key: cell.metadata[key] for key in ("nbmake", "jupyter") if key in cell.metadata}
        )
        if tags:
            cell.metadata.tags = tags
    return nb


def for_students(nb: NotebookNode) -> NotebookNode:
    """A notebook to work in: without outputs and without the cells tagged `solution:…`."""
    nb = clean(nb)
    nb.metadata.pop(KEY, None)
    nb.cells = [
        cell
        for cell in nb.cells
        if not any(tag.startswith("solution:") for tag in cell.metadata.get("tags", []))
    ]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def _merged(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """The outputs, with consecutive pieces of one stream as one."""
    pending = None
    for output in outputs:
        if (
            pending
            and output.output_type == "stream" == pending.output_type
            and output.name == pending.name
        ):
            pending.text += output.text
            continue
        if pending:
            yield pending
        pending = output
    if pending:
        yield pending


def faults(nb: NotebookNode) -> list[str]:
    """What a reader should not meet in a committed notebook's outputs and metadata; empty if all is
    well.
    """
    found = []
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"execution counts are {counts}, not 1 to {len(code)}")
    if not any(cell.outputs for cell in code):
        found.append("no outputs")
    for number, cell in enumerate(code, start=1):
        expected_error = EXPECTED_ERROR in cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "error" and not expected_error:
                found.append(f"cell {number} ends in {output.ename}: {output.evalue[:200]}")
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"cell {number} writes to stderr: {output.text[:200]}")
            if any("widget" in mime for mime in output.get("data", {})):
                found.append(f"cell {number} has a widget, which GitHub cannot show")
            for path in sorted(
                {*_MACHINE_PATH.findall(_words(output)), *_own_paths(_words(output))}
            ):
                found.append(f"cell {number} shows a path of this machine: {path}")
        for key in ("papermill", "execution"):
            if key in cell.metadata:
                found.append(f"cell {number} has {key} metadata")
    found += [
        f"the notebook has {key} metadata" for key in ("papermill", "widgets") if key in nb.metadata
    ]
    nbytes = len(nbformat.writes(nb).encode())
    if nbytes > MAX_BYTES:
        found.append(f"{nbytes:,} bytes, more than {MAX_BYTES:,}")
    return found


def _words(output: NotebookNode) -> str:
    """All text of an output, without pictures."""
    data = [
        value for mime, value in output.get("data", {}).items() if not mime.startswith("image/")
    ]
    return json.dumps([output.get("text", ""), data, output.get("traceback", [])])


def _own_paths(words: str) -> list[str]:
    return [
        path for path in (str(ROOT), str(Path.home()), sys.prefix) if path != "/" and path in words
    ]


def fingerprint(nb: NotebookNode) -> dict[str, str]:
    """A hash of the code cells and one of each file of this repository that they import, directly
    or through others.
    """
    cells = [cell.source for cell in nb.cells if cell.cell_type == "code"]
    files: set[Path] = set()
    todo = [(_python(source), None) for source in cells]
    while todo:
        source, importer = todo.pop()
        for path in _imports(source, importer):
            if path not in files:
                files.add(path)
                todo.append((path.read_text(), path))
    hashes = {
        path.relative_to(ROOT).as_posix(): _hash(path.read_text())
        for path in files
        if path.read_text().strip()
    }
    return {"code cells": _hash("\n\n".join(cells)), **dict(sorted(hashes.items()))}


def changes(nb: NotebookNode) -> list[str]:
    """What has changed since the notebook was last executed by `refresh`."""
    then, now = nb.metadata.get(KEY, {}).get("executed_from", {}), fingerprint(nb)
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _python(source: str) -> str:
    """A cell without magics and shell lines."""
    return "\n".join(
        "" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines()
    )


def _imports(source: str, importer: Path | None) -> Iterator[Path]:
    """The files of `PACKAGES` that a cell imports, or that a file imports when it is loaded.

    An import inside a function of the library is for some backend or option only, and would make
    notebooks stale that never get there.
    """
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if importer is None or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            modules = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level and importer is not None:
                package = importer.relative_to(ROOT).parts[: -node.level]
                base = ".".join((*package, *([node.module] if node.module else [])))
            modules = [(base, [alias.name for alias in node.names])]
        else:
            continue
        for base, names in modules:
            submodules = [file for name in names if (file := _file(f"{base}.{name}"))]
            yield from submodules
            # A package counts for what it defines itself, not as the way to its modules.
            if len(submodules) < max(len(names), 1) and (file := _file(base)):
                yield file


def _file(module: str) -> Path | None:
    """The file of a module or package of this repository."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    place = ROOT.joinpath(*parts)
    files = (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())
    # Where file names have no case, `mesh.Mesh` would be `mesh/mesh.py`.
    return next((path for path in files if path in path.parent.iterdir()), None)
