"""What all layers with sharded parameters share: initial weights the same at every degree, and the
marks.
"""

from collections.abc import Callable

import torch
from torch import nn

from . import parallel_state
from .sharding import Partition
from .utils import PARAMETER_MARKS, KeepsParameterMarks, set_tensor_model_parallel_attributes


class ShardedModule(KeepsParameterMarks, nn.Module):
    """A module whose parameters are cut over a group of ranks, and know how.

    A subclass draws each full tensor on the host, from the default generator, in the order of the
    plain module, and keeps its own part. So with one seed they are bitwise those of the plain
    module, at every degree. On `device="meta"` nothing is drawn nor allocated; `materialize` does
    it later.
    """

    def __init__(self, device: torch.device | str | None, dtype: torch.dtype, group):
        super().__init__()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_fallback_parallel_state()
        # Lists of ranks, as a process group can be neither copied nor pickled.
        self.groups = None if group is None else parallel_state.axis_of(group).replica_groups
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._dtype = dtype
        self._partitions: dict[str, Partition] = {}

    @property
    def tensor_parallel_group(self):
        """The process group that the parameters are cut over."""
        return parallel_state.axis_of(self.groups).group

    @property
    def _size(self) -> int:
        return parallel_state.axis_of(self.groups).size

    @property
    def _rank(self) -> int:
        return parallel_state.axis_of(self.groups).rank

    def _check_mesh(self) -> None:
        """Raises ValueError if the mesh has been built anew, with groups of another size."""
        parts = next(iter(self._partitions.values())).parts
        if parts != self._size:
            raise ValueError(
                f"{type(self).__name__} was cut over {parts} ranks, and the group has {self._size} now: "
                "build the model after initialize_model_parallel"
            )

    def _declare(
        self, name: str, shape: tuple[int, ...], partition: Partition | None = None, **marks
    ):
        """Registers an empty parameter for the full tensor of `shape`, cut by `partition`, with its
        marks.
        """
        local = list(shape)
        if partition is not None:
            local[partition.dim] = sum(partition.local_sizes)
            self._partitions[name] = partition
            if partition.pad:
                marks["pad_size"] = partition.pad
            if partition.multiple > 1:
                marks["pad_multiple"] = partition.multiple
            if any(r > 1 for r in partition.replicas) or len(set(partition.sizes)) > 1:
                marks["partition_sizes"] = partition.sizes
                marks["partition_replicas"] = partition.replicas
        parameter = nn.Parameter(torch.empty(local, device=self._device, dtype=self._dtype))
        if partition is None:
            set_tensor_model_parallel_attributes(parameter, False, -1, 1)
        else:
            order = None if partition.order is None else list(partition.order)
            stride = 1 if "partition_sizes" in marks else len(partition.sizes)
            set_tensor_model_parallel_attributes(
                parameter, True, partition.dim, stride, partition.parts, order
            )
        self.register_parameter(name, parameter)
        assert set(marks) <= set(PARAMETER_MARKS), marks
        vars(parameter).update(marks)

    def _draw(self, shape: tuple[int, ...], init: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """A full tensor with its initial values, on the host, in float32 at least."""
        full = torch.empty(
            shape, dtype=torch.promote_types(self._dtype, torch.float32), device="cpu"
        )
        with torch.no_grad():
            init(full)
        return full

    def _keep(self, name: str, full: torch.Tensor) -> None:
        """Sets a parameter to this rank's part of the full tensor."""
        partition = self._partitions.get(name)
        part = full if partition is None else partition.shard(full, self._rank)
        with torch.no_grad():
            getattr(self, name).copy_(part)

    def draw_(self, name: str, init: Callable[[torch.Tensor], object]) -> None:
        """Initialises the parameter `name` anew: `init` fills the full tensor in place, this rank
        keeps its part.
        """
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

    def preshard_hook(self, model_state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        """Puts the padding behind this module's tensors in a full state dict.

        Args:
            prefix: of this module's keys; the key of its weight does as well.
        """
        prefix = prefix.removesuffix("weight")
        for name, partition in self._partitions.items():
            model_state_dict[prefix + name] = partition.padded(model_state_dict[prefix + name])


def materialize(
    model: nn.Module,
    device: torch.device | str,
    initialize: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Gives a model built on the meta device its memory on `device` and its initial weights, one
    module after the other.

    A rank never holds more than its own parts and one full weight. With one seed the weights are
    those of a model built on `device` at once, if its modules are constructed in the order in which
    `model.modules()` lists them.

    Args:
        initialize: fills the parameters and buffers of a module, not of its children; by default
            `reset_parameters`.

    Raises:
        ValueError: a module with parameters or buffers on the meta device has no
            `reset_parameters`.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied parameters stay tied
    for name, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        own = {key: tensor for key, tensor in own.items() if tensor is not None and tensor.is_meta}
        if not own:
            continue
        if initialize is None and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is on meta and has no reset_parameters"
            )
        module._apply(
            lambda t: torch.empty_like(t, device=device) if t.is_meta else t, recurse=False
        )
        module.reset_parameters() if initialize is None else initialize(module)
        for key, before in own.items():
            _, first = replaced.setdefault(id(before), (before, getattr(module, key)))
            # A tied parameter may stand first in a module that knows no marks.
            vars(first).update(vars(before))
            setattr(module, key, first)
    return model
