"""Files that are whole or absent: hashed while they are written, flushed, renamed into place, and
read as data only.

No file is trusted: `read_object` loads tensors and plain data, and names a file that is missing,
broken or holds code.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import xxhash

NUMPY_KINDS = "?bhilqBHILQefdFDSU"  # the dtypes of arrays that may stand in a file
CHUNK = 1 << 20  # bytes read at a time: they stay in the processor's cache


class Digest(NamedTuple):
    """What a file is known by: its length and the XXH3 hash of its bytes (against damage, not
    against forgery).
    """

    size: int
    xxh3_128: str


class TensorReference:
    """Stands in an object for a tensor that lies in a file of its own,
    `<path>.tensors/tensor_<tid>.pt`.
    """

    def __init__(self, tid: int):
        self.tid = tid


# The name under which torch-xla pickles the same class, so that files pass between the two without
# torch-xla installed.
XLA_REFERENCE = "torch_xla.utils.serialization.TensorReference"


class _ReferencePickler(pickle._Pickler):
    """Writes `TensorReference` by torch-xla's name. (The C pickler would insist on importing
    it.)
    """

    def save_global(self, obj, name=None):
        if obj is TensorReference:
            module, _, name = XLA_REFERENCE.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch = pickle._Pickler.dispatch | {type: save_global}


class _ReferencePickle:
    """The part of the pickle module that `torch.save` asks for."""

    Pickler = _ReferencePickler


def _safe_globals() -> list:
    """What may stand in a file besides torch's own list: numpy arrays (random states) and
    torch-xla's references.
    """
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    allowed: list = [np.ndarray, np.dtype, (TensorReference, XLA_REFERENCE)]
    for name in ("_reconstruct", "scalar"):
        allowed += [
            (getattr(multiarray, name), f"{package}.multiarray.{name}")
            for package in ("numpy.core", "numpy._core")
        ]
    allowed += list({type(np.dtype(kind)): None for kind in NUMPY_KINDS})
    return allowed


class WatchedFile:
    """A binary file that keeps the last error of the operating system: torch reports a failed write
    as a RuntimeError of its own archive.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.error: OSError | None = None

    def _watch(self, function: Callable, *args) -> int:
        try:
            return function(*args)
        except OSError as error:
            self.error = error
            raise

    def write(self, data) -> int:
        return self._watch(self._file.write, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._watch(self._file.seek, offset, whence)

    def flush(self) -> None:
        self._watch(self._file.flush)


class HashingFile(WatchedFile):
    """A file that keeps the digest of what is written to it, from the first byte to the last."""

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self._hash, self._size = xxhash.xxh3_128(), 0

    def write(self, data) -> int:
        super().write(data)
        view = memoryview(data)
        self._hash.update(view)
        self._size += view.nbytes
        return view.nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        raise io.UnsupportedOperation("a file that is hashed is written in order")

    @property
    def digest(self) -> Digest:
        return Digest(self._size, self._hash.hexdigest())


@contextmanager
def reported(path: str | Path, file: WatchedFile | None = None) -> Iterator[None]:
    """Errors of the operating system in here are raised with the path, those that `file` has seen
    too.
    """
    try:
        yield
    except Exception as error:
        cause = file.error if file is not None and file.error is not None else error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def write_file(path: str | Path, write: Callable[[HashingFile], None]) -> Digest:
    """Calls `write(file)` on a file aside, flushes it to the disk and renames it to `path`.

    Raises:
        OSError: the disk is full, the folder read-only, …, with the path; nothing is left behind.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".part")
    try:
        with reported(path), open(aside, "wb") as raw:
            file = HashingFile(raw)
            with reported(path, file):
                write(file)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(aside, path)
    except Exception:
        aside.unlink(missing_ok=True)
        raise
    return file.digest


def write_object(obj, path: str | Path, references: bool = False) -> Digest:
    """`torch.save`, whole or absent.

    Args:
        obj: tensors and plain data (`tensors.to_host` checks that).
        references: `obj` holds `TensorReference`s.
    """
    return write_file(
        path,
        lambda file: torch.save(
            obj, file, **({"pickle_module": _ReferencePickle} if references else {})
        ),
    )


def write_text(path: str | Path, text: str) -> Digest:
    return write_file(path, lambda file: file.write(text.encode()))


def sync_directory(path: str | Path) -> None:
    """Flushes the names in a folder, without which a renamed file may be gone after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: str | Path) -> Digest:
    """The digest of a file as it lies on the disk."""
    state, size, room = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(room):
            state.update(room[:count])
            size += count
    return Digest(size, state.hexdigest())


def check_file(path: str | Path, expected: Digest | None) -> None:
    """Raises FileNotFoundError or ValueError, with the path, if the file is missing or not the one
    that was written.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    if expected is None:
        return
    if (size := path.stat().st_size) != expected.size:
        raise ValueError(
            f"{path} has {size} bytes, {expected.size} were written: it is truncated or was "
            "replaced"
        )
    if digest_of(path) != expected:
        raise ValueError(f"{path} was altered after it was written: its hash differs")


def read_object(path: str | Path, mmap: bool = False):
    """`torch.load` on the host, tensors and plain data only.

    Args:
        mmap: leave the tensors in the file until they are used.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is broken, or holds anything else (code is refused, never run); with
            its path.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        with torch.serialization.safe_globals(_safe_globals()):
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path)
            )
    except pickle.UnpicklingError as error:
        kind = "" if zipfile.is_zipfile(path) else "is truncated, or a bare pickle: it "
        raise ValueError(
            f"{path} {kind}is refused, for it may hold code and not only tensors and plain data: "
            f"{_reason(error)}"
        ) from error
    except (
        RuntimeError,
        EOFError,
        zipfile.BadZipFile,
        KeyError,
        AttributeError,
        TypeError,
    ) as error:
        raise ValueError(
            f"{path} is truncated or no checkpoint file: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reason(error: Exception) -> str:
    """The line of torch's long message that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
