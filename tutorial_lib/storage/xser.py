"""An object in one file, or one file for each of its tensors; and files that are filled later.

`xser` is torch-xla's way: `<path>` holds the object with a reference in place of each tensor,
`<path>.tensors/` the tensors, so that never more than one of them is on the host.
"""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.serialization import set_default_mmap_options, skip_data

from .disk import (
    PARTIAL,
    Digest,
    WatchedFile,
    digest_of,
    flush,
    reported,
    reserve,
)
from .objects import TensorReference, identity, map_tensors, read_object, to_host, write_object

Digests = dict[Path, Digest]


def tensors_folder(path: str | Path) -> Path:
    return Path(f"{path}.tensors")


def info_file(path: str | Path) -> Path:
    return Path(f"{path}.info.pt")


def tensor_file(path: str | Path, tid: int) -> Path:
    return tensors_folder(path) / f"tensor_{tid}.pt"


def is_xser(path: str | Path) -> bool:
    return tensors_folder(path).is_dir()


def save(value, path: str | Path, xser: bool = False, place: int = 0, places: int = 1) -> Digests:
    """Writes `value` into one file, or tensor by tensor.

    Args:
        place, places: this rank's place among ranks that hold the same value. They share the
            tensors of xser by size; the first writes the rest.
    """
    if not xser:
        return {Path(path): write_object(to_host(value), path)}
    unique: list[torch.Tensor] = []
    references: dict[object, TensorReference] = {}

    def refer(tensor: torch.Tensor) -> TensorReference:
        if identity(tensor) not in references:
            references[identity(tensor)] = TensorReference(len(unique))
            unique.append(tensor)
        return references[identity(tensor)]

    skeleton = map_tensors(value, refer)
    tensors_folder(path).mkdir(parents=True, exist_ok=True)
    written = {}
    for tid in _share(unique, place, places):
        target = tensor_file(path, tid)
        written[target] = write_object(to_host(unique[tid]), target)
    return written | (_save_skeleton(skeleton, unique, path) if place == 0 else {})


def _save_skeleton(skeleton, unique: list[torch.Tensor], path: str | Path) -> Digests:
    info = {
        tid: {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
        for tid, tensor in enumerate(unique)
    }
    return {
        info_file(path): write_object(info, info_file(path)),
        Path(path): write_object(skeleton, path, references=True),
    }


def _share(tensors: list[torch.Tensor], place: int, places: int) -> list[int]:
    """The numbers of the tensors that fall to `place`: each, the largest first, goes to the place
    with the least so far.
    """
    load, mine = [0] * places, []
    for tid in sorted(range(len(tensors)), key=lambda tid: -tensors[tid].nbytes):
        least = load.index(min(load))
        load[least] += tensors[tid].nbytes
        if least == place:
            mine.append(tid)
    return sorted(mine)


def load(path: str | Path, mmap: bool = False):
    """What `save` (or torch, or torch-xla) wrote to `path`, on the host.

    Raises:
        FileNotFoundError, ValueError: as `read_object`.
    """
    value = read_object(path, mmap=mmap and not is_xser(path))
    loaded: dict[int, torch.Tensor] = {}

    def resolve(item):
        if not isinstance(item, TensorReference):
            return item
        if item.tid not in loaded:
            loaded[item.tid] = tensor = read_object(tensor_file(path, item.tid), mmap=mmap)
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{tensor_file(path, item.tid)} does not hold a tensor")
        return loaded[item.tid]

    return map_tensors(value, resolve, (TensorReference, torch.Tensor), str(path))


def files_of(path: str | Path) -> list[Path]:
    """The files that hold what was saved to `path`."""
    files = [Path(path)]
    if is_xser(path):
        files += [info_file(path)] if info_file(path).is_file() else []
        files += sorted(tensors_folder(path).glob("tensor_*.pt"))
    return files


def blank(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data, in whose place `Filled` puts one that has."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class Filled:
    """A file as `save` writes it, with room for each tensor of an object, that is filled in any
    order. Memory holds none of it: the tensors are maps of the file.

    Args:
        value: the object, with a blank for each tensor that comes later; one that occurs twice is
            stored once.
        xser: one file for each tensor, written when it is put in.
    """

    def __init__(self, value, path: Path, xser: bool = False):
        self._path, self._xser, self._written = path, xser, {}
        self._blanks: dict[int, torch.Tensor] = {}
        map_tensors(value, lambda each: self._blanks.setdefault(id(each), each))
        self._number = {each: tid for tid, each in enumerate(self._blanks)}
        path.parent.mkdir(parents=True, exist_ok=True)
        if xser:
            tensors_folder(path).mkdir(exist_ok=True)
            self._skeleton = map_tensors(
                value, lambda each: TensorReference(self._number[id(each)])
            )
        else:
            self._places = self._lay_out(value)
        for tensor in self._blanks.values():
            if not tensor.is_meta:
                self.put(tensor, tensor)

    def _lay_out(self, value) -> dict[int, torch.Tensor]:
        """Writes the file with room for the tensors; where each of them is in its memory map."""
        path, aside = self._path, self._aside()
        empty = {
            each: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # takes no memory
            for each, tensor in self._blanks.items()
        }
        with reported(path), open(aside, "wb") as raw, skip_data():
            file = WatchedFile(raw)
            with reported(path, file):
                torch.save(map_tensors(value, lambda each: empty[id(each)]), file)
        with reported(path):
            reserve(aside, aside.stat().st_size)
        places: list[torch.Tensor] = []
        with set_default_mmap_options(mmap.MAP_SHARED):
            map_tensors(torch.load(aside, mmap=True, weights_only=True), places.append)
        forms: list[torch.Tensor] = []
        map_tensors(value, forms.append)
        return {id(form): place for form, place in zip(forms, places, strict=True)}

    def _aside(self) -> Path:
        return self._path.with_name(self._path.name + PARTIAL)

    def put(self, form: torch.Tensor, tensor: torch.Tensor) -> None:
        """Writes the tensor of that blank."""
        assert form.shape == tensor.shape and form.dtype == tensor.dtype, (form, tensor.shape)
        if not self._xser:
            self._places[id(form)].copy_(tensor)
            return
        file = tensor_file(self._path, self._number[id(form)])
        self._written[file] = write_object(to_host(tensor), file)

    def close(self) -> Digests:
        """The file takes its name; returns the digests."""
        if self._xser:
            return self._written | _save_skeleton(
                self._skeleton, list(self._blanks.values()), self._path
            )
        self._places.clear()
        with reported(self._path):
            flush(self._aside())
        digest = digest_of(self._aside())
        os.replace(self._aside(), self._path)
        return {self._path: digest}
