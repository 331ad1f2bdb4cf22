"""A folder of checkpoints: which are complete, which was saved last, how one is published, and how
one is removed.

`<folder>/<tag>` is complete if its `done` marker is there. A save is written to `<tag>.incomplete`,
the marker last, and renamed. A complete checkpoint of that tag is first renamed to
`<tag>.replaced`, and counts until the new one has its name.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..storage import Digest, flush, hash_of, read_text, write_text
from .layout import check_mesh

STARTED, DONE = "checkpoint", "done"  # the vendor's library looks for the same two files
ENDINGS = INCOMPLETE, REPLACED, REMOVED = ".incomplete", ".replaced", ".removed"


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint.

    Attributes:
        tag: its name.
        path: its folder.
        step: the training step: from its marker, else the number at the end of its tag.
        sequence: counts the saves into one folder; 0 if another library wrote it.
        files: the digest of each of its files by relative name; empty if another library wrote it.
        mesh: the sizes of the mesh that wrote it; empty if another library did.
        key: the hash of its marker, which a copy of the folder has too; the tag if another library
            wrote it.
        earlier: the keys of the checkpoints that were there when this one was saved; None if an
            earlier version or another library wrote it.
        copy: whether the marker is that of another tag: somebody copied or renamed the folder.
    """

    tag: str
    path: Path
    step: int | None = None
    sequence: int = 0
    files: dict[str, Digest] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    key: str = ""
    earlier: frozenset[str] | None = None
    copy: bool = False

    def follows(self, other: "Complete") -> bool:
        """True if this one is known to have been saved after the other.

        The marker says so. Without one that does, the number of saves decides, and between
        checkpoints of another library the number in their tags if the rest of the tags is equal.
        """
        if self.earlier is not None:
            return other.key in self.earlier
        if self.sequence and other.sequence:
            return self.sequence > other.sequence
        stems = {item.tag.rstrip("0123456789") for item in (self, other)}
        comparable = other.earlier is None and len(stems) == 1
        return comparable and None not in (self.step, other.step) and self.step > other.step


def check_tag(tag: object) -> str:
    """The tag as a name.

    Raises:
        ValueError: it is empty, is a path, or has an ending with a meaning here.
    """
    name = str(tag)
    named = isinstance(tag, (str, int)) and name not in ("", ".", "..") and name.isprintable()
    if not named or "/" in name or name.endswith(ENDINGS):
        raise ValueError(
            f"tag {tag!r} must be a folder's name that does not end in {', '.join(ENDINGS)}"
        )
    return name


def step_of(tag: str) -> int | None:
    """The number at the end of a tag, as in `step_1000`."""
    match = re.search(r"(\d{1,18})$", tag)
    return int(match[1]) if match else None


def _read(path: Path, tag: str) -> Complete | None:
    """The checkpoint at `path`; None if it does not have a marker, or one that makes no sense."""
    try:
        text = read_text(path / DONE)
        if text.strip() in ("", "1"):  # written by the vendor's library
            return Complete(tag, path, step_of(tag), key=tag)
        marker = json.loads(text)
        files = {name: Digest(**digest) for name, digest in marker["files"].items()}
        for name, digest in files.items():
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts or type(digest.size) is not int:
                raise ValueError(f"{name} is not a file of the checkpoint")
        step, sequence, mesh = marker["step"], marker["sequence"], marker["mesh"]
        if type(step) not in (int, type(None)) or type(sequence) is not int:
            raise ValueError("step and sequence are numbers")
        check_mesh(mesh)
        earlier = frozenset(marker["earlier"]) if "earlier" in marker else None
        key, copy = hash_of(text.encode()), marker.get("tag") != tag
        return Complete(tag, path, step, sequence, files, mesh, key, earlier, copy)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _of_tag(folder: Path, tag: str) -> Complete | None:
    """The complete checkpoint of a tag: its replacement, else what that is about to replace. If
    neither is there, the two may have changed places in between, so look again.
    """
    for name in (tag, tag + REPLACED) * 2:
        if (item := _read(folder / name, tag)) is not None:
            return item
    return None


