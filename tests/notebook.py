"""A notebook without a reader: cells run one by one in a kernel of their own, and what they leave
behind is looked at.
"""

import os
import re
import signal
import socket
import threading
import time

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

ANSI = re.compile(r"\x1b\[")


class Notebook:
    """`with Notebook() as notebook: notebook.run("print(1)")`."""

    def __init__(self, environment: dict[str, str] | None = None):
        self._environment = os.environ | {"IPP_NONINTERACTIVE": "1"} | (environment or {})
        self._client = NotebookClient(new_notebook(), timeout=150, kernel_name="python3")

    def __enter__(self) -> "Notebook":
        self._client.create_kernel_manager()
        self._client.start_new_kernel(env=self._environment)
        self._client.start_new_kernel_client()
        self.kernel = psutil.Process(self._client.km.provisioner.pid)
        return self

    def __exit__(self, *_) -> None:
        self._client._cleanup_kernel()

    def run(self, source: str) -> str:
        """Runs a cell and returns what it printed.

        Raises:
            AssertionError: it showed anything else than text on stdout.
            CellExecutionError: the cell failed.
        """
        cell = new_code_cell(source)
        self._client.nb.cells.append(cell)
        try:
            self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        finally:
            self.outputs = cell.outputs
        assert all(o.get("name") == "stdout" for o in cell.outputs), cell.outputs
        return printed(cell.outputs)

    def fail(self, source: str, within: float) -> str:
        """Runs a cell that has to fail within that many seconds, and returns the error as shown."""
        began = time.monotonic()
        try:
            said = self.run(source)
        except CellExecutionError:
            took = time.monotonic() - began
        else:
            raise AssertionError(f"the cell did not fail; it printed {said!r}")
        assert took < within, f"the cell took {took:.1f} s to fail, not {within} s at most"
        (error,) = (o for o in self.outputs if o.output_type == "error")
        text = "\n".join(error.traceback)
        assert not ANSI.search(text), text
        return text

    def interrupt_after(self, seconds: float) -> None:
        """What the stop button does, a while from now."""
        threading.Timer(seconds, self.kernel.send_signal, [signal.SIGINT]).start()


def printed(outputs) -> str:
    """What cells wrote to stdout and stderr."""
    return "".join(o.text for o in outputs if o.output_type == "stream")


def _listening(process: psutil.Process) -> set[int]:
    found = process.net_connections("tcp")
    return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}


class Traces:
    """The processes below a kernel, their listening ports and their files in /dev/shm, to be looked
    for later.
    """

    def __init__(self, kernel: psutil.Process):
        self.processes = kernel.children(recursive=True)
        self._kernel_ports, *others = map(_listening, [kernel, *self.processes])
        self.ports = self._kernel_ports.union(*others)
        self.mine = {str(p.pid) for p in self.processes}

    def assert_gone(self, within: float, ports: bool = True, kernel_too: bool = False) -> None:
        """Fails unless all of it is gone after that many seconds.

        Args:
            ports: look at these, too; not if a new mesh is up by now that may have been given one
                of them.
            kernel_too: the kernel is expected to be gone as well.
        """
        _, alive = psutil.wait_procs(self.processes, timeout=within)
        assert not alive, [(p.pid, p.cmdline()) for p in alive]
        closed = self.ports if kernel_too else self.ports - self._kernel_ports
        for port in closed if ports else ():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        if os.path.isdir("/dev/shm"):
            left = [n for n in os.listdir("/dev/shm") if self.mine & set(re.findall(r"\d+", n))]
            assert not left


def write(path, *cells: str) -> str:
    """Writes a notebook of these cells and returns its path."""
    notebook = new_notebook(cells=[new_code_cell(c) for c in cells])
    notebook.metadata.kernelspec = dict(name="python3", display_name="", language="python")
    nbformat.write(notebook, path)
    return str(path)


def code_cells(nb: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tagged(nb: nbformat.NotebookNode, prefix: str) -> dict[str, nbformat.NotebookNode]:
    """Cells by what follows the prefix in their tags."""
    return {
        tag.removeprefix(prefix): cell
        for cell in nb.cells
        for tag in cell.metadata.get("tags", [])
        if tag.startswith(prefix)
    }
