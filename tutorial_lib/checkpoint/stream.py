"""Files that are filled tensor by tensor, so that memory holds one of them whatever the file's
size.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.serialization import skip_data

from .files import TensorReference, WatchedFile, digest_of, reported, write_object
from .lazy import LazyFile
from .tensors import Digests, info_file, map_tensors, tensor_file, tensors_folder

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def form(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data: what a file is laid out by."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


FLUSHED = 1 << 28  # bytes: after so many the disk begins, while the rest is still being written
_flusher = ThreadPoolExecutor(1)


class _File:
    """A file that is there and is filled in any order, flushed on the side. Errors name it."""

    def __init__(self, path: Path):
        self._path, self._file = path, open(path, "r+b", buffering=0)
        self._written, self._flush = 0, Future()
        self._flush.set_result(None)

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Writes the bytes of a tensor from `offset` on. The file may take a part at a time."""
        rest = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        self._written += len(rest)
        with reported(self._path):
            self._file.seek(offset)
            while len(rest):
                rest = rest[self._file.write(rest) :]
        if self._written >= FLUSHED and self._flush.done():
            self._flush.result()  # raises what the disk had to say
            self._written, self._flush = 0, _flusher.submit(self._sync)

    def _sync(self) -> None:
        with reported(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes it, once it is on the disk."""
        with self._file:
            self._flush.result()
            self._sync()

    def abandon(self) -> None:
        """Closes it as it is."""
        with self._file:
            self._flush.exception()  # waits; what went wrong before counts


def _row_bytes(expected: torch.Tensor) -> int:
    return expected.shape[1:].numel() * expected.element_size()


def _check(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert tensor.shape == expected.shape and tensor.dtype == expected.dtype, (
        tensor.shape,
        tensor.dtype,
        expected,
    )


def _lay_out(value, forms: list[torch.Tensor], path: Path) -> None:
    """Writes a file that has room for each tensor: torch's own way to fill a file later (its note
    "Serialization semantics"). The tensors are made and never touched, so they take no memory.
    """
    empty = {id(each): torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in forms}
    with reported(path), open(path, "wb") as raw, skip_data():
        file = WatchedFile(raw)
        with reported(path, file):
            torch.save(map_tensors(value, lambda each: empty[id(each)]), file)
            file.flush()


class PlainSink:
    """A file as `tensors.save_plain` writes it, laid out for `value` and filled by `put`.

    Args:
        value: the object, with a `form` for each tensor; one that occurs twice is stored once.
    """

    def __init__(self, value, path: Path):
        self._path, self._aside = path, path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        forms: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        map_tensors(value, forms.append)
        _lay_out(value, forms, self._aside)
        laid_out = LazyFile(self._aside)
        map_tensors(laid_out.value, places.append)
        self._offsets = {
            id(tensor): laid_out.place(place) for tensor, place in zip(forms, places, strict=True)
        }
        self._forms = forms  # so that their ids stay theirs
        self._file = _File(self._aside)

    def put(self, expected: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fills in the tensor of that form."""
        _check(tensor, expected)
        self.put_rows(expected, 0, tensor)

    def put_rows(self, expected: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Fills in rows from `first` on of the tensor of that form."""
        if rows.numel():
            self._file.write(self._offsets[id(expected)] + first * _row_bytes(expected), rows)

    def close(self) -> Digests:
        """The file takes its name; returns its digest."""
        self._file.close()
        os.replace(self._aside, self._path)
        return {self._path: digest_of(self._path)}


class XserSink:
    """Files as `tensors.save_xser` writes them, filled by `put`, one tensor after another."""

    def __init__(self, value, path: Path):
        self._path, self._tids, self._info = path, {}, {}
        tensors_folder(path).mkdir(parents=True, exist_ok=True)
        self._written: Digests = {}
        self._value = value  # so that the ids of its forms stay theirs
        self._skeleton = map_tensors(value, self._refer)
        self._open: tuple[torch.Tensor, PlainSink] | None = None

    def _refer(self, tensor: torch.Tensor) -> TensorReference:
        tid = self._tids.setdefault(id(tensor), len(self._tids))
        self._info[tid] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "expert_model_parallel": False,
        }
        return TensorReference(tid)

    def put(self, expected: torch.Tensor, tensor: torch.Tensor) -> None:
        """Writes the tensor of that form."""
        _check(tensor, expected)
        self.put_rows(expected, 0, tensor)

    def put_rows(self, expected: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Writes rows from `first` on of the tensor of that form."""
        if self._open is None or self._open[0] is not expected:
            self._close_tensor()
            file = tensor_file(self._path, self._tids[id(expected)])
            self._open = expected, PlainSink(expected, file)
        self._open[1].put_rows(expected, first, rows)

    def _close_tensor(self) -> None:
        if self._open is not None:
            self._written |= self._open[1].close()
        self._open = None

    def close(self) -> Digests:
        """Writes the object around the tensors; returns the digests of all files."""
        self._close_tensor()
        self._written[info_file(self._path)] = write_object(self._info, info_file(self._path))
        self._written[self._path] = write_object(self._skeleton, self._path, references=True)
        return self._written


class SafetensorsSink:
    """One safetensors file: the length of a JSON header, the header, then the tensors' bytes in its
    order.
    """

    def __init__(self, forms: dict[str, torch.Tensor], path: Path):
        self._path, self._aside = path, path.with_name(path.name + ".part")
        header, end = {"__metadata__": {"format": "pt"}}, 0
        self._offsets = {}
        for name, expected in forms.items():
            start, end = end, end + expected.numel() * expected.element_size()
            if expected.dtype not in SAFETENSORS_NAMES:
                raise ValueError(f"{name} is {expected.dtype}, which no safetensors file can hold")
            header[name] = {
                "dtype": SAFETENSORS_NAMES[expected.dtype],
                "shape": list(expected.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._offsets = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in forms}
        self._forms = forms
        try:
            with reported(self._aside):
                self._aside.write_bytes(len(text).to_bytes(8, "little") + text)
                os.truncate(self._aside, 8 + len(text) + end)
            self._file = _File(self._aside)
        except BaseException:
            self._aside.unlink(missing_ok=True)
            raise

    def put_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Fills in rows from `first` on of one tensor."""
        self._file.write(self._offsets[name] + first * _row_bytes(self._forms[name]), rows)

    def __enter__(self) -> "SafetensorsSink":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """The file takes its name; after an error it is gone."""
        try:
            if kind is None:
                self._file.close()
                os.replace(self._aside, self._path)
            else:
                self._file.abandon()
        finally:
            self._aside.unlink(missing_ok=True)


def sink(value, path: Path, xser: bool) -> PlainSink | XserSink:
    return (XserSink if xser else PlainSink)(value, path)


def close_all(sinks: Iterable[PlainSink | XserSink]) -> Digests:
    """Closes each, two at a time, as flushing waits for the disk and hashing does not."""
    written: Digests = {}
    with ThreadPoolExecutor(2) as threads:
        for digests in threads.map(lambda each: each.close(), sinks):
            written |= digests
    return written
