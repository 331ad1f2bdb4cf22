"""What the tools share: opening a checkpoint by its path, writing a new one whole or not at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm
from transformers import PretrainedConfig

from ..parallel_layers import ranks
from ..storage import Digest
from . import tags
from .architectures import describe_model, model_of, read_config
from .layout import write_metadata
from .shard_files import LOW_LEVEL, ranks_of
from .shards import Shards
from .verify import publish


def open_checkpoint(path: str | Path, config: str | Path | None, options: dict) -> Shards:
    """The checkpoint at `path`, or the latest one in the folder `path`, with its layouts; or what
    `parallel_layers.save` wrote there.

    Args:
        config: the folder of the Hugging Face model, for a checkpoint that does not say how its
            tensors are sharded, such as one of the vendor's library.
        options: arguments of the parallel model's class then.

    Raises:
        FileNotFoundError, RuntimeError: there is no checkpoint.
        ValueError: it is not known how the tensors are sharded; there is no model.
    """
    path = Path(path)
    if ranks_of(path, *LOW_LEVEL.values()):
        shards = Shards(tags.Complete(path.name, path), names=LOW_LEVEL)
    else:
        shards = Shards(tags.locate(path))
    if shards.layouts is None and config is not None:
        theirs = read_config(config)
        layouts, ties = describe_model(theirs, options, shards.tp, pad=True)
        shards.use_layouts(layouts)
        shards.metadata = weights_metadata(theirs, shards.tp, ties)
    if shards.layouts is None:
        why = "does not have metadata.json" if shards.metadata is None else "was saved from a dict"
        raise ValueError(
            f"{shards.path} {why}, so it is not known how its tensors are sharded: give the folder "
            "of the Hugging Face model with --config"
        )
    if not shards.layouts:
        raise ValueError(f"{shards.path} does not hold a model")
    return shards


def weights_metadata(config: PretrainedConfig, tp: int, ties: list[list[str]]) -> dict:
    """The metadata of the weights of a Hugging Face model, but for their layouts."""
    return {
        "architecture": model_of(config.to_dict()).__name__,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "mesh": ranks.mesh_of(tp, 1),
        "tied": ties,
        "optimizer": None,
    }


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
    output: Path, step: int | None, metadata: dict, write: Callable[[Path], dict[str, Digest]]
) -> None:
    """Writes the checkpoint `output`, whose files `write(folder)` writes; it returns their digests.

    Raises:
        ValueError: `verify` would not find it sound; with the first problem.
    """
    tag = tags.check_tag(output.name)
    if output.is_dir():
        output.rmdir()  # `check_output` has seen that it is empty
    try:
        aside = tags.begin(output.parent, tag)
        written = write_metadata(aside, metadata) | write(aside)
        publish(aside, step, written, metadata["mesh"])
    except BaseException:
        shutil.rmtree(output.with_name(tag + tags.INCOMPLETE), ignore_errors=True)
        raise


def progress(items, what: str):
    """Shows on a terminal how far a loop is."""
    return tqdm(items, desc=what, unit="tensor", disable=None)
