"""An object in one file, or one file for each of its tensors.

`xser` is torch-xla's way: `<path>` holds the object with a reference in place of each tensor,
`<path>.tensors/` the tensors, so that never more than one of them is on the host.

No file is trusted: tensors and plain data are loaded, and a file that is missing, broken or holds
code is named.
"""

import mmap
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from . import Digest, check_file, reported, reserve, write_file
from .objects import NUMPY_KINDS, check_tensor, identity, map_tensors, to_host


class TensorReference:
    """Stands in an object for a tensor that has a file of its own."""

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


REFERENCE_PICKLE = SimpleNamespace(Pickler=_ReferencePickler, __name__="pickle")


def tensors_folder(path: str | Path) -> Path:
    return Path(f"{path}.tensors")


def info_file(path: str | Path) -> Path:
    return Path(f"{path}.info.pt")


def tensor_file(path: str | Path, tid: int) -> Path:
    return tensors_folder(path) / f"tensor_{tid}.pt"


def is_xser(path: str | Path) -> bool:
    return tensors_folder(path).is_dir()


# --- writing --------------------------------------------------------------------------------------


def write_object(value, path: str | Path, pickle_module=pickle) -> Digest:
    """`torch.save` of tensors and plain data, whole or absent."""
    return write_file(path, lambda file: torch.save(value, file, pickle_module))


def _write_blank(value, path: Path, pickle_module=pickle) -> None:
    with reported(path), torch.serialization.skip_data(), open(path, "wb") as file:
        torch.save(value, file, pickle_module)
    reserve(path)


def save(
    value,
    path: str | Path,
    xser: bool = False,
    place: int = 0,
    places: int = 1,
    write: Callable = write_object,
) -> dict[Path, Digest]:
    """Writes `value` into one file, or tensor by tensor.

    Args:
        place, places: this rank's place among ranks that hold the same value. They share the
            tensors of xser; the first writes the rest.
        write: writes an object into one file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        return {path: write(to_host(value), path)}
    unique: dict[object, torch.Tensor] = {}
    numbers: dict[object, int] = {}

    def refer(tensor: torch.Tensor) -> TensorReference:
        unique.setdefault(key := identity(tensor), tensor)
        return TensorReference(numbers.setdefault(key, len(numbers)))

    skeleton = map_tensors(value, refer)
    tensors_folder(path).mkdir(exist_ok=True)
    written = {}
    for tid, tensor in list(enumerate(unique.values()))[place::places]:
        file = tensor_file(path, tid)
        written[file] = write(to_host(tensor), file)
    if place == 0:
        info = {
            tid: {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
            for tid, tensor in enumerate(unique.values())
        }
        written[info_file(path)] = write(info, info_file(path))
        written[path] = write(skeleton, path, REFERENCE_PICKLE)
    return written


def save_blank(value, path: str | Path, xser: bool = False) -> tuple[object, list[Path]]:
    """As `save`, but the elements of tensors on the meta device are yet to be filled in.

    Returns:
        `value` with tensors that are mapped from the files, and write through to them: they take no
        memory that could not be reclaimed. And the files, whose digests are to be taken once they
        are full. (Their archives do not have the right CRCs, at which torch does not look.)
    """
    blanks: dict[int, torch.Tensor] = {}
    given: list[torch.Tensor] = []
    held: list[torch.Tensor] = []

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor)
        if not tensor.is_meta:
            return tensor
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # without memory yet
        return blanks.setdefault(id(tensor), blank)

    files = list(save(map_tensors(value, lay_out), path, xser, write=_write_blank))
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = load(path, mmap=True)
    map_tensors(mapped, held.append)
    for there, tensor in zip(held, given, strict=True):
        if not tensor.is_meta:
            there.copy_(tensor)
    return mapped, files


# --- reading --------------------------------------------------------------------------------------


def _safe_globals() -> list:
    """What a file may name besides torch's own list: numpy arrays (random states) and torch-xla's
    references.
    """
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    allowed: list = [np.ndarray, np.dtype, (TensorReference, XLA_REFERENCE)]
    for name in ("_reconstruct", "scalar"):
        allowed += [
            (getattr(multiarray, name), f"{package}.multiarray.{name}")
            for package in ("numpy.core", "numpy._core")
        ]
    return allowed + list({type(np.dtype(kind)): None for kind in NUMPY_KINDS})


def load(path: str | Path, mmap: bool = False, blanks: bool = False):
    """What `save` (or torch, or torch-xla) wrote to `path`, on the host: tensors and plain data
    only.

    Args:
        mmap: leave the tensors in the file until they are used.
        blanks: do not open the files of single tensors, of which there may be more than a process
            can map; put tensors without data in their place.

    Raises:
        FileNotFoundError: there is no such regular file.
        ValueError: the file is broken, holds tensors without their elements, or holds anything else
            (code is refused, never run); with its path.
    """
    path, loaded = Path(path), {}
    infos = _read(info_file(path), False) if blanks and is_xser(path) else {}
    kinds = (torch.Tensor, TensorReference)

    def resolve(item: torch.Tensor | TensorReference) -> torch.Tensor:
        if isinstance(item, torch.Tensor):
            return item
        if type(tid := getattr(item, "tid", None)) is not int:
            raise ValueError(f"{path}: a reference to a tensor does not have a number")
        if blanks:
            check_file(tensor_file(path, tid))
            return torch.empty(infos[tid]["shape"], dtype=infos[tid]["dtype"], device="meta")
        if tid not in loaded:
            loaded[tid] = _read(tensor_file(path, tid), mmap)
            if not isinstance(loaded[tid], torch.Tensor):
                raise ValueError(f"{tensor_file(path, tid)} does not hold a tensor")
        return loaded[tid]

    return map_tensors(_read(path, mmap), resolve, kinds, str(path))


def _read(path: Path, mmap: bool):
    check_file(path)
    archive = zipfile.is_zipfile(path)

    def check_held(item: torch.Tensor | TensorReference):
        if isinstance(item, torch.Tensor):
            held = check_tensor(item, "it").untyped_storage().nbytes()
            if item.nbytes > held:
                raise ValueError(f"a tensor of shape {tuple(item.shape)} has {held} bytes")
        return item

    try:
        if archive:
            _check_archive(path)
        with torch.serialization.safe_globals(_safe_globals()):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and archive)
        return map_tensors(value, check_held, (torch.Tensor, TensorReference), str(path))
    except pickle.UnpicklingError as error:
        kind = "" if archive else "is truncated, or a bare pickle: it "
        raise ValueError(
            f"{path} {kind}is refused, for it may hold code and not only tensors and plain data: "
            f"{_reason(error)}"
        ) from error
    except Exception as error:  # whatever a hostile file makes torch, numpy or pickle raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is truncated or not a checkpoint file: {reason}") from error


def _check_archive(path: Path) -> None:
    """Raises ValueError for an archive that becomes larger when it is read."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or (
        sum(member.file_size for member in members) > path.stat().st_size
    ):
        raise ValueError("its members are compressed or overlap")


def _reason(error: Exception) -> str:
    """The line of torch's long message that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
