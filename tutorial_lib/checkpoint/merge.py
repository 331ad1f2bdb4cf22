"""`merge`: the shards of a checkpoint into one safetensors file, or a folder that Hugging Face's
`from_pretrained` opens.
"""

import json
import mmap
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..storage import replaced_by, write_text
from ..storage.disk import reserve
from . import tags
from .architectures import describe_model, model_of, read_config
from .shards import Shards, check_knows_layouts
from .tools import check_output, progress

NAMES = ("auto", "huggingface", "own")


def open_checkpoint(path: str | Path, config: str | Path | None, options: dict) -> Shards:
    """The checkpoint at `path`, or the latest one in the folder `path`, with its layouts.

    Args:
        config: the folder of the Hugging Face model, for a checkpoint that does not say how its
            tensors are sharded, such as one of the vendor's library.
        options: arguments of the parallel model's class then.
    """
    shards = Shards(tags.locate(path))
    if shards.layouts is None and config is not None:
        theirs = read_config(config)
        shards.layouts, ties = describe_model(theirs, options, shards.tp, pad=True)
        found = shards.shard("model", 0)  # whose dtypes may be others
        shards.layouts = {
            name: layout.of(found[name].dtype) if torch.is_tensor(found.get(name)) else layout
            for name, layout in shards.layouts.items()
        }
        shards.metadata = {
            "architecture": model_of(theirs.to_dict()).__name__,
            "config": json.loads(theirs.to_json_string(use_diff=False)),
            "mesh": {"world": shards.tp, "tp": shards.tp, "dp": 1, "pp": shards.pp, "cp": 1},
            "tied": ties,
            "optimizer": None,
        }
    return check_knows_layouts(shards)


def merge(
    source: str | Path,
    output: str | Path,
    names: str = "auto",
    config: str | Path | None = None,
    **options,
) -> Path:
    """Merges the weights of a checkpoint.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: a file that ends in `.safetensors`, or a folder to be.
        names: `huggingface`, `own`, or `auto`: Hugging Face's for a folder.
        config, options: see `open_checkpoint`.

    Returns:
        The safetensors file.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: see `tools`; an architecture that is not
            known, a broken file.
    """
    if names not in NAMES:
        raise ValueError(f"names {names!r} is not one of {', '.join(NAMES)}")
    shards = open_checkpoint(source, config, options)
    output = check_output(output, source, shards.path)
    is_file, settings = output.suffix == ".safetensors", shards.metadata["config"]
    theirs = names == "huggingface" or (names == "auto" and not is_file)
    names_of = model_of(settings).published_names if theirs else lambda name: (name,)
    twice = {name for group in shards.metadata["tied"] for name in group[1:]}
    once = {name: names_of(name) for name in shards.layouts if name not in twice}
    target = output if is_file else output / "model.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _merge(shards, once, target)
        if not is_file:
            classes = settings.get("architectures") or [shards.metadata["architecture"]]
            text = json.dumps(settings | {"architectures": classes}, indent=2, sort_keys=True)
            write_text(output / "config.json", text + "\n")
    except BaseException:
        if not is_file:
            target.unlink(missing_ok=True)
        raise
    return target


def _merge(shards: Shards, names: dict[str, tuple[str, ...]], target: Path) -> None:
    """Lays the file out with tensors that are never touched, so that they take no memory, and fills
    in one tensor at a time.
    """
    empty = {}
    for name, theirs in names.items():
        layout = shards.layouts[name]
        shards.weight(name)  # raises if they do not have these shapes
        shape, dim = list(layout.shape), layout.partition.dim if layout.partition else 0
        sizes = layout.partition.sizes if len(theirs) > 1 else (shape[dim] if shape else 1,)
        for their, size in zip(theirs, sizes, strict=True):
            if shape:
                shape[dim] = size
            empty[their] = torch.empty(shape, dtype=layout.dtype, device="cpu")
    with replaced_by(target) as aside:
        reserve(aside, sum(tensor.nbytes for tensor in empty.values()))
        try:
            save_file(empty, aside, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{target}: {error}") from error
        reserve(aside, aside.stat().st_size)
        with open(aside, "r+b") as file, mmap.mmap(file.fileno(), 0) as room:
            length = int.from_bytes(room[:8], "little")
            header = json.loads(room[8 : 8 + length])
            for name, theirs in progress(names.items(), "merge"):
                whole, layout = shards.whole(name), shards.layouts[name]
                several = len(theirs) > 1
                pieces = (
                    whole.split(layout.partition.sizes, layout.partition.dim)
                    if several
                    else [whole]
                )
                for their, piece in zip(theirs, pieces, strict=True):
                    start, end = (8 + length + at for at in header[their]["data_offsets"])
                    if piece.numel():
                        place = torch.frombuffer(
                            room, dtype=piece.dtype, count=piece.numel(), offset=start
                        )
                        place.copy_(piece.reshape(-1))
                        del place
