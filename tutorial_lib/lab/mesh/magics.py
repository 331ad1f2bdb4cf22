"""`%%px` and `%px` for a mesh, and how the output of its ranks is shown."""

import os
import sys
import time

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import publish_display_data

from tutorial_lib.lab.mesh.report import RankError, as_shown, by_rank

OUTPUT_TIMEOUT = 5.0  # seconds that output may come later than the end of its cell
LIVE_AFTER = 2.0  # seconds after which a cell's output on its first rank is shown as it comes


def register(mesh) -> None:
    """Makes `%%px` and `%px` run on this mesh."""

    @magic_arguments()
    @argument("--rank", help="run on these ranks only, such as 0 or 1,3; by default on all")
    @argument(
        "--fails",
        action="store_true",
        help="the cell is meant to fail: print its error; an error if it does not",
    )
    def px(line, cell):
        """Runs the cell on every rank of the mesh. All of it is run before anything else; there is no background."""
        given = parse_argstring(px, line)
        wanted = given.rank
        try:
            ranks = None if wanted is None else [int(rank) for rank in wanted.split(",")]
        except ValueError:
            raise UsageError(
                f"--rank {wanted!r} is not a rank or a list of ranks such as 1,3"
            ) from None
        if not given.fails:
            return mesh.run(cell, ranks)
        # An error as a cell's result would end papermill, whatever the cell's tags.
        try:
            mesh.run(cell, ranks)
        except RankError as error:
            print(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("the cell was meant to fail on a rank, and did not")

    @no_var_expand
    def px_line(line):
        """Runs one line on every rank of the mesh."""
        mesh.run(line)

    shell = get_ipython()
    shell.register_magic_function(px, "cell", "px")
    shell.register_magic_function(px_line, "line", "px")


class LiveOutput:
    """Shows what the ranks print: of a long cell the first rank's lines at once, the rest in rank order at the end.

    Notebooks that run without a reader (IPP_NONINTERACTIVE=1, ipyparallel's own switch) show everything at the end.
    """

    def __init__(self, tasks: dict):
        self._metadata = {rank: task.metadata for rank, task in tasks.items()}
        self._tasks = tasks
        self._first = min(tasks)
        self._began = time.monotonic()
        self._live = os.environ.get("IPP_NONINTERACTIVE", "") in ("", "0")
        self._shown = 0  # characters of the first rank's output that are out already

    def tick(self) -> None:
        """Called while the cell runs."""
        if not self._live or time.monotonic() - self._began < LIVE_AFTER:
            return
        text = self._metadata[self._first]["stdout"][self._shown :]
        complete = text[: text.rfind("\n") + 1]
        if complete:
            if not self._shown:
                print(f"[rank {self._first}]")
            sys.stdout.write(as_shown(complete))
            sys.stdout.flush()
            self._shown += len(complete)

    def finish(self, world_size: int) -> None:
        """Called when the cell has ended, well or not."""
        for task in self._tasks.values():
            if task.ready():
                task.wait_for_output(OUTPUT_TIMEOUT)
        texts = {}
        for rank, seen in self._metadata.items():
            text = seen["stdout"] + seen["stderr"]
            if seen["execute_result"] is not None:
                text += seen["execute_result"]["data"].get("text/plain", "")
            texts[rank] = text
        if self._shown:
            texts[self._first] = texts[self._first][self._shown :]
        if text := by_rank(texts, world_size):
            print(text)
        for seen in self._metadata.values():
            for output in seen["outputs"]:
                publish_display_data(output["data"], output["metadata"])
