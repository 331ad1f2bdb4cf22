"""The attributes that mark a parameter (sharded or not, along which dimension), and what keeps them
where torch puts a new parameter in the place of an old one.

Names are those of `neuronx_distributed.parallel_layers`.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn

TENSOR_PARALLEL_ATTRIBUTES = {
    "tensor_model_parallel": False,  # True if each rank holds a shard of the parameter
    "partition_dim": -1,  # the sharded dimension
    "partition_stride": 1,  # how many matrices (q, k, v; gate, up) are concatenated in it
    "num_partitions": -1,  # shards in all; -1 stands for the tensor-parallel size
}
# Further marks:
# - sequence_parallel_enabled: its gradient is of a shard of the sequence, to be summed
# - kv_shared_numel: so many of its last elements are the same on all ranks of the kv group
# - partition_sizes, partition_replicas, pad_size (zeros behind each of its matrices), pad_multiple
#   (divides the rows of each shard, at every tensor-parallel size): how it is sharded, where the
#   marks above do not say it all (`sharding.Partition`)


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int, num_partitions: int = -1
) -> None:
    """Marks a parameter as sharded (or not), the way every other part of the library looks for it.

    Raises:
        ValueError: the parameter has other marks already.
    """
    values = dict(zip(TENSOR_PARALLEL_ATTRIBUTES, (is_parallel, dim, stride, num_partitions)))
    present = {name: getattr(tensor, name) for name in values if hasattr(tensor, name)}
    if present and present != values:
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} is marked {present} already, not {values}"
        )
    vars(tensor).update(values)


def is_tensor_parallel(parameter: torch.Tensor) -> bool:
    """True if each tensor-parallel rank holds its own shard of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


class KeepsParameterMarks:
    """For modules that mark their parameters: parameters that replace them get their marks, as in a
    deep copy, `load_state_dict(assign=True)`, `to_empty`, and on some devices every conversion.
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
    """Calls `change`, which may replace each tensor of the model, and restores ties and marks.

    Every place that held one object holds one object again, with all attributes that it had.
    """
    # By the id of the tensor before: its attributes, and each table and name that holds it.
    held: dict[int, tuple[dict, list[tuple[dict, str]]]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    entry = held.setdefault(id(tensor), (dict(vars(tensor)), []))
                    entry[1].append((table, name))
    change()
    for marks, places in held.values():
        first_table, first_name = places[0]
        tensor = first_table[first_name]
        vars(tensor).update(marks)
        for table, name in places[1:]:
            table[name] = tensor


def move_model_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Moves a model in place and keeps what `model.to(device)` can lose: ties and marks.

    On XLA `to` replaces each parameter: a weight that two modules share becomes two, and its
    attributes (sharded or not, along which dimension) are gone.

    Returns:
        The same model.
    """
    keep_ties_and_marks(model, lambda: model.to(device))
    return model
