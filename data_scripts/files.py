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
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

log = logging.getLogger("data_scripts")

MANIFEST = "manifest.json"


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
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
        OSError: ENOSPC, before anything is written when the estimate does not fit.
    """
    canonical = json.dumps(parameters, sort_keys=True)
    folder = data_dir / f"{name}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"
    if (manifest := _verified(folder)) is None:
        data_dir.mkdir(parents=True, exist_ok=True)
        with _locked(data_dir / ".lock"):
            if (manifest := _verified(folder)) is None:  # else built while we waited
                _check_space(data_dir, name, needs_bytes)
                manifest = _build(folder, parameters, build)
                log.info("%s: built %s", name, folder)
                return Stage(folder, manifest)
    log.info("%s: complete and verified in %s", name, folder)
    return Stage(folder, manifest)


def _build(folder: Path, parameters: dict, build: Callable[[Path], dict]) -> dict:
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed: we hold the lock
    try:
        partial.mkdir()
        counts = build(partial)
        files = {
            path.relative_to(partial).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        manifest = {"parameters": parameters, "counts": counts, "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(partial, folder)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = f"no space left while building {folder.name}, nothing of it is kept ({error})"
        raise OSError(errno.ENOSPC, message, str(folder.parent)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _verified(folder: Path) -> dict | None:
    """The manifest if every file is as it says; None, with the reason logged, if one is not."""
    if not folder.is_dir():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest["files"].items():
            path = folder / name
            if (size := path.stat().st_size) != entry["bytes"]:
                raise ValueError(f"{name} has {size:,} bytes, not {entry['bytes']:,}")
            if (digest := sha256(path)) != entry["sha256"]:
                raise ValueError(f"{name} has SHA-256 {digest}, not {entry['sha256']}")
    except (FileNotFoundError, ValueError, KeyError) as reason:
        log.warning("%s is damaged and will be rebuilt: %s", folder, reason)
        return None
    return manifest


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


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _check_space(data_dir: Path, name: str, needs_bytes: int) -> None:
    if needs_bytes > (free := _free(data_dir)):
        raise OSError(
            errno.ENOSPC,
            f"{name} needs about {needs_bytes:,} bytes, {free:,} are free",
            str(data_dir),
        )
