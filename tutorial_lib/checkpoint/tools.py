"""What the tools share: opening a checkpoint by its path, writing a new one whole or not at all."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from ..storage.xser import Digests
from . import tags
from .verify import problems_of


def check_output(output: str | Path, *inputs: str | Path) -> Path:
    """The output as a path.

    Raises:
        ValueError: it is, or is inside, one of the inputs.
        FileExistsError: it exists. Nothing is ever overwritten.
    """
    output = Path(output)
    for source in inputs:
        if Path(source).resolve() in (output.resolve(), *output.resolve().parents):
            raise ValueError(f"{output} is the input or inside it: choose another place")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists already: choose another place")
    return output


def write_checkpoint(
    output: Path, step: int | None, mesh: dict[str, int], write: Callable[[Path], Digests]
) -> None:
    """Lets `write(aside)` fill a folder and publishes it as the checkpoint `output`.

    Raises:
        ValueError: `verify` would not find it sound; with the first problem.
    """
    if output.is_dir():
        output.rmdir()  # `check_output` has seen that it is empty
    output.parent.mkdir(parents=True, exist_ok=True)
    tag = tags.check_tag(output.name)
    try:
        aside = tags.begin(output.parent, tag)
        files = {str(path.relative_to(aside)): digest for path, digest in write(aside).items()}
        written = tags.Complete(tag, aside, step, 1, files, mesh)
        for problem in problems_of(written, unchanged=True):
            raise ValueError(f"{output} is not published: {problem}")
        tags.publish(aside, step, files, mesh)
    except BaseException:
        begun = {output, output.with_name(tag + tags.INCOMPLETE)}
        for path in begun.intersection(tags.incomplete(output.parent)):
            shutil.rmtree(path)
        raise


def progress(items, what: str):
    """Shows on a terminal how far a loop is."""
    return tqdm(items, desc=what, unit="tensor", disable=None)
