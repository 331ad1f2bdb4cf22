"""Objects made of tensors and plain data: visited, checked, and brought to the host."""

from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from ..backends import mark_step

NUMPY_KINDS = "?bhilqBHILQefdFDSU"  # the dtypes of arrays that may be in a file
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size
)  # fmt: skip
MAPPINGS = (dict, OrderedDict, Counter)


def map_tensors(value, function: Callable, kind: type = torch.Tensor, where: str = "the object"):
    """`value` with `function(tensor)` in place of each tensor (or other `kind`) in its dicts,
    lists, tuples and sets. What occurs twice is visited once.

    Raises:
        ValueError: something that is neither a tensor nor plain data, with its place in the object;
            a container that contains itself, or is nested too deeply.
    """
    done: dict[int, object] = {}  # None while what is in a container is visited

    def visit(value, where: str):
        if isinstance(value, kind):
            return function(value)
        if _is_plain(value, where):
            return value
        if id(value) not in done:
            done[id(value)] = None
            done[id(value)] = visit_inside(value, where)
        if done[id(value)] is None:
            raise ValueError(f"{where} contains itself")
        return done[id(value)]

    def visit_inside(value, where: str):
        if type(value) in (list, tuple, set):
            return type(value)(visit(item, f"{where}[{i}]") for i, item in enumerate(value))
        if type(value) not in MAPPINGS:
            raise ValueError(
                f"{where} is of type {type(value).__module__}.{type(value).__qualname__}; "
                "a checkpoint holds tensors and plain data only"
            )
        result = type(value)()
        for key, item in value.items():
            if not all(type(k) in PLAIN for k in (key if type(key) is tuple else [key])):
                raise ValueError(f"{where} has the key {key!r}; keys have to be plain data")
            result[key] = visit(item, f"{where}[{key!r}]")
        if hasattr(value, "_metadata"):  # versions, by Module.state_dict for load_state_dict
            result._metadata = value._metadata
        return result

    try:
        return visit(value, where)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None


def _is_plain(value, where: str) -> bool:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return type(value) in PLAIN
    if value.dtype.char not in NUMPY_KINDS:
        raise ValueError(
            f"{where} is of numpy's dtype {value.dtype}; a checkpoint holds numbers and text only"
        )
    return True


def check_tensor(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor, if it has data, one element beside the other; ValueError if not."""
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{where} holds a tensor ({kind}); only dense ones with data may be there")
    return tensor


def check(value, where: str) -> None:
    """Raises ValueError, with the place, unless `value` is made of plain data and of tensors that
    have data.
    """
    map_tensors(value, lambda tensor: check_tensor(tensor, where), where=where)


def check_finite(weights: dict, where: str) -> None:
    """Raises ValueError, with its name, if a floating-point tensor of a state dict is not finite.
    Beside parameters there may be buffers, such as masks, that hold infinities.

    One read covers all of them, so the device is asked once. Every rank calls this, and it ends a
    step: on xla, what is read within a step is compiled anew in each run.
    """
    marked = any(isinstance(tensor, torch.nn.Parameter) for tensor in weights.values())
    kind = torch.nn.Parameter if marked else torch.Tensor
    finite = {
        name: tensor.detach().isfinite().all()
        for name, tensor in weights.items()
        if isinstance(tensor, kind) and tensor.is_floating_point()
    }
    found = torch.stack(list(finite.values())) if finite else torch.empty(0, device="cpu")
    mark_step()
    if bad := [name for name, good in zip(finite, found.tolist(), strict=True) if not good]:
        raise ValueError(
            f"{where} is not saved: {len(bad)} tensors hold NaN or infinity, the first is "
            f"{bad[0]}; resume from the last checkpoint"
        )


def identity(tensor: torch.Tensor):
    """A key, equal for tensors that are one or are views of the same elements."""
    if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
        return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return id(tensor)


def to_host(value, copy: bool = False):
    """`value` with every tensor on the host, contiguous, and with no more storage behind it than
    its own elements. Tensors that are one stay one.

    Args:
        copy: copy host tensors too, so that the result is independent of them.
    """
    seen = {}

    def host_of(tensor: torch.Tensor) -> torch.Tensor:
        key = identity(tensor)
        if key not in seen:
            host = tensor.cpu().detach().contiguous()  # on xla a graph would detach a view
            drags = host.untyped_storage().nbytes() != host.nbytes
            if drags or (copy and host.data_ptr() == tensor.data_ptr()):
                host = host.clone()
            seen[key] = host, tensor  # the tensor, so that its id stays its own
        return seen[key][0]

    return map_tensors(value, host_of)
