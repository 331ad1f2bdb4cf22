"""Every module can be the first one that somebody imports."""

import pkgutil
import subprocess
import sys

import pytest

import tutorial_lib
from tests.pool import PRELOAD

NAMES = [
    m.name
    for m in pkgutil.walk_packages(tutorial_lib.__path__, "tutorial_lib.")
    if not m.name.endswith("__main__")
]

# One process imports what is large, and each module is imported in a fork of it: a fraction of a second instead of three.
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
    assert len(NAMES) > 80
    large = [name for name in PRELOAD if not name.startswith("tutorial_lib")]
    command = [sys.executable, "-c", PROGRAM, ",".join(large), ",".join(NAMES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
