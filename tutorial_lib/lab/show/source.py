"""The library's own source in a notebook."""

import ast
import inspect
import textwrap
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
    """The source of a function, class or module; without docstrings if `docstring` is False."""
    code = textwrap.dedent(inspect.getsource(thing))
    lines: list[str | None] = list(code.splitlines())
    for node in [] if docstring else ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    return Code("\n".join(line for line in lines if line is not None))
