"""Tensors of a checkpoint file one by one, by their place in it, so that memory holds no more than
the one in use.
"""

from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .files import TensorReference, read_object
from .tensors import is_xser, map_tensors, tensor_file


class LazyFile:
    """A file of `save_plain` or `save_xser` (or of torch): its object at once, its tensors on
    demand.

    Attributes:
        path: the file.
        value: the object, with tensors that have shape and dtype and no data.
        index: the tensors of the object by key if it is a dict, without data.
    """

    def __init__(self, path: Path):
        self.path = path
        self._seen: dict[object, torch.Tensor] = {}
        if is_xser(path):
            self.value = map_tensors(
                read_object(path), self._describe, kind=(TensorReference, torch.Tensor)
            )
        else:
            with FakeTensorMode():
                value = read_object(path)
            self.value = map_tensors(value, self._once)
        self.index = (
            {k: v for k, v in self.value.items() if isinstance(v, torch.Tensor)}
            if isinstance(self.value, dict)
            else {}
        )

    def _once(self, described: torch.Tensor) -> torch.Tensor:
        """The same object for what is stored once: ties stay ties."""
        offset = described.untyped_storage()._checkpoint_offset if described.numel() else None
        key = (
            offset,
            described.dtype,
            described.shape,
            described.stride(),
            described.storage_offset(),
        )
        return self._seen.setdefault(key, described)

    def _describe(self, item):
        if not isinstance(item, TensorReference):
            return item
        if item.tid not in self._seen:
            with FakeTensorMode():
                self._seen[item.tid] = read_object(tensor_file(self.path, item.tid))
            self._seen[item.tid]._file = tensor_file(self.path, item.tid)
        return self._seen[item.tid]

    def __getitem__(self, key: str) -> torch.Tensor:
        """Reads one tensor of a dict."""
        return self.read(self.index[key])

    def read(self, described: torch.Tensor) -> torch.Tensor:
        """Reads the tensor that an entry of `value` describes, contiguous.

        Raises:
            ValueError: the file ends before it does.
        """
        if not described.numel():
            return torch.empty(described.shape, dtype=described.dtype)
        strides = described.stride()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(described.shape, strides))
        result = torch.empty(extent, dtype=described.dtype)
        path = getattr(described, "_file", self.path)
        with open(path, "rb", buffering=0) as file:
            start = described.storage_offset() * described.element_size()
            file.seek(described.untyped_storage()._checkpoint_offset + start)
            target = memoryview(result.view(torch.uint8).numpy())
            while len(target):
                if not (count := file.readinto(target)):
                    raise ValueError(f"{path} is truncated")
                target = target[count:]
        return result.as_strided(described.shape, strides).contiguous()
