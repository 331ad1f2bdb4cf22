"""How many bytes a rank holds: weights, gradients, optimizer state, saved activations."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tutorial_lib.backends import on_trainium

# Bytes for each rank on Trainium: of a NeuronCore of trn1, and of the two of trn2 that are one
# logical core (the vendor's guide "Best practices for training on AWS Neuron").
TRAINIUM_CORE = {"xla": 16 * 2**30, "neuron": 24 * 2**30}


def require_memory(
    bytes_per_rank: int, local_ranks: int, backend: str, report: Callable[[], object] | None = None
) -> None:
    """Refuses a training that this machine cannot hold, before anything is allocated.

    Args:
        bytes_per_rank: weights, gradients, optimizer state and activations of one rank.
        local_ranks: ranks on this machine. On `cpu`, and on `xla` without Trainium, they share its
            memory.
        backend: on `cuda` and on Trainium each rank has a device of its own. A NeuronCore is not
            asked what is free: its published size counts.
        report: what the error shows besides, such as `lambda: dry_run(run)`; only called if the
            training does not fit.

    Raises:
        ValueError: it does not fit, with the bytes and the report.
    """
    if backend == "cuda":
        available, where = torch.cuda.mem_get_info()[0], "are free on the GPU"
    elif on_trainium(backend):
        available, where = TRAINIUM_CORE[backend], "are on a NeuronCore"
    else:
        available = psutil.virtual_memory().available // local_ranks
        where = f"are free for each of {local_ranks} ranks here"
    if bytes_per_rank > available:
        message = f"a rank needs at least {bytes_per_rank:,} bytes, and {available:,} {where}"
        raise ValueError(
            message if report is None else f"{message}. What it would be:\n\n{report()}"
        )


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct tensors: one that is listed twice (tied weights) counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of this rank's parameters."""
    return tensor_bytes(model.parameters())


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)


def optimizer_bytes(optimizer) -> int:
    """Bytes of every tensor that the optimizer keeps: moments, step counters, and with ZeRO-1 this
    rank's shard of the weights.

    Args:
        optimizer: PyTorch's, `NeuronZero1Optimizer`, or an `NxDOptimizer` around either.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    sharded = getattr(optimizer, "base_optimizer", None)
    held = list((sharded or optimizer).state.values())
    if sharded is not None:
        held += [group["params"] for group in sharded.param_groups]
    return tensor_bytes(leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor))


class Saved(NamedTuple):
    """One tensor that autograd keeps for the backward pass."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class SavedActivations(saved_tensors_hooks):
    """Lists what autograd saves inside the block: each distinct piece of memory once, parameters
    and `exclude` not.

        with SavedActivations(model) as saved:
            loss = model(**batch).loss
        saved.nbytes

    Args:
        model: its parameters and buffers are held anyway and do not count.
        exclude: further tensors that are held anyway, such as the batch.
    """

    def __init__(self, model: nn.Module, exclude: Iterable[torch.Tensor] = ()):
        held = [*model.parameters(), *model.buffers(), *exclude]
        self._held = {self._memory(tensor) for tensor in held}
        self._found: dict[object, Saved] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def tensors(self) -> list[Saved]:
        return list(self._found.values())

    @property
    def nbytes(self) -> int:
        return sum(saved.nbytes for saved in self._found.values())

    def __enter__(self) -> "SavedActivations":
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._memory(tensor)
        if key not in self._held and key not in self._found:
            self._found[key] = Saved(tuple(tensor.shape), tensor.dtype, self._size(tensor))
        return tensor.detach()  # an output that refers to its graph would keep it, and itself

    @staticmethod
    def _memory(tensor: torch.Tensor) -> object:
        """The same for all views of one memory."""
        if tensor.device.type == "xla":
            import torch_xla

            return torch_xla._XLAC._xla_get_tensor_id(tensor)
        return tensor.untyped_storage()._cdata

    @staticmethod
    def _size(tensor: torch.Tensor) -> int:
        """Bytes kept: a view keeps all its memory."""
        if tensor.device.type == "xla":
            return tensor.numel() * tensor.element_size()
        return tensor.untyped_storage().nbytes()
