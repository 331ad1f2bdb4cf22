"""`merge`: the shards of a checkpoint into one safetensors file, or a folder that Hugging Face's
`from_pretrained` opens.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..storage import replaced_by, write_text
from ..storage.xser import spilled
from .architectures import model_of
from .shards import Shards
from .tools import check_output, open_checkpoint, progress


def merge(
    source: str | Path, output: str | Path, config: str | Path | None = None, **options
) -> Path:
    """Merges the weights of a checkpoint.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: a file that ends in `.safetensors`, for the names that the tensors have here, or a
            folder to be, for Hugging Face's.
        config, options: see `tools.open_checkpoint`.

    Returns:
        The safetensors file.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: see `tools`; an architecture that is not
            known, a broken file.
    """
    shards = open_checkpoint(source, config, options)
    output = check_output(output, source, shards.path)
    if output.suffix == ".safetensors":
        target, names = output, lambda name: (name,)
    else:
        target = output / "model.safetensors"
        names = model_of(shards.metadata["config"]).published_names
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced_by(target) as aside:
        try:
            save_file(full_tensors(shards, names, aside), aside, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{target} could not be written: {error}") from error
    if target != output:
        write_config(shards, output)
    return target


def once(shards: Shards) -> list[str]:
    """The names of the tensors, of tied ones the first."""
    twice = {name for group in shards.metadata["tied"] for name in group[1:]}
    return [name for name in shards.layouts if name not in twice]


def write_config(shards: Shards, folder: Path) -> None:
    settings = shards.metadata["config"]
    classes = settings.get("architectures") or [shards.metadata["architecture"]]
    text = json.dumps(settings | {"architectures": classes}, indent=2, sort_keys=True)
    write_text(folder / "config.json", text + "\n")


def full_tensors(
    shards: Shards, names: Callable[[str], tuple[str, ...]], room: Path
) -> dict[str, torch.Tensor]:
    """The full tensors, by other names.

    Args:
        room: where they are written to, one at a time, to be mapped.
        names: under which names a tensor, or each of the matrices that are fused in it, is to be.
    """
    tensors = {}
    for name in progress(once(shards), "merge"):
        held, partition, theirs = shards.weights(name), shards.layouts[name].partition, names(name)
        full = partition.merge(held) if partition else held[0]
        found = full.split(partition.sizes, partition.dim) if len(theirs) > 1 else [full]
        tensors.update(zip(theirs, spilled(list(found), room), strict=True))
    return tensors
