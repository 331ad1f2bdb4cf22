"""What all layers with sharded parameters share: initial weights that are the same at every degree,
and the marks.
"""

from collections.abc import Callable

import torch
from torch import nn

from . import parallel_state
from .marks import (
    PARAMETER_MARKS,
    KeepsParameterMarks,
    keep_ties_and_marks,
    set_tensor_model_parallel_attributes,
)
from .sharding import Partition

InitMethod = Callable[[torch.Tensor], object]


class ShardedModule(KeepsParameterMarks, nn.Module):
    """A module whose parameters are sharded over the tensor-parallel ranks, and know how.

    A subclass draws each full tensor on the host, from the default generator, in the order of the
    plain module, and keeps its own shard. So with one seed they are bitwise those of the plain
    module, at every degree. On `device="meta"` nothing is drawn nor allocated; `materialize` does
    it later.
    """

    def __init__(self, device: torch.device | str | None, dtype: torch.dtype):
        super().__init__()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_fallback_parallel_state()
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._dtype = dtype
        self._size = parallel_state.get_tensor_model_parallel_size()
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._partitions: dict[str, Partition] = {}

    def _check_mesh(self) -> None:
        """Raises ValueError if the mesh was built anew, with another tensor-parallel size."""
        if (size := parallel_state.get_tensor_model_parallel_size()) != self._size:
            raise ValueError(
                f"{type(self).__name__} was sharded over {self._size} ranks, and there are {size} "
                "now: build the model after initialize_model_parallel"
            )

    def _declare(
        self, name: str, shape: tuple[int, ...], partition: Partition | None = None, **marks
    ) -> None:
        """Registers an empty parameter, the shard of a full tensor of `shape`, with its marks."""
        local = list(shape)
        if partition is not None:
            local[partition.dim] = sum(partition.local_sizes)
            self._partitions[name] = partition
            if partition.pad:
                marks["pad_size"] = partition.pad
            if partition.multiple > 1:
                marks["pad_multiple"] = partition.multiple
            if max(partition.replicas) > 1 or len(set(partition.sizes)) > 1:
                marks["partition_sizes"] = partition.sizes
                marks["partition_replicas"] = partition.replicas
        parameter = nn.Parameter(torch.empty(local, device=self._device, dtype=self._dtype))
        if partition is None:
            set_tensor_model_parallel_attributes(parameter, False, -1, 1)
        else:
            stride = 1 if "partition_sizes" in marks else len(partition.sizes)
            set_tensor_model_parallel_attributes(
                parameter, True, partition.dim, stride, partition.parts
            )
        self.register_parameter(name, parameter)
        assert set(marks) <= set(PARAMETER_MARKS), marks
        vars(parameter).update(marks)

    def _draw(self, shape: tuple[int, ...], init: InitMethod) -> torch.Tensor:
        """A full tensor with its initial values, on the host, in float32 at least."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        full = torch.empty(shape, dtype=dtype, device="cpu")
        with torch.no_grad():
            init(full)
        return full

    def _keep(self, name: str, full: torch.Tensor) -> None:
        """Sets a parameter to this rank's shard of the full tensor."""
        partition = self._partitions.get(name)
        shard = full if partition is None else partition.shard(full, self._rank)
        with torch.no_grad():
            getattr(self, name).copy_(shard)

    def draw_(self, name: str, init: InitMethod) -> None:
        """Initialises a parameter anew: `init` fills the full tensor, this rank keeps its shard."""
        shape, partition = list(getattr(self, name).shape), self._partitions.get(name)
        if partition is not None:
            shape[partition.dim] = sum(partition.sizes)
        self._keep(name, self._draw(tuple(shape), init))

    def _initialize(self) -> None:
        if self._device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights."""
        raise NotImplementedError


def materialize(
    model: nn.Module,
    device: torch.device | str,
    initialize: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Gives a model built on the meta device its memory on `device` and its initial weights, one
    module after the other.

    A rank never holds more than its own shards and one full weight. With one seed the weights are
    those of a model built on `device` at once, if its modules are constructed in the order in which
    `model.modules()` lists them.

    Args:
        initialize: fills the parameters and buffers of a module, not of its children; by default
            `reset_parameters`.

    Raises:
        ValueError: a module with parameters or buffers on the meta device does not have
            `reset_parameters`.
    """

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    def fill() -> None:
        for name, module in model.named_modules():
            own = (*module._parameters.values(), *module._buffers.values())
            if not any(tensor is not None and tensor.is_meta for tensor in own):
                continue
            if initialize is None and not hasattr(module, "reset_parameters"):
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) is on the meta device and "
                    "does not have reset_parameters"
                )
            module._apply(allocate, recurse=False)
            module.reset_parameters() if initialize is None else initialize(module)

    keep_ties_and_marks(model, fill)
    return model
