"""The library's own source in a notebook."""

import ast
import inspect
import io
import textwrap
import tokenize
from typing import Any


class Code:
    """Source text, coloured where Markdown is shown."""

    def __init__(self, code: str):
        self.code = code.rstrip("\n")

    def __repr__(self) -> str:
        return self.code

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.code}\n```"


def source(thing: Any, docstring: bool = True) -> Code:
    """The source of a function, class or module; without docstrings and comments if `docstring` is
    False.
    """
    code = textwrap.dedent(inspect.getsource(thing))
    return Code(code if docstring else _without_comments(code))


def _without_comments(code: str) -> str:
    """The code without docstrings and comments, in its own layout."""
    lines: list[str | None] = list(code.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() or None
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    return "\n".join(line for line in lines if line is not None)
