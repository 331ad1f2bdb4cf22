"""`%%px` and `%px` for a mesh."""

from collections.abc import Callable

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from tutorial_lib.lab.mesh.failures import RankError


def register(mesh_that_is_up: Callable) -> None:
    """Makes `%%px` and `%px` run on the mesh that the function returns; does nothing outside of
    IPython.
    """
    shell = get_ipython()
    if shell is None:
        return
    # IPython prints a wrong option or an unknown magic in place of raising it, and nbmake would
    # count the cell, and all that follow and never run, as passed.
    shell.show_usage_error = lambda error: shell._showtraceback(
        UsageError, error, [f"UsageError: {error}"]
    )

    def ranks(words: str) -> list[int]:
        return [int(rank) for rank in words.split(",")]

    @magic_arguments()
    @argument(
        "--rank", type=ranks, help="run on these ranks only, such as 0 or 1,3; by default on all"
    )
    @argument(
        "--fails",
        action="store_true",
        help="the cell is meant to fail: print its error; an error if it does not",
    )
    def px(line, cell):
        """Runs the cell on every rank of the mesh. All of it is run before anything else; there is
        no background.
        """
        given = parse_argstring(px, line)
        try:
            mesh_that_is_up().run(cell, given.rank)
        except RankError as error:
            if not given.fails:
                raise
            # An error as a cell's result would end papermill, whatever the cell's tags.
            print(f"{type(error).__name__}: {error}")
        else:
            if given.fails:
                raise AssertionError("the cell was meant to fail on a rank, and did not")

    @no_var_expand
    def px_line(line):
        """Runs one line on every rank of the mesh."""
        mesh_that_is_up().run(line)

    shell.register_magic_function(px, "cell", "px")
    shell.register_magic_function(px_line, "line", "px")
