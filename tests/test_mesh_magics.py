"""The options of `%%px`, on a mesh that only notes what it is asked to run."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tutorial_lib.lab.mesh import magics
from tutorial_lib.lab.mesh.failures import RankError


class Noted:
    def __init__(self, error=None):
        self.error, self.ran = error, []

    def run(self, cell, ranks=None):
        self.ran.append((cell, ranks))
        if self.error:
            raise self.error


@pytest.fixture
def px():
    """`px(mesh, line)`: runs a cell on the mesh."""
    shell = InteractiveShell.instance()

    def run(mesh, line):
        magics.register(lambda: mesh)
        return shell.run_cell_magic("px", line, "x = 1\n")

    yield run
    InteractiveShell.clear_instance()


def test_ranks(px):
    mesh = Noted()
    px(mesh, "")
    px(mesh, "--rank 1,3")
    assert mesh.ran == [("x = 1\n", None), ("x = 1\n", [1, 3])]


RAISED = RankError("rank 1: ValueError: 3")


def test_a_cell_that_is_meant_to_fail_prints_its_error(px, capsys):
    px(Noted(RAISED), "--fails --rank 1")
    assert capsys.readouterr().out == "RankError: rank 1: ValueError: 3\n"


@pytest.mark.parametrize(
    "error, line, kind, words",
    [
        (None, "--fails", AssertionError, "meant to fail"),
        (RuntimeError("no ranks are up"), "--fails", RuntimeError, "no ranks"),
        (RAISED, "", RankError, "ValueError: 3"),
    ],
)
def test_nothing_else_is_meant(px, error, line, kind, words):
    with pytest.raises(kind, match=words):
        px(Noted(error), line)
