"""The library's own source in a notebook, as text or as its difference from the class that it derives from."""

import ast
import difflib
import inspect
import io
import textwrap
import tokenize
from typing import Any

_DOCUMENTED = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Module)


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
    return Code(code if docstring else _without_comments(code), "python")


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
        old = (
            _bare(textwrap.dedent(inspect.getsource(before))).splitlines()
            if before is not None
            else []
        )
        new = _bare(textwrap.dedent(inspect.getsource(after))).splitlines()
        changes = difflib.unified_diff(old, new, n=context, lineterm="")
        hunks = [line for line in changes if not line.startswith(("---", "+++"))]
        if hunks:
            lines.append(f"@@ {after.__qualname__} @@")
            lines += ["" if line.startswith("@@") else line for line in hunks[1:]]
    return Code("\n".join(lines) or "no difference", "diff")


def _without_comments(code: str) -> str:
    """The code without docstrings and comments, in its own layout."""
    lines: list[str | None] = list(code.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() or None
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) and len(node.body) > 1:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    return "\n".join(line for line in lines if line is not None)


def _bare(code: str) -> str:
    """The code without docstrings and comments, in one layout."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
