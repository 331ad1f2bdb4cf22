"""What all layers with sharded parameters share: initial weights that are the same at every degree,
and the marks.
"""

from collections.abc import Callable

import torch
from torch import nn

from . import parallel_state
from .marks import KeepsParameterMarks, keep_ties_and_marks
from .sharding import Partition, full_shape, mark_partition, partition_of
from .utils import padding_of

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

    def _check_mesh(self) -> None:
        """Raises ValueError if the mesh was built anew, with another tensor-parallel size."""
        if (size := parallel_state.get_tensor_model_parallel_size()) != self._size:
            raise ValueError(
                f"{type(self).__name__} was sharded over {self._size} ranks, and there are {size} "
                "now: build the model after initialize_model_parallel"
            )

    def _rows(self, sizes: tuple[int, ...], pad: bool = False, multiple: int = 1) -> Partition:
        """The rows of concatenated matrices, sharded; with `pad` zeros behind them make each rank's
        share a multiple of `multiple`.
        """
        if not pad:
            return Partition(0, sizes, self._size)
        zeros = padding_of(sum(sizes), self._size, multiple)
        return Partition(0, sizes, self._size, pad=zeros, multiple=multiple)

    def _declare(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        partition: Partition | None = None,
        **marks,
    ) -> None:
        """Registers an empty parameter, the shard of a full tensor of `shape`, with its marks; None
        for no shape.
        """
        if shape is None:
            self.register_parameter(name, None)
            return
        local = list(shape)
        if partition is not None:
            local[partition.dim] = sum(partition.local_sizes)
        parameter = nn.Parameter(torch.empty(local, device=self._device, dtype=self._dtype))
        mark_partition(parameter, partition)
        vars(parameter).update(marks)
        self.register_parameter(name, parameter)

    def _full(self, name: str) -> torch.Tensor:
        """Room for the full tensor of a parameter, on the host, in float32 at least."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        return torch.empty(full_shape(getattr(self, name)), dtype=dtype, device="cpu")

    @torch.no_grad()
    def _keep(self, name: str, full: torch.Tensor) -> None:
        """Sets a parameter to this rank's shard of the full tensor."""
        parameter = getattr(self, name)
        partition = partition_of(parameter)
        parameter.copy_(full if partition is None else partition.shard(full, self._rank))

    @torch.no_grad()
    def draw_(self, name: str, init: InitMethod) -> None:
        """Initialises a parameter anew: `init` fills the full tensor, this rank keeps its shard."""
        full = self._full(name)
        init(full)
        self._keep(name, full)

    def _initialize(self) -> None:
        if self._device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights."""
        raise NotImplementedError


def materialize(
    model: nn.Module, device: torch.device | str, initialize: Callable[[nn.Module], object]
) -> None:
    """Gives a model built on the meta device its memory on `device` and its initial weights, one
    module after the other.

    A rank never holds more than its own shards and one full weight. With one seed the weights are
    those of a model built on `device` at once, if its modules are constructed in the order in which
    `model.modules()` lists them.

    Args:
        initialize: fills the parameters and buffers of a module, not of its children.
    """

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    def fill() -> None:
        for module in model.modules():
            own = (*module._parameters.values(), *module._buffers.values())
            if any(tensor is not None and tensor.is_meta for tensor in own):
                module._apply(allocate, recurse=False)
                initialize(module)

    keep_ties_and_marks(model, fill)
