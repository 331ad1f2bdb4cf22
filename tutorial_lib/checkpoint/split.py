"""`split`: the weights of a Hugging Face folder, of one file or several, into the shards of a
checkpoint.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..models.full_weights import fused, published_tensors
from ..parallel_layers.utils import ensure_positive
from ..storage import check_file, objects, read_json
from ..storage.xser import Digests
from .architectures import describe_model, model_of, read_config
from .layout import shard_name, to_json, write_metadata
from .reshard import write_weights
from .tools import check_output, write_checkpoint

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there, or its index


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that `from_pretrained` opens, by the names that they have there. They
    are read from the files when they are used.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is broken, or holds code.
    """
    folder, tensors = Path(folder), {}
    for name in FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict):
                raise ValueError(
                    f"{index} does not have weight_map, which says where each tensor is"
                )
            files = sorted({folder / str(file) for file in files.values()})
        elif (folder / name).is_file():
            files = [folder / name]
        else:
            continue
        for file in files:
            tensors |= _read_file(file)
        return tensors
    raise FileNotFoundError(f"{folder / FILES[0]} is missing, and {FILES[1]} too")


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    check_file(file, None)
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except Exception as error:  # safetensors has an error class of its own
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
    value = objects.read_object(file, mmap=True)
    if not isinstance(value, dict) or not all(torch.is_tensor(x) for x in value.values()):
        raise ValueError(f"{file} does not hold tensors by name")
    return value


def split(
    source: str | Path,
    output: str | Path,
    tp: int,
    xser: bool = False,
    pad: bool = False,
    **options,
) -> None:
    """Splits the weights of a Hugging Face folder into a checkpoint, which `load_checkpoint` and
    the tools open.

    Args:
        source: the folder, such as `from_pretrained` opens.
        output: the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size.
        xser: tensor by tensor.
        pad: pad a vocabulary that `tp` does not divide.
        options: arguments of the parallel model's class, such as `shard_vocabulary=True`.

    Raises:
        ValueError: a degree that does not fit, an unknown architecture or option, missing tensors.
    """
    ensure_positive(tp=tp)
    config = read_config(source)
    output = check_output(output, source)
    model, settings = model_of(config.to_dict()), json.loads(config.to_json_string(use_diff=False))
    layouts, ties = describe_model(config, options, tp, pad)
    try:
        tensors = published_tensors(model, config, read_folder(source))
        for name, layout in layouts.items():
            whole = fused(model, name, layout.partition, layout.shape, tensors)
            layouts[name] = layout.of(whole.dtype)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    mesh = {"world": tp, "tp": tp, "dp": 1, "pp": 1, "cp": 1}

    def shard(name: str, rank: int) -> torch.Tensor:
        partition, shape = layouts[name].partition, layouts[name].shape
        whole = fused(model, name, partition, shape, tensors)
        return whole if partition is None else partition.shard(whole, rank)

    def write(aside: Path) -> Digests:
        metadata = {"mesh": mesh, "architecture": model.__name__, "config": settings}
        metadata |= {"model": to_json(layouts), "tied": ties, "optimizer": None}
        written = write_metadata(aside, metadata)
        for rank in range(tp):
            weights = {name: lambda name=name, rank=rank: shard(name, rank) for name in layouts}
            file = aside / "model" / shard_name(0, rank)
            written |= write_weights(weights, layouts, ties, file, xser)
        return written

    write_checkpoint(output, None, mesh, write)
