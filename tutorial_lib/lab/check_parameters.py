"""The parameters of a notebook, checked: kinds come from its parameters cell, so that they are
written down once.
"""

import ast
from collections.abc import Collection
from typing import Any

from tutorial_lib.backends import check_backend

LARGEST = 2**31 - 1
INJECTED = "# Parameters"  # first line of the cell that papermill inserts


def check_parameters(
    namespace: dict[str, Any], **limits: int | Collection[str]
) -> dict[str, int | float | bool | str]:
    """Checks every parameter of the notebook that calls it with its `globals()`.

    The parameters cell declares them as `name: kind = default`, `output_dir: str` among them. An
    `int` has to be at least 1, a `float` above 0 and below 1, a `str` printable text. An integer
    for a `float` becomes one, in `namespace` too.

    Args:
        namespace: `globals()` of the notebook.
        limits: by name, the smallest number allowed, or the words allowed.

    Returns:
        All parameters, in the order of the cell.

    Raises:
        ValueError: a value that is not allowed, or a name that papermill was given and the cell
            does not declare.
    """
    kinds = _declared(namespace)
    for cell in namespace.get("In", []):
        for name in _assigned(cell, ast.Assign) if cell.startswith(INJECTED) else ():
            if name not in kinds:
                raise ValueError(f"no parameter is called {name}; there are {', '.join(kinds)}")
    checked = {
        name: _check(name, kind, namespace[name], limits.get(name)) for name, kind in kinds.items()
    }
    if "backend" in checked:
        checked["backend"] = check_backend(checked["backend"])  # `auto` is one of them from here on
    namespace.update(checked)
    return checked


def _declared(namespace: dict[str, Any]) -> dict[str, str]:
    """The parameters' kinds by name."""
    for cell in reversed(namespace.get("In", [])):
        if "\noutput_dir: str =" in cell:
            return _assigned(cell, ast.AnnAssign)
    # Not in IPython. (There it would do as well, but for Python 3.14, which keeps the last
    # annotation only.)
    return {name: kind.__name__ for name, kind in namespace["__annotations__"].items()}


def _assigned(cell: str, form: type) -> dict[str, str | None]:
    """The names that a cell's assignments of this form set, with their annotations."""
    found = [statement for statement in ast.parse(cell).body if isinstance(statement, form)]
    if form is ast.AnnAssign:
        return {statement.target.id: statement.annotation.id for statement in found}
    return {target.id: None for statement in found for target in statement.targets}


def _check(name: str, kind: str, value: Any, limit: int | Collection[str] | None) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "bool":
        fits, rule = isinstance(value, bool), "True or False (capitalised, without quotes)"
    elif kind == "int":
        least = 1 if limit is None else limit
        fits = number and isinstance(value, int) and least <= value <= LARGEST
        rule = f"an integer from {least} to {LARGEST} (digits only, without quotes)"
    elif kind == "float":
        fits = number and value < 1 and (value > 0 if limit is None else value >= limit)
        least = "above 0" if limit is None else f"of at least {limit}"
        rule = f"a number {least} and below 1 (without quotes, such as 1.0e-3)"
    elif limit is not None:
        fits, rule = isinstance(value, str) and value in limit, f"one of {', '.join(limit)}"
    else:
        fits = isinstance(value, str) and value.isprintable() and value.strip()
        rule = "printable text (in quotes; `papermill -r` takes a number as text)"
    if not fits:
        raise ValueError(f"{name} {value!r} is not {rule}")
    return float(value) if kind == "float" else value
