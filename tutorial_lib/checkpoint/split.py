"""`split`: the weights of a Hugging Face folder, of one file or several, into the shards of a
checkpoint.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from ..parallel_layers.utils import ensure_positive
from .architectures import architecture_of, completed, describe_model, layout_at, pieces
from .layout import METADATA, Layout, to_json, write_metadata
from .ranks import shard_name
from .stream import close_all, form, sink
from .tensors import Digests
from .tools import check_output, progress, write_checkpoint


class HuggingFaceFolder:
    """The tensors of a folder that `save_pretrained` wrote, by today's name, one at a time.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: weights that are a pickle; a broken file; an unknown architecture.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        config = self.path / "config.json"
        self.config = _read_json(config)
        try:
            self.architecture = architecture_of(self.config)
            self.config = completed(self.config)
        except Exception as error:  # a validation of values has error classes of its own
            raise ValueError(f"{config}: {str(error) or type(error).__name__}") from error
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map, which says where each tensor is")
            files = set(map(str, weight_map.values()))
        elif single.is_file():
            files = {single.name}
        else:
            other = ", ".join(p.name for p in self.path.glob("*.bin"))
            raise FileNotFoundError(
                f"{single} is missing"
                + (f" ({other} is a pickle, which is not opened)" if other else "")
            )
        self._place: dict[str, tuple[Path, str]] = {}  # by name: the file, and the name there
        for name in sorted(files):
            try:
                with safe_open(self.path / name, "pt") as file:
                    for key in file.keys():
                        self._place[self.architecture.current_name(key)] = self.path / name, key
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{self.path / name} is missing") from error
            except (
                Exception
            ) as error:  # safetensors has an error class of its own, not a built-in one
                raise ValueError(
                    f"{self.path / name} is truncated or no safetensors file: {error}"
                ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def names(self) -> set[str]:
        """Of all tensors but those that Hugging Face's class takes no notice of."""
        return {name for name in self._place if not self.architecture.ignores(name)}

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._place:
            raise ValueError(f"{self.path} holds no tensor {name}: it is of another model")
        path, key = self._place[name]
        with safe_open(path, "pt") as file:
            return file.get_tensor(key)


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
        source: the folder.
        output: the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size.
        xser: tensor by tensor.
        pad: pad a vocabulary that `tp` does not divide.
        options: arguments of the parallel model's class, such as `shard_vocabulary=True`.

    Raises:
        ValueError: a degree that does not fit, an unknown architecture or option, missing or
            surplus tensors.
    """
    ensure_positive(tp=tp)
    folder = HuggingFaceFolder(source)
    output = check_output(output, source)
    architecture = folder.architecture
    own, ties = describe_model(folder.config, options)
    tied = {name: group for group in ties for name in group}
    origin = {}
    for name in own:  # under which name the folder has it
        group = tied.get(name, [name])
        origin[name] = next(
            (n for n in group if all(t in folder for t in architecture.names(n))), group[0]
        )
    used = {theirs for name in origin.values() for theirs in architecture.names(name)}
    used |= {theirs for group in ties for name in group for theirs in architecture.names(name)}
    if surplus := sorted(folder.names() - used):
        raise ValueError(
            f"{folder.path} is of another model: it has {', '.join(surplus[:3])} in excess"
        )
    layouts = {
        name: layout_at(name, layout, tp, folder.config, pad) for name, layout in own.items()
    }

    def write(aside: Path) -> Digests:
        dtypes = {
            name: folder.tensor(architecture.names(origin[name])[0]).dtype for name in layouts
        }
        final = {name: replace(layout, dtype=dtypes[name]) for name, layout in layouts.items()}
        forms, sinks = [], []
        for rank in range(tp):
            mine = {
                name: form(layout.local_shape(), layout.dtype)
                for name, layout in final.items()
                if name == _first(tied, name)
            }
            mine |= {name: mine[_first(tied, name)] for name in final}
            forms.append(mine)
            sinks.append(
                sink(
                    {name: mine[name] for name in final},
                    aside / "model" / shard_name(0, rank),
                    xser,
                )
            )
        for name in progress([n for n in final if n == _first(tied, n)], "split"):
            full = _full(folder, architecture.names(origin[name]), final[name])
            for mine, each in zip(forms, sinks):
                each.put(mine[name], final[name].cut(full, sinks.index(each)))
        mesh = {"world": tp, "tp": tp, "dp": 1, "pp": 1, "cp": 1}
        metadata = {
            "mesh": mesh,
            "architecture": architecture.model.partition(":")[2],
            "config": folder.config,
            "model": to_json(final),
            "tied": ties,
            "optimizer": None,
        }
        written = {aside / METADATA: write_metadata(aside, metadata)}
        return written | close_all(sinks)

    write_checkpoint(output, None, {"world": tp, "tp": tp, "dp": 1, "pp": 1, "cp": 1}, write)


def _first(tied: dict[str, list[str]], name: str) -> str:
    return tied.get(name, [name])[0]


def _full(folder: HuggingFaceFolder, names: tuple[str, ...], layout: Layout) -> torch.Tensor:
    if len(names) == 1:
        return _checked(folder, names[0], layout.shape, layout.dtype)
    full = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    for name, start, length in pieces(layout, names):
        part = full.narrow(layout.partition.dim, start, length)
        part.copy_(_checked(folder, name, tuple(part.shape), layout.dtype))
    return full


def _checked(folder: HuggingFaceFolder, name: str, shape: tuple, dtype: torch.dtype):
    tensor = folder.tensor(name)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{folder.path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, {dtype} of "
            f"shape {shape} was expected"
        )
    return tensor


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
