"""Folders that are complete or absent.

Every product of the data scripts (text, tokenizer, data set) is a *stage*: a folder whose name ends
in a digest of all that determines its content, so that other parameters lead to another folder and
nothing that somebody reads is ever rewritten. A stage is built in a hidden folder beside the final
one, under a lock, gets its `manifest.json` last, and is then renamed.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from data_scripts.processes import removed_afterwards
from tutorial_lib.storage import put_in_place, read_json, write_text

log = logging.getLogger("data_scripts")

MANIFEST = "manifest.json"
# What readers keep beside the data and check themselves: GPT's sample index, `datasets`' results.
CACHES = re.compile(r"_indexmap_|^cache-.*\.arrow$")
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True)
class Stage:
    """A finished folder and what its manifest says."""

    folder: Path
    manifest: dict

    @property
    def counts(self) -> dict:
        """What the stage counted while it was built (articles, samples, tokens, …)."""
        return self.manifest["counts"]

    def sha256(self, name: str) -> str:
        """Hash of one file, as recorded; what the next stage is keyed by."""
        return self.manifest["files"][name]["sha256"]


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ensure(
    data_dir: Path,
    name: str,
    parameters: dict,
    build: Callable[[Path], dict],
    *,
    needs_bytes: int,
) -> Stage:
    """The stage `name` with these parameters: verified if it is there, built if it is not.

    Args:
        data_dir: folder of all stages; created when missing.
        name: readable part of the folder's name.
        parameters: JSON-serialisable; everything that the content depends on, inputs by their hash.
        build: writes the files into the folder it is given and returns the counts to record.
        needs_bytes: estimate of the stage's size on disk.

    Raises:
        ValueError: the folder holds a file that is not of the stage.
        OSError: ENOSPC, before anything is written when the estimate does not fit; EACCES, EPERM
            or EROFS where nothing can be written.
    """
    canonical = json.dumps(parameters, sort_keys=True)
    folder = data_dir / f"{name}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"
    parameters = json.loads(canonical)
    if (manifest := _verified(folder, parameters)) is None:
        with _errors_named(data_dir, folder.name), _locked(data_dir / ".lock"):
            if (manifest := _verified(folder, parameters)) is None:  # else built while we waited
                _check_space(data_dir, name, needs_bytes)
                for left in data_dir.glob(".*.partial"):  # of dead runs: we hold the lock
                    shutil.rmtree(left)
                manifest = _build(folder, parameters, build)
                log.info("%s: built %s", name, folder)
                return Stage(folder, manifest)
    log.info("%s: complete and verified in %s", name, folder)
    return Stage(folder, manifest)


def _build(folder: Path, parameters: dict, build: Callable[[Path], dict]) -> dict:
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    with removed_afterwards(partial):
        partial.mkdir()
        counts = build(partial)
        files = {
            name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)}
            for name in _names(partial)
        }
        manifest = {"parameters": parameters, "counts": counts, "files": files}
        write_text(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        if folder.exists():
            _check_belong(folder, files)
            shutil.rmtree(folder)
        put_in_place(partial, folder)
    return manifest


def _names(folder: Path) -> list[str]:
    """What is in a stage's folder, by relative name, save folders, the manifest and caches."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder) for path in found if not CACHES.search(path.name))
    return sorted({name.as_posix() for name in names} - {MANIFEST})


def _check_belong(folder: Path, names: Container[str]) -> None:
    if foreign := [name for name in _names(folder) if name not in names]:
        raise ValueError(
            f"{folder} holds {', '.join(foreign[:5])}, not of this data set: move it elsewhere"
        )


def _verified(folder: Path, parameters: dict) -> dict | None:
    """The manifest if every file is as it says; None, with the reason logged, if one is not.

    Raises:
        ValueError: there are files that it does not list.
    """
    if not folder.is_dir():
        return None
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["parameters"] != parameters or not isinstance(manifest["counts"], dict):
            raise ValueError(f"{MANIFEST} is not of this data set")
        files = manifest["files"]
        if missing := sorted(files.keys() - set(_names(folder))):
            raise ValueError(f"{missing[0]} is missing")
        for name, entry in files.items():
            _check_whole(folder / name, entry["bytes"], entry["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        log.warning("%s is damaged and will be rebuilt: %s", folder, reason)
        return None
    _check_belong(folder, files)
    return manifest


def _check_whole(path: Path, size: int, digest: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    if (found := path.stat().st_size) != size:
        raise ValueError(f"{path.name} has {found:,} bytes, not {size:,}")
    if (found := sha256(path)) != digest:
        raise ValueError(f"{path.name} has SHA-256 {found}, not {digest}")


@contextlib.contextmanager
def _errors_named(data_dir: Path, name: str) -> Iterator[None]:
    """Creates the folder. Where it cannot be written to or is full, the error says what to do."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        path = data_dir if error.filename is None else Path(error.filename)
        ours = path.is_relative_to(data_dir) or data_dir.is_relative_to(path)
        if error.errno == errno.ENOSPC:
            message = f"no space left while building {name}, nothing of it is kept ({error})"
        elif error.errno in UNWRITABLE and ours:
            message = "cannot be written to: name another folder with data_dir or --data-dir"
        else:
            raise
        raise OSError(error.errno, message, str(data_dir)) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path)  # the kernel releases it when its holder dies
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.warning("another process prepares data in %s: waiting for it", path.parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_space(data_dir: Path, name: str, needs_bytes: int) -> None:
    if needs_bytes > (free := shutil.disk_usage(data_dir).free):
        raise OSError(errno.ENOSPC, f"{name} needs about {needs_bytes:,} bytes, {free:,} are free")
