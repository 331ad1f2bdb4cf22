"""Objects made of tensors and plain data: brought to the host, written as one file or tensor by
tensor, read back.

`xser` is torch-xla's way: `<path>` holds the object with a reference in place of each tensor,
`<path>.tensors/` the tensors, so that never more than one of them is on the host.
"""

import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from .files import NUMPY_KINDS, Digest, TensorReference, read_object, write_object

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)
Digests = dict[Path, Digest]


def map_tensors(value, function: Callable, kind: type = torch.Tensor, where: str = ""):
    """`value` with `function(tensor)` in place of each tensor (or other `kind`) in its dicts,
    lists, tuples and sets.

    Raises:
        ValueError: something that is neither a tensor nor plain data, with its place in the object.
    """
    if isinstance(value, kind):
        return function(value)
    if type(value) in PLAIN or type(value) is np.ndarray or isinstance(value, np.generic):
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char not in NUMPY_KINDS:
            raise ValueError(
                f"{where or 'the object'} is of numpy's dtype {value.dtype}; a checkpoint holds "
                "numbers and text only"
            )
        return value
    if type(value) in (dict, OrderedDict, Counter):
        for key in value:
            if not _is_plain(key):
                raise ValueError(
                    f"{where or 'the object'} has the key {key!r} of type "
                    f"{type(key).__qualname__}; keys have to be plain data"
                )
        result = type(value)()
        for key, item in value.items():
            result[key] = map_tensors(item, function, kind, f"{where}[{key!r}]")
        if hasattr(
            value, "_metadata"
        ):  # the versions that Module.state_dict leaves for Module.load_state_dict
            result._metadata = value._metadata
        return result
    if type(value) in (list, tuple, set):
        return type(value)(
            map_tensors(item, function, kind, f"{where}[{i}]") for i, item in enumerate(value)
        )
    raise ValueError(
        f"{where or 'the object'} is of type {type(value).__module__}.{type(value).__qualname__}; "
        "a checkpoint holds tensors and plain data only"
    )


def _is_plain(key) -> bool:
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in PLAIN


def check(value, where: str) -> None:
    """Raises ValueError, with the place, unless `value` is made of tensors that have data, one
    element beside the other, and of plain data.
    """

    def has_data(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
            kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{where} holds a tensor ({kind}) that is no array of numbers")
        return tensor

    map_tensors(value, has_data, where=where)


class _Host:
    """Brings tensors to the host, the same one once: ties stay ties."""

    def __init__(self, copy: bool):
        self._copy, self._seen = copy, {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
            key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._seen:
            source = tensor.detach()
            host = source.cpu().contiguous()
            drags = host.untyped_storage().nbytes() != host.numel() * host.element_size()
            if drags or (self._copy and host.data_ptr() == source.data_ptr()):
                host = host.clone()
            self._seen[key] = host, tensor  # the tensor, so that its id stays its own
        return self._seen[key][0]


def to_host(value, copy: bool = False, where: str = ""):
    """`value` with every tensor on the host, contiguous, and with no more storage behind it than
    its own elements.

    Args:
        copy: copy host tensors too, so that training may go on while the result is written.
    """
    return map_tensors(value, _Host(copy), where=where)


def tensors_folder(path: str | Path) -> Path:
    return Path(f"{path}.tensors")


def info_file(path: str | Path) -> Path:
    return Path(f"{path}.info.pt")


def tensor_file(path: str | Path, tid: int) -> Path:
    return tensors_folder(path) / f"tensor_{tid}.pt"


def save_plain(value, path: str | Path) -> Digests:
    """Writes `value` into one file."""
    return {Path(path): write_object(to_host(value), path)}


def save_xser(value, path: str | Path, place: int = 0, places: int = 1) -> Digests:
    """Writes `value` tensor by tensor.

    Args:
        place, places: this rank's place among ranks that hold the same value. They share the
            tensors by size; the first writes the rest.
    """
    unique: list[torch.Tensor] = []
    references: dict[object, TensorReference] = {}

    def refer(tensor):
        key = (
            id(tensor)
            if tensor.device.type != "cpu" or not tensor.numel()
            else (tensor.data_ptr(), tensor.dtype, tensor.shape)
        )
        if key not in references:
            references[key] = TensorReference(len(unique))
            unique.append(tensor)
        return references[key]

    skeleton = map_tensors(value, refer)
    tensors_folder(path).mkdir(parents=True, exist_ok=True)
    written = {}
    for tid in _share(unique, place, places):
        target = tensor_file(path, tid)
        written[target] = write_object(to_host(unique[tid]), target)
    if place == 0:
        info = {
            tid: {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
            for tid, tensor in enumerate(unique)
        }
        written[info_file(path)] = write_object(info, info_file(path))
        written[Path(path)] = write_object(skeleton, path, references=True)
    return written


def _share(tensors: list[torch.Tensor], place: int, places: int) -> list[int]:
    """The numbers of the tensors that fall to `place`: each, the largest first, goes to the place
    with the least so far.
    """
    load, mine = [0] * places, []
    for tid in sorted(
        range(len(tensors)), key=lambda i: -tensors[i].numel() * tensors[i].element_size()
    ):
        least = load.index(min(load))
        load[least] += tensors[tid].numel() * tensors[tid].element_size()
        if least == place:
            mine.append(tid)
    return sorted(mine)


def is_xser(path: str | Path) -> bool:
    return tensors_folder(path).is_dir()


def load(path: str | Path, mmap: bool = False):
    """What `save_plain` or `save_xser` (or torch-xla) wrote to `path`, on the host."""
    value = read_object(path, mmap=mmap and not is_xser(path))
    loaded: dict[int, torch.Tensor] = {}

    def resolve(reference):
        if reference.tid not in loaded:
            loaded[reference.tid] = read_object(tensor_file(path, reference.tid), mmap=mmap)
        return loaded[reference.tid]

    return map_tensors(
        value,
        lambda item: resolve(item) if isinstance(item, TensorReference) else item,
        kind=(TensorReference, torch.Tensor),
        where=str(path),
    )


def files_of(path: str | Path) -> list[Path]:
    """The files that hold what was saved to `path`."""
    files = [Path(path)]
    if is_xser(path):
        files += [info_file(path)] if info_file(path).is_file() else []
        files += sorted(tensors_folder(path).glob("tensor_*.pt"))
    return files


def remove(path: str | Path) -> None:
    """Removes what was saved to `path`, if anything."""
    Path(path).unlink(missing_ok=True)
    info_file(path).unlink(missing_ok=True)
    shutil.rmtree(tensors_folder(path), ignore_errors=True)
