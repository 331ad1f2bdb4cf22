"""How the code is laid out, read from it: where imports point, one name for one thing, sizes."""

import ast
import io
import pkgutil
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import tutorial_lib
from tests.pool import PRELOAD

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("tutorial_lib", "data_scripts", "notebooks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
LAB = ("tutorial_lib.lab", "tutorial_lib.xla_cpu")
# The calls by which a step starts and ends on XLA devices that are simulated on CPUs.
DOORS = {("tutorial_lib.backends", "tutorial_lib.xla_cpu")}

# What does not hold yet. Nothing may be added: names that are there twice, the lines of each shelf
# where they exceed the goals (book 5,850, lab 2,900, tests 9,500).
TWICE = {"Collective", "Run", "ranks"}
CODE_LINES = {"book": 6897, "lab": 3427, "exercises": 1257, "run_vendor": 296, "tests": 10489}


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


BOOK = [name for name in FILES if below(name, "tutorial_lib") and not below(name, *LAB)]


def docstrings(tree: ast.Module) -> set[ast.expr]:
    bodies = [node.body for node in ast.walk(tree) if hasattr(node, "body")]
    first = [body[0] for body in bodies if isinstance(body, list) and body]
    texts = {node.value for node in first if isinstance(node, ast.Expr)}
    return {text for text in texts if isinstance(text, ast.Constant)}


def imports(name: str) -> set[str]:
    """The modules of ours that a module imports, at its top or later, or names in a string."""
    tree, here = TREES[name], name.split(".")
    if FILES[name].name != "__init__.py":
        here = here[:-1]
    described = docstrings(tree)
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            named |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and node not in described:
            text = str(node.value)
            named |= {text.replace(":", ".")} if below(text, "tutorial_lib") else set()
    modules = set()
    for path in named:
        while path and path not in FILES:  # a name in a module
            path = path.rpartition(".")[0]
        modules |= {path} - {""}
    return modules


def package(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_the_book_imports_nothing_of_the_lab():
    found = {(name, other) for name in BOOK for other in imports(name) if below(other, *LAB)}
    assert {(name, package(other)) for name, other in found} <= DOORS


def test_nothing_in_the_library_imports_what_uses_it():
    users = ("notebooks", "tests")
    found = [(name, other) for name in FILES for other in imports(name) if below(other, *users)]
    assert [name for name, _ in found if not below(name, "notebooks")] == []


def test_no_packages_of_the_book_import_one_another_in_a_circle():
    edges = defaultdict(dict)
    for name in BOOK:
        for other in imports(name):
            ends = package(name), package(other)
            if "tutorial_lib" not in ends and ends[0] != ends[1]:
                edges[ends[0]][ends[1]] = f"{name} imports {other}"
    reached = {start: reach(start, edges) for start in edges}
    closing = {
        text
        for start, others in edges.items()
        for end, text in others.items()
        if start in reached.get(end, ())
    }
    assert not closing, "\n".join(sorted(closing))


def reach(start: str, edges: dict) -> set[str]:
    found, todo = set(), [start]
    while todo:
        new = edges.get(todo.pop(), {}).keys() - found
        found |= new
        todo += new
    return found


def test_no_two_modules_or_classes_share_a_name():
    places = defaultdict(list)
    for name, tree in TREES.items():
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        for word in [*classes, *({FILES[name].stem} - {"__init__", "__main__"})]:
            places[word].append(name)
    twice = {name: there for name, there in places.items() if len(there) > 1 and name not in TWICE}
    assert not twice


def code_lines(path: Path) -> int:
    """Lines that are not blank, comments or docstrings."""
    text = path.read_text()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    layout |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in docstrings(ast.parse(text)):
        lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("shelf, most", CODE_LINES.items())
def test_the_house_is_small(shelf, most):
    answers = {n: path for n, path in FILES.items() if below(n, "tutorial_lib.lab.exercises")}
    runner = {n: path for n, path in FILES.items() if below(n, "tutorial_lib.lab.run_vendor")}
    lab = {name: path for name, path in FILES.items() if below(name, *LAB)}
    files = {
        "book": [FILES[name] for name in BOOK],
        "lab": [lab[name] for name in lab.keys() - answers.keys() - runner.keys()],
        "exercises": answers.values(),  # the right and wrong answers to what notebooks ask
        "run_vendor": runner.values(),  # for the tutorials' own scripts alone
        "tests": (ROOT / "tests").rglob("*.py"),
    }
    assert sum(map(code_lines, files[shelf])) <= most


def test_a_module_is_read_in_one_sitting():
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert not {name: count for name, count in lines.items() if count > 310}


# One process imports what is large, and each module is imported in a fork of it: a fraction of a
# second instead of three.
PROGRAM = """
import importlib, os, sys
large, names = (words.split(",") for words in sys.argv[1:])
for name in large:
    importlib.import_module(name)
failed = []
for name in names:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"{len(failed)} failed" if failed else 0)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    names = [m.name for m in pkgutil.walk_packages(tutorial_lib.__path__, "tutorial_lib.")]
    names = [name for name in names if not name.endswith("__main__")]
    assert set(names) >= {"tutorial_lib.parallel_layers.layers", "tutorial_lib.lab.mesh.mesh"}
    large = [name for name in PRELOAD if not name.startswith("tutorial_lib")]
    command = [sys.executable, "-c", PROGRAM, ",".join(large), ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
