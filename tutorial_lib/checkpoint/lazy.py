"""Tensors of a checkpoint file one by one, by their place in it, so that memory holds no more than
the one in use.
"""

import struct
import zipfile
from pathlib import Path

import torch

from .files import TensorReference, read_object
from .tensors import is_xser, map_tensors, tensor_file


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _base(path: Path, addresses: list[int]) -> int:
    """Where in memory the file is mapped that storages at these addresses lie in.

    The file is a zip archive that holds each storage as it is, as a member `…/data/<n>`.

    Raises:
        ValueError: members and storages do not match.
    """
    starts = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            if member.filename.split("/")[-2:-1] == ["data"] and member.file_size:
                file.seek(member.header_offset + 26)
                name, extra = struct.unpack("<HH", file.read(4))
                starts.append(member.header_offset + 30 + name + extra)
    bases = {address - start for address, start in zip(addresses, sorted(starts))}
    if len(bases) != 1 or len(starts) != len(addresses):
        raise ValueError(f"{path} is broken: its tensors do not lie where its directory says")
    return bases.pop()


class LazyFile:
    """A file of `save_plain` or `save_xser` (or of torch): its object at once, its tensors later.

    Attributes:
        path: the file.
        value: the object, its tensors on the meta device: with shape and dtype, without data.
        index: the tensors of the object by key if it is a dict.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stored: dict[int, tuple[torch.Tensor, Path, int]] = {}
        if is_xser(path):
            seen: dict[int, torch.Tensor] = {}
            kinds = (TensorReference, torch.Tensor)
            self.value = map_tensors(read_object(path), lambda r: self._follow(r, seen), kind=kinds)
        else:
            self.value = self._describe(path)
        tensors = self.value.items() if isinstance(self.value, dict) else ()
        self.index = {key: value for key, value in tensors if isinstance(value, torch.Tensor)}

    def _follow(self, item, seen: dict[int, torch.Tensor]):
        if not isinstance(item, TensorReference):
            return item
        if item.tid not in seen:
            seen[item.tid] = self._describe(tensor_file(self.path, item.tid))
        return seen[item.tid]

    def _describe(self, path: Path):
        """The object of one file, each tensor replaced by one without data; ties stay ties."""
        mapped = read_object(path, mmap=True)  # nothing of it is read but the object's skeleton
        storages: set[int] = set()
        where = str(path)
        map_tensors(mapped, lambda t: storages.add(_address(t)) if t.numel() else None, where=where)
        base = _base(path, sorted(storages)) if storages else 0
        seen: dict[tuple, torch.Tensor] = {}

        def describe(tensor: torch.Tensor) -> torch.Tensor:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in seen or not tensor.numel():
                shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
                described = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                self._stored[id(described)] = described, path, tensor.data_ptr() - base
                seen[key] = described
            return seen[key]

        return map_tensors(mapped, describe)

    def __getitem__(self, key: str) -> torch.Tensor:
        """Reads one tensor of a dict."""
        return self.read(self.index[key])

    def read(self, described: torch.Tensor) -> torch.Tensor:
        """Reads the tensor that an entry of `value` describes, contiguous.

        Raises:
            ValueError: the file ends before it does.
        """
        strides = described.stride()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(described.shape, strides))
        result = torch.empty(
            extent if described.numel() else 0, dtype=described.dtype, device="cpu"
        )
        self._fill(described, 0, result)
        return result.as_strided(described.shape, strides).contiguous()

    def read_rows(self, described: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """Reads rows from `first` on, as many as `out` has, into it. Both have to be contiguous."""
        self._fill(described, first * described[0].numel(), out)

    def _fill(self, described: torch.Tensor, first: int, out: torch.Tensor) -> None:
        if not out.numel():
            return
        _, path, start = self._stored[id(described)]
        target = memoryview(out.reshape(-1).view(torch.uint8).numpy())
        with open(path, "rb", buffering=0) as file:
            file.seek(start + first * described.element_size())
            while len(target):
                if not (count := file.readinto(target)):
                    raise ValueError(f"{path} is truncated")
                target = target[count:]

    def place(self, described: torch.Tensor) -> int:
        """The byte of the file that the tensor begins at."""
        return self._stored[id(described)][2]
