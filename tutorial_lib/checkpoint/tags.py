"""A folder of checkpoints: which of them are complete, which is the latest, how one is published
and how one goes.

`<folder>/<tag>` is complete once its `done` marker is there. A save is written to
`<tag>.incomplete` and renamed; a complete checkpoint of the same tag waits as `<tag>.replaced`
until then, and takes its place again if the save is interrupted.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import xxhash

from .files import Digest, check_file, sync_directory, write_text

STARTED, DONE = "checkpoint", "done"  # the vendor's library looks for the same two files
INCOMPLETE, REPLACED, REMOVED = ".incomplete", ".replaced", ".removed"


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint.

    Attributes:
        tag: its name.
        path: where it lies.
        step: the training step: from its marker, else the number at the end of its tag.
        sequence: counts the saves into one folder; 0 if another library wrote it.
        key: the hash of its marker, which a copy of the folder has too; the tag if another library
            wrote it.
        earlier: the keys of the checkpoints that were there when this one was saved; None if an
            earlier version or another library wrote it.
        copy: whether the marker is that of another tag: somebody copied or renamed the folder.
        files: the digest of each of its files by relative name; empty if another library wrote it.
        mesh: the sizes of the mesh that wrote it; empty if another library did.
    """

    tag: str
    path: Path
    step: int | None
    sequence: int
    files: dict[str, Digest]
    mesh: dict[str, int]
    key: str = ""
    earlier: frozenset[str] | None = None
    copy: bool = False

    @property
    def age(self) -> tuple[int, int, str]:
        """Orders checkpoints as they were saved, the last one last."""
        return (self.sequence, -1 if self.step is None else self.step, self.tag)

    def follows(self, other: "Complete") -> bool:
        """True if this one is known to have been saved after the other.

        The marker says so. Without one that does, the number of saves decides, and between
        checkpoints of another library the number in their tags if the rest of the tags is equal.
        """
        if self.earlier is not None:
            return other.key in self.earlier
        if self.sequence and other.sequence:
            return self.sequence > other.sequence
        comparable = other.earlier is None and _stem(self.tag) == _stem(other.tag)
        return comparable and None not in (self.step, other.step) and self.step > other.step

    def check(self, file: str | Path) -> None:
        """Raises FileNotFoundError or ValueError unless `file`, of this checkpoint, is as it was
        written.
        """
        check_file(file, self.files.get(str(Path(file).relative_to(self.path))))


def check_tag(tag: object) -> str:
    """The tag as a name.

    Raises:
        ValueError: it is empty, is a path, or has an ending with a meaning here.
    """
    name = str(tag)
    if (
        not isinstance(tag, (str, int))
        or not name
        or name in (".", "..")
        or "/" in name
        or not name.isprintable()
        or name.endswith((INCOMPLETE, REPLACED, REMOVED))
    ):
        raise ValueError(
            f"tag {tag!r} must be a folder's name that does not end in {INCOMPLETE}, {REPLACED} "
            f"or {REMOVED}"
        )
    return name


def check_kept(number: object) -> None:
    """Raises ValueError unless `number` says how many checkpoints stay."""
    if number not in (None, -1) and (type(number) is not int or number < 1):
        raise ValueError(
            f"num_kept_ckpts must be a whole number from 1 on, or -1 or None to keep all, not "
            f"{number!r}"
        )


def _stem(tag: str) -> str:
    """A tag without the number at its end."""
    return tag.rstrip("0123456789")


def step_of(tag: str) -> int | None:
    """The number at the end of a tag, as in `step_1000`."""
    match = re.search(r"(\d+)$", tag)
    return int(match[1]) if match else None


def _read(path: Path, tag: str) -> Complete | None:
    try:
        text = (path / DONE).read_text()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None
    if text.strip() in ("", "1"):  # written by the vendor's library
        return Complete(tag, path, step_of(tag), 0, {}, {}, tag)
    try:
        marker = json.loads(text)
        files = {name: Digest(**digest) for name, digest in marker["files"].items()}
        step, sequence, mesh = marker["step"], marker["sequence"], marker["mesh"]
        numbers = [sequence, *mesh.values(), *([] if step is None else [step])]
        earlier = frozenset(marker["earlier"]) if "earlier" in marker else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not all(type(number) is int for number in numbers) or not {"tp", "pp"} <= mesh.keys():
        return None
    key, copy = xxhash.xxh3_128_hexdigest(text.encode()), marker.get("tag") != tag
    return Complete(tag, path, step, sequence, files, mesh, key, earlier, copy)


