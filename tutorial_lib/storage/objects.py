"""Objects made of tensors and plain data: checked, brought to the host, written and read.

No file is trusted: `read_object` loads tensors and plain data, and names a file that is missing,
broken or holds code.
"""

import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from .disk import Digest, check_file, write_file

NUMPY_KINDS = "?bhilqBHILQefdFDSU"  # the dtypes of arrays that may be in a file
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size
)  # fmt: skip
MAPPINGS = (dict, OrderedDict, Counter)
_OPEN = object()  # stands for a container while what is in it is visited


class TensorReference:
    """Stands in an object for a tensor that has a file of its own, see `xser`."""

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


def map_tensors(value, function: Callable, kind: type = torch.Tensor, where: str = "the object"):
    """`value` with `function(tensor)` in place of each tensor (or other `kind`) in its dicts,
    lists, tuples and sets. What occurs twice is visited once.

    Raises:
        ValueError: something that is neither a tensor nor plain data, with its place in the object;
            a container that contains itself, or is nested too deeply.
    """
    done: dict[int, object] = {}

    def visit(value, where: str):
        if isinstance(value, kind):
            return function(value)
        if type(value) in PLAIN or _is_numbers(value, where):
            return value
        if type(value) not in (*MAPPINGS, list, tuple, set):
            raise ValueError(
                f"{where} is of type {type(value).__module__}.{type(value).__qualname__}; "
                "a checkpoint holds tensors and plain data only"
            )
        if (result := done.setdefault(id(value), _OPEN)) is not _OPEN:
            return result
        if id(value) in opened:
            raise ValueError(f"{where} contains itself")
        opened.add(id(value))
        result = _visit_inside(value, where, visit)
        opened.discard(id(value))
        done[id(value)] = result
        return result

    opened: set[int] = set()
    try:
        return visit(value, where)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None


def _visit_inside(value, where: str, visit: Callable):
    if type(value) not in MAPPINGS:
        return type(value)(visit(item, f"{where}[{i}]") for i, item in enumerate(value))
    result = type(value)()
    for key, item in value.items():
        if not _is_plain(key):
            raise ValueError(
                f"{where} has the key {key!r} of type {type(key).__qualname__}; keys have to be "
                "plain data"
            )
        result[key] = visit(item, f"{where}[{key!r}]")
    if hasattr(value, "_metadata"):  # versions, by Module.state_dict for Module.load_state_dict
        result._metadata = value._metadata
    return result


def _is_plain(key) -> bool:
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in PLAIN


def _is_numbers(value, where: str) -> bool:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return False
    if value.dtype.char not in NUMPY_KINDS:
        raise ValueError(
            f"{where} is of numpy's dtype {value.dtype}; a checkpoint holds numbers and text only"
        )
    return True


def check(value, where: str) -> None:
    """Raises ValueError, with the place, unless `value` is made of plain data and of tensors that
    have data, one element beside the other.
    """

    def has_data(tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
            kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{where} holds a tensor ({kind}) that is not an array of numbers")

    map_tensors(value, has_data, where=where)


def check_finite(weights: dict, where: str) -> None:
    """Raises ValueError, with its name, if a floating-point tensor of a state dict is not finite.
    Beside parameters there may be buffers, such as masks, that hold infinities.

    All are looked at in one go, for a device that would be asked once for each.
    """
    tensors = {
        name: tensor.detach()
        for name, tensor in weights.items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel()
    }
    if parameters := [n for n in tensors if isinstance(weights[n], torch.nn.Parameter)]:
        tensors = {name: tensors[name] for name in parameters}
    if not tensors:
        return
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
    if bad := [name for name, good in zip(tensors, finite, strict=True) if not good]:
        raise ValueError(
            f"{where} is not saved, for {bad[0]} and {len(bad) - 1} more tensors hold NaN or "
            "infinity: go on from the last checkpoint"
        )


class _Host:
    """Brings tensors to the host, the same one once: ties stay ties."""

    def __init__(self, copy: bool):
        self._copy, self._seen = copy, {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        key = identity(tensor)
        if key not in self._seen:
            source = tensor.detach()
            host = source.cpu().contiguous()
            drags = host.untyped_storage().nbytes() != host.numel() * host.element_size()
            if drags or (self._copy and host.data_ptr() == source.data_ptr()):
                host = host.clone()
            self._seen[key] = host, tensor  # the tensor, so that its id stays its own
        return self._seen[key][0]


def identity(tensor: torch.Tensor):
    """What two tensors have in common that are one, or views of the same elements."""
    if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
        return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return id(tensor)


def to_host(value, copy: bool = False):
    """`value` with every tensor on the host, contiguous, and with no more storage behind it than
    its own elements.

    Args:
        copy: copy host tensors too, so that training may go on while the result is written.
    """
    return map_tensors(value, _Host(copy))


def write_object(value, path: str | Path, references: bool = False) -> Digest:
    """`torch.save` of tensors and plain data, whole or absent.

    Args:
        references: `value` holds `TensorReference`s.
    """
    options = {"pickle_module": _ReferencePickle} if references else {}
    return write_file(path, lambda file: torch.save(value, file, **options))


def read_object(path: str | Path, mmap: bool = False):
    """`torch.load` on the host, tensors and plain data only.

    Args:
        mmap: leave the tensors in the file until they are used.

    Raises:
        FileNotFoundError: there is no such regular file.
        ValueError: the file is broken, holds tensors without their elements, or holds anything else
            (code is refused, never run); with its path.
    """
    path = Path(path)
    check_file(path, None)
    archive = zipfile.is_zipfile(path)
    try:
        if archive:
            _check_archive(path)
        with torch.serialization.safe_globals(_safe_globals()):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and archive)
        return map_tensors(value, _check_read, (torch.Tensor, TensorReference), str(path))
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


def _check_read(item: torch.Tensor | TensorReference):
    if isinstance(item, TensorReference):
        if type(getattr(item, "tid", None)) is not int:
            raise ValueError("a reference to a tensor does not have a number")
        return item
    if type(item) not in (torch.Tensor, torch.nn.Parameter) or item.layout != torch.strided:
        raise ValueError(f"a {type(item).__name__} ({item.layout}) is not an array of numbers")
    held = -1 if item.is_meta else item.untyped_storage().nbytes()
    if item.numel() * item.element_size() > held:
        raise ValueError(f"a tensor of shape {tuple(item.shape)} has {held} bytes in the file")
    return item


def _reason(error: Exception) -> str:
    """The line of torch's long message that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