def _all(folder: str | Path) -> list[Complete]:
    """The complete checkpoints and their copies, as they were saved."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    names = {n.removesuffix(REPLACED) for n in names if not n.endswith((INCOMPLETE, REMOVED))}
    found = [item for name in names if (item := _of_tag(folder, name)) is not None]
    return sorted(found, key=lambda x: (x.sequence, -1 if x.step is None else x.step, x.tag))


def complete(folder: str | Path) -> list[Complete]:
    """The complete checkpoints in the order in which they were saved, by what the markers say and
    never by the time of a file. A copy of one of them, or a link to it, is not counted again.
    """
    found = _all(folder)
    copies_first = sorted(found, key=lambda item: (not item.copy, not item.path.is_symlink()))
    originals = {item.key: item for item in copies_first}
    return [item for item in found if originals[item.key] is item]


def incomplete(folder: str | Path) -> list[Path]:
    """What interrupted saves and removals have left."""
    folder, whole = Path(folder), {item.path for item in _all(folder)}
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        path
        for path in found
        if path.is_dir() and not path.is_symlink() and _is_ours(path) and path not in whole
    )


def _is_ours(path: Path) -> bool:
    """A folder that a save has made, and not one that a user keeps beside the checkpoints."""
    if path.name.endswith(ENDINGS):
        return True
    try:
        return read_text(path / STARTED).strip() == "1"
    except (OSError, ValueError):
        return False


def latest(folder: str | Path) -> Complete:
    """The complete checkpoint that was saved last, whatever its step: a run that went back, or is
    shorter than an earlier one in the same folder, goes on from its own.

    Raises:
        RuntimeError: there is none; with what interrupted saves have left.
        ValueError: the markers do not tell which of several was saved last, as after copying one
            from another folder; with their tags.
    """
    found = complete(folder)
    if not found:
        rest = ", ".join(path.name for path in incomplete(folder))
        raise RuntimeError(
            f"no complete checkpoint under {folder}" + (f"; incomplete: {rest}" if rest else "")
        )
    last = [a for a in found if not any(b.follows(a) for b in found)]
    if len(last) != 1:
        names = ", ".join(item.tag for item in last or found)
        raise ValueError(
            f"{folder}: the markers do not tell which of {names} was saved last; name the tag to "
            "load, or move the others away"
        )
    return last[0]


def find(folder: str | Path, tag: object) -> Complete:
    """The complete checkpoint of that tag.

    Raises:
        FileNotFoundError: there is none; says whether it is incomplete, and which tags are
            complete.
    """
    name = str(tag)
    if "/" not in name and (item := _of_tag(Path(folder), name)) is not None:
        return item
    left = {name + end for end in ("", *ENDINGS)}
    halves = left.intersection(path.name for path in incomplete(folder))
    found = ", ".join(item.tag for item in complete(folder))
    raise FileNotFoundError(
        f"checkpoint {Path(folder) / name} {'is incomplete' if halves else 'does not exist'}; "
        f"complete: {found or 'none'}"
    )


def locate(path: str | Path) -> Complete:
    """The complete checkpoint at `path`, or the latest one in the folder `path`.

    Raises:
        FileNotFoundError, RuntimeError: there is none.
        ValueError: as `latest`.
    """
    path = Path(path)
    if any((path / name).exists() for name in (STARTED, DONE, "model", "optim")):
        real = path.resolve()  # `.` and links do not have a name that is a tag
        return find(real.parent, real.name)
    return latest(path)


def _check_replaceable(path: Path) -> None:
    there, whole = path.exists() or path.is_symlink(), _read(path, path.name) is not None
    if there and not whole and (path.is_symlink() or not _is_ours(path)):
        raise ValueError(f"{path} exists and is not a checkpoint: choose another tag")


def begin(folder: str | Path, tag: str) -> Path:
    """Makes the empty folder that a save is written to.

    Raises:
        ValueError: something other than a checkpoint has the tag's name.
    """
    _check_replaceable(Path(folder) / tag)
    aside = Path(folder) / (tag + INCOMPLETE)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    write_text(aside / STARTED, "1")
    return aside


def publish(aside: Path, step: int | None, files: dict[str, Digest], mesh: dict[str, int]) -> None:
    """Turns a folder whose files are written into the complete checkpoint of its tag."""
    folder, tag = aside.parent, aside.name.removesuffix(INCOMPLETE)
    final, replaced, earlier = folder / tag, folder / (tag + REPLACED), complete(folder)
    marker = {
        "format": 1,
        "tag": tag,
        "step": step,
        "sequence": 1 + max((item.sequence for item in earlier), default=0),
        "earlier": sorted({item.key for item in earlier}),
        "mesh": mesh,
        "files": {name: digest._asdict() for name, digest in sorted(files.items())},
    }
    write_text(aside / DONE, json.dumps(marker, indent=1))
    for path in (aside, *(p for p in aside.rglob("*") if p.is_dir())):
        flush(path)
    _check_replaceable(final)
    if final.exists() and _read(final, tag) is None:
        shutil.rmtree(final)  # the one that it was to replace still counts
    elif final.exists():
        if replaced.exists():
            remove(replaced)
        final.rename(replaced)
    aside.rename(final)
    flush(folder)
    if replaced.exists():
        remove(replaced)


def remove(path: Path) -> None:
    """Removes a checkpoint, its `done` marker first, so that an interrupted removal leaves none
    that looks complete. If the path is a symlink, removes only the link.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / DONE).unlink(missing_ok=True)
    flush(path)
    gone = path.with_name(path.name.removesuffix(REMOVED) + REMOVED)
    if gone != path:
        if gone.exists():
            shutil.rmtree(gone)
        path.rename(gone)
    shutil.rmtree(gone)


def rotate(folder: str | Path, num_kept: int | None, current: str) -> None:
    """Keeps the `num_kept` complete checkpoints that were saved last, `current` among them, and
    clears away what interrupted ones left. What somebody copied or renamed stays.

    Args:
        num_kept: None or -1 keeps all and clears nothing.
    """
    if num_kept is None or num_kept == -1:
        return
    others = [item for item in complete(folder) if item.tag != current and not item.copy]
    for item in others[: max(len(others) - (num_kept - 1), 0)]:
        remove(item.path)
    for path in incomplete(folder):
        remove(path)
