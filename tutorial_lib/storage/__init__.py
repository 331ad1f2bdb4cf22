"""The ground floor for what writes a file: whole or absent, hashed, read as data only.

Files are written aside, flushed, renamed, and known by their digest. A file that is read is a
regular one; a device or a pipe in its place counts as missing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

TEXT = 1 << 28  # bytes that a marker or other text may have
PARTIAL = ".part"


class Digest(NamedTuple):
    """What a file is known by: its length and the XXH3 hash of its bytes (against damage, not
    against forgery).
    """

    size: int
    xxh3_128: str


def hash_of(data: bytes) -> str:
    """The hash that all of the library uses, as 32 characters."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(path: str | Path) -> Digest:
    """The digest of a file as it is on the disk."""
    with open(path, "rb", buffering=0) as file:
        state = hashlib.file_digest(file, xxhash.xxh3_128)
        return Digest(file.tell(), state.hexdigest())


@contextmanager
def reported(path: str | Path) -> Iterator[None]:
    """Raises errors of the operating system with the path, also where torch has raised a
    RuntimeError of its own because of one.
    """
    try:
        yield
    except Exception as error:
        cause = error.__context__ if type(error) is RuntimeError else error
        if not isinstance(cause, OSError) or cause.errno is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


@contextmanager
def replaced_by(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to. What is there in the end is flushed and renamed to `path`;
    after an error it is removed.

    Raises:
        OSError: the disk is full, the folder read-only, …, with the path.
    """
    path = Path(path)
    aside = path.with_name(path.name + PARTIAL)
    try:
        with reported(path):
            yield aside
            put_in_place(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_file(path: str | Path, write: Callable[[BinaryIO], object]) -> Digest:
    """Calls `write(file)` on a file aside, which then takes the name `path`; returns its digest.

    Raises:
        OSError: as `replaced_by`; nothing is left behind.
    """
    with replaced_by(path) as aside:
        with open(aside, "wb") as file:
            write(file)
        return digest_of(aside)


def write_text(path: str | Path, text: str) -> Digest:
    return write_file(path, lambda file: file.write(text.encode()))


def flush(path: str | Path) -> None:
    """Flushes a file, or the names in a folder: without these a renamed file may be gone after a
    power cut.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(path: str | Path) -> None:
    """Allocates disk space for a sparse file: a full disk is an error here, and not a signal when
    a hole is written to through a mapping.

    Raises:
        OSError: the disk is full, with the path.
    """
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with reported(path), open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def sealed(path: str | Path) -> Digest:
    """Flushes a file that is written where it stays; returns its digest."""
    with reported(path):
        flush(path)
        return digest_of(path)


def put_in_place(aside: str | Path, path: str | Path) -> None:
    """Flushes a file or a folder and gives it its name."""
    flush(aside)
    os.replace(aside, path)


def check_file(path: str | Path, expected: Digest | None = None) -> None:
    """Raises FileNotFoundError or ValueError, with the path, if the file is missing or is not the
    one that was written.
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


def read_text(path: str | Path) -> str:
    """The text of a small file.

    Raises:
        FileNotFoundError: there is no such regular file.
        ValueError: it is too large, or is not text; with the path.
    """
    path = Path(path)
    check_file(path)
    if path.stat().st_size > TEXT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, at most {TEXT} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON or other text: {error}") from error


def read_json(path: str | Path) -> dict:
    """The JSON object in a small file.

    Raises:
        FileNotFoundError, ValueError: as `read_text`; it is truncated, nested too deeply, or not an
            object.
    """
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value
