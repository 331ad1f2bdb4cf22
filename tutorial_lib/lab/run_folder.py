"""A folder for the files of one run of a notebook. Nothing is removed that the same notebook did
not make.
"""

import fcntl
import os
import shutil
from pathlib import Path

from tutorial_lib.lab.paths import resolve

FOLDER = "run"
MARKER = ".made_by_notebook"  # holds the notebook's name, and a lock while its kernel lives
_locks: dict[Path, int] = {}


def new_run(notebook: str, output_dir: str, data_dir: str | None = None) -> Path:
    """Makes `output_dir/run` for the files of this run; if an earlier run of the same notebook made
    it, empties it.

    Everything else in `output_dir` stays as it is.

    Args:
        notebook: the notebook's name.
        output_dir: where `results.json` goes; made if missing, relative to the checkout.
        data_dir: refused inside of `output_dir/run`, which the next run empties.

    Raises:
        ValueError: `run` was made otherwise or is in use, or `output_dir` cannot be written.
    """
    folder = resolve(output_dir) / FOLDER
    marker = folder / MARKER
    try:
        for path in filter(None, (output_dir, data_dir)):
            place = Path(os.path.realpath(resolve(path)))
            for parent in (place, *place.parents):
                if parent == Path(os.path.realpath(folder)) or (parent / MARKER).exists():
                    raise ValueError(f"{path} is inside of {parent}, which a notebook empties")
        folder.mkdir(parents=True, exist_ok=True)
        marked = marker.is_file() and not marker.is_symlink()
        if folder.is_symlink() or (not marked and any(folder.iterdir())):
            raise ValueError(_refusal(folder, "was not made by a notebook"))
        _lock(marker)
        owner = marker.read_text(errors="replace")
        if owner not in ("", notebook):
            os.close(_locks.pop(marker))
            raise ValueError(_refusal(folder, f"holds a run of {owner}, not of {notebook}"))
        marker.write_text(notebook)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
    except OSError as error:
        raise ValueError(f"output_dir {output_dir!r} cannot be used: {error}") from error
    return folder


def _refusal(folder: Path, reason: str) -> str:
    return f"{folder} {reason}: name another output_dir, or move that folder away"


def _lock(marker: Path) -> None:
    """Keeps the folder for this kernel until it ends."""
    if marker in _locks:
        os.close(_locks.pop(marker))
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(_refusal(marker.parent, "is in use by another run")) from None
    _locks[marker] = descriptor
