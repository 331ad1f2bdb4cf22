"""Small arithmetic of sharding, with errors that name the numbers, and the attributes that mark a sharded parameter."""

import copy
from collections.abc import Callable
from numbers import Integral

import torch
from torch import nn

from . import parallel_state


def ensure_positive(**sizes: int) -> None:
    """Raises ValueError, with its name, for a size that is no whole number from 1 on."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is {size!r}, must be a whole number from 1 on")


def ensure_divisibility(numerator: int, denominator: int, what: str = "") -> None:
    """Raises ValueError, naming both numbers, unless `denominator` divides `numerator`."""
    if denominator < 1 or numerator % denominator:
        raise ValueError(
            f"{what + ': ' if what else ''}{numerator} is not divisible by {denominator}"
        )


def divide(numerator: int, denominator: int, what: str = "") -> int:
    """`numerator / denominator`, exact or a ValueError that names both numbers."""
    ensure_divisibility(numerator, denominator, what)
    return numerator // denominator


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Equal chunks of `tensor` along `dim`: views; with `contiguous_split_chunks` copies where a
    view is not contiguous.
    """
    size = divide(
        tensor.size(dim),
        num_partitions,
        f"dimension {dim} of a tensor of shape {tuple(tensor.shape)}",
    )
    chunks = torch.split(tensor, size, dim=dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Equal chunks of `tensor` along its last dimension."""
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


TENSOR_PARALLEL_ATTRIBUTES = {
    "tensor_model_parallel": False,  # True if each rank holds a part of the parameter
    "partition_dim": -1,  # the dimension that is cut
    "partition_stride": 1,  # how many fused matrices (q, k, v; gate, up) lie in it, each cut for itself
    "num_partitions": -1,  # parts in all; -1 stands for the tensor-parallel size
    "rank_ordering": None,  # the place of each rank's part, where it is not the rank
}
# Further marks that have to follow a parameter wherever it goes.
PARAMETER_MARKS = (
    "sequence_parallel_enabled",  # its gradient is of a part of the sequence: summed over tensor parallel
    "expert_model_parallel",
    "shared",  # a second copy of a weight that another pipeline stage counts
    "kv_shared_numel",  # so many of its last elements are the same on all ranks of the kv group
    # How it is cut, where the marks above do not say it all (`sharding.Partition`).
    "pad_size",  # zeros behind each of its fused matrices
    "pad_multiple",  # of which each rank's share is a multiple, at every tensor-parallel size
    "partition_sizes",
    "partition_replicas",
)


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor,
    is_parallel: bool,
    dim: int,
    stride: int,
    num_partitions: int = -1,
    rank_ordering: list[int] | None = None,
) -> None:
    """Marks a parameter as sharded (or not), the way every other part of the library looks for it.

    Raises:
        ValueError: the parameter is marked already, and otherwise.
    """
    values = dict(
        zip(TENSOR_PARALLEL_ATTRIBUTES, (is_parallel, dim, stride, num_partitions, rank_ordering))
    )
    present = {name: getattr(tensor, name) for name in values if hasattr(tensor, name)}
    if present and present != values:
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} is marked {present} already, not {values}"
        )
    for name, value in values.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Marks a parameter as replicated where it has no marks."""
    for name, default in TENSOR_PARALLEL_ATTRIBUTES.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, default)


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Copies every mark of `source_tensor` that it has."""
    for name in (*TENSOR_PARALLEL_ATTRIBUTES, *PARAMETER_MARKS):
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def is_tensor_parallel(parameter: torch.Tensor) -> bool:
    """True if each tensor-parallel rank holds its own part of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def param_is_not_tensor_parallel_duplicate(parameter: torch.Tensor) -> bool:
    """True for a sharded parameter, and for a replicated one on the first rank of the tensor-parallel group alone.

    So a sum counts each value once, but for key and value heads that a kv group shares
    (`kv_shared_numel`); `get_grad_norm` knows those too.
    """
    return is_tensor_parallel(parameter) or parallel_state.get_tensor_model_parallel_rank() == 0


class KeepsParameterMarks:
    """For modules that mark their parameters: what makes new parameters of old ones keeps their attributes.

    That is a deep copy, `load_state_dict(assign=True)`, `to_empty`, and on some devices every conversion.
    """

    def _keep_marks_of(self, before: dict[str, nn.Parameter | None]) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not None:
                vars(parameter).update(vars(before[name]))

    def __deepcopy__(self, memo):
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__dict__, memo))
        clone._keep_marks_of(self._parameters)
        return clone

    def _apply(self, fn, recurse=True):
        before = dict(self._parameters)
        result = super()._apply(fn, recurse)
        self._keep_marks_of(before)
        return result

    def _load_from_state_dict(self, *args, **kwargs):
        before = dict(self._parameters)
        super()._load_from_state_dict(*args, **kwargs)
        self._keep_marks_of(before)


def keep_ties_and_marks(model: nn.Module, change: Callable[[], object]) -> None:
    """Calls `change`, which may put a new object in the place of each tensor of the model, and mends what it broke.

    Every place that held one object holds one object again, with all attributes that it had.
    """
    places: dict[
        int, list[tuple[dict, str]]
    ] = {}  # tensor before: each table and name that holds it
    marks: dict[int, dict] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, name))
                    marks[id(tensor)] = dict(vars(tensor))
    change()
    for before, held in places.items():
        first_table, first_name = held[0]
        tensor = first_table[first_name]
        vars(tensor).update(marks[before])
        for table, name in held[1:]:
            table[name] = tensor


def move_model_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Moves a model in place and keeps what `model.to(device)` can lose: ties and the marks of parameters.

    On XLA `to` puts a new object in the place of each parameter: a weight shared by two modules comes apart, and its
    attributes (sharded or not, along which dimension) are gone.

    Returns:
        The same model.
    """
    keep_ties_and_marks(model, lambda: model.to(device))
    return model


def ids_outside(
    ids: torch.Tensor, size: int, what: str, ignore: int | None = None
) -> torch.Tensor | None:
    """None if every id is in `[0, size)` (or `ignore`); every rank that holds the same ids finds the same.

    On an accelerator, where a look at the values would stall it, the mask of those outside, to be made NaN.

    Raises:
        ValueError: ids that are no integers; or one outside, for ids on the host.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ValueError(f"each {what} is an integer, not {ids.dtype}")
    ids = ids.to(torch.int64)  # a byte is never -100
    outside = (ids < 0) | (ids >= size)
    if ignore is not None:
        outside &= ids != ignore
    if ids.device.type != "cpu":
        return outside
    if outside.any():
        raise ValueError(f"{what} {ids[outside][0].item()} is outside of [0, {size})")
    return None
