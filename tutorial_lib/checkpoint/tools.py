"""What the tools share: opening a checkpoint by its path, writing a new one whole or not at all,
and progress.
"""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from . import tags
from .files import write_object
from .reader import Reader
from .tensors import Digests

T = TypeVar("T")


def find(path: str | Path) -> tags.Complete:
    """The complete checkpoint at `path`, or the latest one in the folder `path`.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if (path / tags.DONE).is_file() or (path / "model").is_dir() or (path / "optim").is_dir():
        real = path.resolve()  # `.` and links have no name that is a tag
        return tags.find(real.parent, real.name)
    try:
        return tags.latest(path)
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


class CheckedReader(Reader):
    """A reader whose files are checked against their digests on the side, not before their use."""

    def __init__(self, checkpoint: tags.Complete):
        super().__init__(checkpoint, check=False)
        thread = ThreadPoolExecutor(1)
        self._soundness = thread.submit(self.verify_all)
        thread.shutdown(wait=False)

    def sound(self, function: Callable[..., T], *args) -> T:
        """What `function(*args)` makes of the checkpoint, if all of its files are sound.

        Raises:
            FileNotFoundError, ValueError: a file is missing, truncated or altered; that comes
                before any error that it may have led to.
        """
        try:
            result = function(*args)
        except Exception as error:
            if (reason := self._soundness.exception()) is not None:
                raise reason from error
            raise
        self._soundness.result()
        return result


def open_checkpoint(path: str | Path) -> CheckedReader:
    """The checkpoint at `path`, or the latest one in the folder `path`."""
    return CheckedReader(find(path))


def described(reader: Reader) -> Reader:
    """The reader, if its checkpoint says how its tensors are cut.

    Raises:
        ValueError: it does not, as another library wrote it or a dict was saved; it has no model.
    """
    if reader.layouts is None:
        why = "has no metadata.json" if reader.metadata is None else "was saved from a dict"
        raise ValueError(
            f"{reader.path} {why}, so that nobody knows how its tensors are cut: load it into its "
            "model and save it from there"
        )
    if not reader.layouts:
        raise ValueError(f"{reader.path} holds no model")
    if reader.pp > 1:
        raise ValueError(
            f"{reader.path} has pipeline-parallel size {reader.pp}; only size 1 is merged or cut "
            "anew"
        )
    return reader


def check_output(output: str | Path, *inputs: str | Path) -> Path:
    """The output as a path.

    Raises:
        ValueError: it is, or lies in, one of the inputs.
        FileExistsError: it exists. Nothing is ever written over.
    """
    output = Path(output)
    for source in inputs:
        if (
            output.resolve() == Path(source).resolve()
            or Path(source).resolve() in output.resolve().parents
        ):
            raise ValueError(f"{output} is the input or lies in it: choose another place")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists already: choose another place")
    return output


def write_checkpoint(
    output: Path, step: int | None, mesh: dict[str, int], write: Callable[[Path], Digests]
) -> None:
    """Lets `write(aside)` fill a folder and publishes it as the checkpoint `output`."""
    if output.is_dir():
        output.rmdir()  # `check_output` has seen that it is empty
    output.parent.mkdir(parents=True, exist_ok=True)
    tag = tags.check_tag(output.name)
    try:
        aside = tags.begin(output.parent, tag)
        files = {str(path.relative_to(aside)): digest for path, digest in write(aside).items()}
        tags.publish(aside, step, files, mesh)
    except BaseException:
        begun = {output, output.with_name(tag + tags.INCOMPLETE)}
        for path in begun.intersection(tags.incomplete(output.parent)):
            shutil.rmtree(path)
        raise


def copy_objects(source: Reader, aside: Path, names: Iterable[str]) -> Digests:
    """Copies the small files that are there."""
    return {aside / n: write_object(source.object(n), aside / n) for n in names if source.has(n)}


def progress(items, what: str):
    """Shows on a terminal how far a loop is."""
    return tqdm(items, desc=what, unit="tensor", disable=None)
