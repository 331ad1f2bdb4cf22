"""The library's own source in a notebook, as text or as its difference from the class that it derives from."""

import ast
import difflib
import inspect
import textwrap
from typing import Any


class Code:
    """Source text, coloured where Markdown is shown."""

    def __init__(self, code: str, language: str):
        self.code, self.language = code.rstrip("\n"), language

    def __repr__(self) -> str:
        return self.code

    def _repr_markdown_(self) -> str:
        return f"```{self.language}\n{self.code}\n```"


def source(thing: Any, docstring: bool = True) -> Code:
    """The source of a function, class or module; without docstrings and comments if `docstring` is False."""
    code = textwrap.dedent(inspect.getsource(thing))
    return Code(code if docstring else _bare(code), "python")


def diff(ours: type, theirs: type, context: int = 2) -> Code:
    """What our class changes in theirs: the methods that it overrides, or all of it if it does not inherit.

    Docstrings, comments and layout are left out on both sides, so that every line shown is a change in what runs.
    """
    if issubclass(ours, theirs):
        names = [name for name, value in vars(ours).items() if inspect.isfunction(value)]
        pairs = [(getattr(theirs, name, None), getattr(ours, name)) for name in names]
    else:
        pairs = [(theirs, ours)]
    lines = []
    for before, after in pairs:
        old = _bare(textwrap.dedent(inspect.getsource(before))).splitlines() if before is not None else []
        new = _bare(textwrap.dedent(inspect.getsource(after))).splitlines()
        changes = difflib.unified_diff(old, new, n=context, lineterm="")
        hunks = [line for line in changes if not line.startswith(("---", "+++"))]
        if hunks:
            lines.append(f"@@ {after.__qualname__} @@")
            lines += ["" if line.startswith("@@") else line for line in hunks[1:]]
    return Code("\n".join(lines) or "no difference", "diff")


def _bare(code: str) -> str:
    """The code without docstrings and comments, in one layout."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Module)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
