"""A reader in JupyterLab: headless Chromium opens notebook 00, runs it, solves an exercise, breaks
a rank and leaves. Chromium is driven over its DevTools protocol.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request

import psutil
import pytest
import websocket

from notebooks import run

from .slurm import wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
]
NOTEBOOK = "00_meet_the_mesh.ipynb"
LAB = "-m jupyterlab --no-browser --allow-root --port=0 --IdentityProvider.token=secret "
LAB += "--expose-app-in-browser"
HEADLESS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
HEADLESS += "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
HEADLESS += "--remote-debugging-port=0 --remote-allow-origins=* --window-size=1400,1000"
# What the test needs of the page: the notebook, its cells by tag, and what a cell has put out.
HELPERS = """
    const panel = () => jupyterapp.shell.currentWidget;
    const cells = () => panel().content.widgets;
    const code = () => cells().filter(cell => cell.model.type === 'code');
    const tagged = tag => cells().findIndex(
        cell => (cell.model.getMetadata('tags') || []).includes(tag));
    const outputs = cell => cell.model.outputs.toJSON();
    const shown = index => outputs(cells()[index]).map(
        one => [one.text, one.evalue, one.traceback].flat().filter(Boolean).join(' ')).join('');
    const idle = () => panel().sessionContext.session?.kernel?.status === 'idle';
"""


class Page:
    """One page of Chromium, driven over the address of its DevTools."""

    def __init__(self, address: str):
        self._socket, self._sent = websocket.create_connection(address, timeout=60), 0

    def call(self, method: str, **parameters) -> dict:
        self._sent += 1
        self._socket.send(json.dumps(dict(id=self._sent, method=method, params=parameters)))
        while (answer := json.loads(self._socket.recv())).get("id") != self._sent:
            pass
        assert "result" in answer, answer
        return answer["result"]

    def js(self, expression: str):
        """The value of an expression in the page; it may be a promise."""
        script = f"(async () => {{ {HELPERS} return {expression} }})()"
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def menu(self, command: str) -> None:
        """What an entry of a menu does; it may go on afterwards."""
        self.js(f"void jupyterapp.commands.execute('{command}')")

    def key(self, name: str, code: int, modifiers: int) -> None:
        pressed = dict(key=name, code=name, windowsVirtualKeyCode=code, modifiers=modifiers)
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **pressed)

    def start(self, cell: int, source: str | None = None) -> None:
        """Types over a cell, if `source` is given, and presses Shift+Enter in it."""
        self.js(f"panel().content.activeCellIndex = {cell}")
        if source is not None:
            self.js("jupyterapp.commands.execute('notebook:enter-edit-mode')")
            editor = "document.activeElement.className.includes('cm-content')"
            wait_for(lambda: self.js(editor), 10, "the cursor is in the cell")
            self.key("KeyA", 65, modifiers=2)
            self.call("Input.insertText", text=source)
            typed = f"cells()[{cell}].model.sharedModel.getSource()"
            wait_for(lambda: self.js(typed) == source, 10, "the text is typed")
        self.key("Enter", 13, modifiers=8)

    def run(self, cell: int, source: str | None = None) -> str:
        """Runs a cell as `start` does; what it puts out."""
        count = f"cells()[{cell}].model.executionCount"
        before = self.js(count)
        self.start(cell, source)
        ended = f"idle() && {count} && {count} !== {json.dumps(before)}"
        wait_for(lambda: self.js(ended), 60, f"cell {cell} has run")
        return self.js(f"shown({cell})")


@pytest.fixture
def page(tmp_path):
    """JupyterLab on a copy of notebook 00, open in Chromium."""
    shutil.copy(run.FOLDER / NOTEBOOK, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(run.ROOT), "HOME": str(tmp_path)}
    environment.pop("IPP_NONINTERACTIVE", None)
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    began = [psutil.Popen([sys.executable, *LAB.split()], env=environment, **silent)]
    try:
        runtime = tmp_path / ".local/share/jupyter/runtime"
        found = wait_for(lambda: [*runtime.glob("jpserver-*.json")], 60, "JupyterLab is up")
        url = f"{json.loads(found[0].read_text())['url']}lab/tree/{NOTEBOOK}?token=secret"
        profile = f"--user-data-dir={tmp_path}/profile"
        began.append(psutil.Popen([CHROMIUM, *HEADLESS.split(), profile, url], **silent))
        port = tmp_path / "profile/DevToolsActivePort"
        wait_for(lambda: port.exists() and port.read_text(), 60, "Chromium is up")
        with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json") as got:
            (target,) = (one for one in json.load(got) if one["type"] == "page")
        opened = Page(target["webSocketDebuggerUrl"])
        opened.server = began[0]
        ready = "typeof jupyterapp === 'object' && !!panel()?.content && cells().length > 40"
        wait_for(lambda: opened.js(f"{ready} && idle()"), 120, "the notebook is open")
        yield opened
    finally:
        for process in began:
            for one in [*process.children(recursive=True), process]:
                one.kill()
            process.wait()


def test_a_reader_runs_solves_breaks_repairs_and_leaves(page):
    page.menu("notebook:run-all-cells")
    of_ranks = "code().some(cell => JSON.stringify(outputs(cell)).includes('rank 3'))"
    wait_for(lambda: page.js(of_ranks), 120, "the first output of several ranks")
    wait_for(
        lambda: page.js("idle() && code().every(cell => cell.model.executionCount)"), 240, "all"
    )
    assert page.js("code().every(c => outputs(c).every(one => one.output_type !== 'error'))")

    # An exercise after Run All: wrong, then right.
    exercise, check = page.js("[tagged('exercise:group'), tagged('check:group')]")
    page.run(exercise, "group_of_rank_5 = [4, 5, 6, 7]")
    assert "not yet: that is its tensor-parallel group" in page.run(check)
    page.run(exercise, "group_of_rank_5 = [1, 5]")
    assert page.run(check).endswith(": correct\n")

    # An error on one rank, and the repaired cell.
    broken = page.run(exercise, "%%px\nif rank == 1:\n    raise ValueError('mine')\nprint(rank)")
    assert "rank 1: ValueError: mine" in broken
    repaired = page.run(exercise, "%%px\nprint(rank + 10)")
    assert all(f"[rank {rank}] {rank + 10}" in repaired for rank in range(4)), repaired

    # The stop button, while the ranks are busy.
    page.start(exercise, "%%px\nimport time\nprint('begun', flush=True)\ntime.sleep(600)")
    wait_for(lambda: "begun" in page.js(f"shown({exercise})"), 20, "the ranks are busy")
    page.menu("notebook:interrupt-kernel")
    wait_for(lambda: page.js("idle()"), 20, "the interrupted cell has ended")
    assert "KeyboardInterrupt" in page.js(f"shown({exercise})")

    # The kernel is shut down, and its ranks with it.
    everything = page.server.children(recursive=True)
    assert len(everything) >= 5, "a kernel and four ranks"
    page.menu("kernelmenu:shutdown")
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert not alive, [one.cmdline() for one in alive]
