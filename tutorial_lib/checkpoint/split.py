"""`split`: the weights of a Hugging Face folder, of one file or several, into the shards of a
checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..models.full_weights import fused, published_tensors
from ..parallel_layers.utils import ensure_positive
from ..storage import check_file, read_json
from ..storage.xser import load
from .architectures import describe_model, model_of, read_config
from .distributed import is_distributed, read_distributed
from .layout import shard_name, to_json
from .save import write_files
from .tools import check_output, weights_metadata, write_checkpoint

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there, or its index


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that `from_pretrained` opens, by the names that they have there. They
    are read from the files when they are used.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is broken, or holds code.
    """
    folder = Path(folder)
    if is_distributed(folder):
        return read_distributed(folder)
    for name in FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = read_json(index).get("weight_map")
            if not isinstance(parts, dict):
                raise ValueError(
                    f"{index} does not have weight_map, which says where each tensor is"
                )
            found = [_read_file(folder / part) for part in sorted(set(map(str, parts.values())))]
            return {name: tensor for tensors in found for name, tensor in tensors.items()}
        if (folder / name).is_file():
            return _read_file(folder / name)
    raise FileNotFoundError(f"{folder / FILES[0]} is missing, and {FILES[1]} too")


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    check_file(file)
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except Exception as error:  # safetensors has an error class of its own
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
    value = load(file, mmap=True)
    if not isinstance(value, dict) or not all(torch.is_tensor(x) for x in value.values()):
        raise ValueError(f"{file} does not hold tensors by name")
    return value


def split(
    source: str | Path,
    output: str | Path,
    tp: int,
    xser: bool = False,
    pad: bool = False,
    config: str | Path | None = None,
    **options,
) -> None:
    """Splits the weights of a Hugging Face folder into a checkpoint, which `load_checkpoint` and
    the tools open.

    Args:
        source: the folder, such as `from_pretrained` opens; or one of torch.distributed.checkpoint
            whose tensors have Hugging Face's names.
        output: the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size.
        xser: tensor by tensor.
        pad: pad a vocabulary that `tp` does not divide.
        config: the folder with `config.json`; by default the source.
        options: arguments of the parallel model's class, such as `shard_vocabulary=True`.

    Raises:
        ValueError: a degree that does not fit, an unknown architecture or option, missing tensors.
    """
    ensure_positive(tp=tp)
    config = read_config(source if config is None else config)
    output = check_output(output, source)
    model = model_of(config.to_dict())
    layouts, ties = describe_model(config, options, tp, pad)
    try:
        tensors = published_tensors(model, config, read_folder(source))
        for name, layout in layouts.items():
            whole = fused(model, name, layout.partition, layout.shape, tensors)
            layouts[name] = replace(layout, dtype=whole.dtype)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    first = {name: group[0] for group in ties for name in group}

    def shard(name: str, rank: int) -> torch.Tensor:
        partition = layouts[name].partition
        whole = fused(model, name, partition, layouts[name].shape, tensors)
        return whole if partition is None else partition.shard(whole, rank)

    def files() -> Iterator[tuple]:
        for rank in range(tp):
            once = {name: shard(name, rank) for name in layouts if first.get(name, name) == name}
            weights = {name: once[first.get(name, name)] for name in layouts}
            yield f"model/{shard_name(0, rank)}", weights, xser

    metadata = weights_metadata(config, tp, ties) | {"model": to_json(layouts)}
    write_checkpoint(output, None, metadata, lambda aside: write_files(aside, files()))