def complete(folder: str | Path) -> list[Complete]:
    """The complete checkpoints in the order in which they were saved, by what the markers say and
    never by the time of a file. A copy of one of them, or a link to it, is not counted again.
    """
    folder = Path(folder)
    paths = [p for p in folder.iterdir() if not _is_alias(p)] if folder.is_dir() else []
    names = [p.name for p in paths if not p.name.endswith((INCOMPLETE, REMOVED))]
    found = (_of_tag(folder, tag) for tag in {name.removesuffix(REPLACED) for name in names})
    found = sorted((item for item in found if item is not None), key=lambda item: item.age)
    originals = {item.key: item for item in sorted(found, key=lambda item: not item.copy)}
    return [item for item in found if originals[item.key] is item]


def _of_tag(folder: Path, tag: str) -> Complete | None:
    """The complete checkpoint of a tag: its replacement, else what that is about to replace. If
    neither is there, the two may have changed places in between, so look again.
    """
    for name in (tag, tag + REPLACED) * 2:
        if (item := _read(folder / name, tag)) is not None:
            return item
    return None


def incomplete(folder: str | Path) -> list[Path]:
    """What interrupted saves and removals have left."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    kept = {item.path for item in complete(folder)}
    rest = (p for p in folder.iterdir() if p not in kept and not p.is_symlink())
    return sorted(p for p in rest if p.is_dir() and _is_ours(p))


def _is_ours(path: Path) -> bool:
    """A folder that a save has made, and not one that a user keeps beside the checkpoints."""
    if path.name.endswith((INCOMPLETE, REPLACED, REMOVED)):
        return True
    try:
        return (path / STARTED).read_text().strip() == "1"
    except (OSError, UnicodeDecodeError):
        return False


def _is_alias(path: Path) -> bool:
    """True for a link to a folder beside it."""
    return path.is_symlink() and path.resolve().parent == path.parent.resolve()


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
        rest = ", ".join(p.name for p in incomplete(folder))
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
    """The complete checkpoint of that tag, which may be a link to one.

    Raises:
        FileNotFoundError: there is none; says whether it is incomplete, and which tags are
            complete.
    """
    found = {item.tag: item for item in complete(folder)}
    path = Path(folder) / str(tag)
    name = path.resolve().name if _is_alias(path) else str(tag)
    if name in found:
        return found[name]
    halves = [p.name for p in incomplete(folder)]
    state = (
        "is incomplete"
        if {str(tag) + end for end in ("", INCOMPLETE, REPLACED, REMOVED)}.intersection(halves)
        else "does not exist"
    )
    raise FileNotFoundError(
        f"checkpoint {Path(folder) / str(tag)} {state}; complete: {', '.join(found) or 'none'}"
    )


def _check_replaceable(path: Path) -> None:
    there, whole = path.exists() or path.is_symlink(), _read(path, path.name) is not None
    if there and not whole and (path.is_symlink() or not _is_ours(path)):
        raise ValueError(f"{path} exists and is no checkpoint: choose another tag")


def begin(folder: str | Path, tag: str) -> Path:
    """Makes the empty folder that a save is written to.

    Raises:
        ValueError: something else than a checkpoint has the tag's name.
    """
    _check_replaceable(Path(folder) / tag)
    aside = Path(folder) / (tag + INCOMPLETE)
    if aside.exists():
        shutil.rmtree(aside)
    for name in ("model", "optim"):
        (aside / name).mkdir(parents=True)
    write_text(aside / STARTED, "1")
    return aside


def publish(aside: Path, step: int | None, files: dict[str, Digest], mesh: dict[str, int]) -> Path:
    """Turns a folder that is written and flushed into the complete checkpoint of its tag, and
    returns where that lies.
    """
    folder, tag = aside.parent, aside.name.removesuffix(INCOMPLETE)
    final, replaced = folder / tag, folder / (tag + REPLACED)
    earlier = complete(folder)
    for name in ("model", "optim"):
        if not any((aside / name).iterdir()):
            (aside / name).rmdir()
    for path in (aside, *(p for p in aside.rglob("*") if p.is_dir())):
        sync_directory(path)
    _check_replaceable(final)
    if final.exists():
        if _read(final, tag) is not None:
            if replaced.exists():
                remove(replaced)
            final.rename(replaced)
        else:
            shutil.rmtree(final)
    aside.rename(final)
    sync_directory(folder)
    marker = {
        "format": 1,
        "tag": tag,
        "step": step,
        "sequence": 1 + max((item.sequence for item in earlier), default=0),
        "earlier": sorted({item.key for item in earlier}),
        "mesh": mesh,
        "files": {name: digest._asdict() for name, digest in sorted(files.items())},
    }
    write_text(final / DONE, json.dumps(marker, indent=1))
    sync_directory(final)
    if replaced.exists():
        remove(replaced)
    return final


def remove(path: Path) -> None:
    """Removes a checkpoint, its `done` marker first, so that an interrupted removal leaves none
    that looks complete. Of a link to one, the link.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / DONE).unlink(missing_ok=True)
    sync_directory(path)
    gone = path if path.name.endswith(REMOVED) else path.with_name(path.name + REMOVED)
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
