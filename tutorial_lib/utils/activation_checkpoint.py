"""Activation checkpointing: a module keeps only its inputs, and runs its forward again when
backward needs the rest.

Names are those of `neuronx_distributed.utils.activation_checkpoint`. Unlike there, a recomputed
forward draws the random numbers that the first one drew, from every stream, so results are bit for
bit those without checkpointing.
"""

from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper

from tutorial_lib.parallel_layers.recompute import checkpoint


class NxDCheckpointWrapper(torch_wrapper.CheckpointWrapper):
    """Runs the wrapped module under checkpointing; the names of parameters and modules stay what
    they were.
    """

    def named_modules(
        self, memo=None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside, under the names they had before they were wrapped."""
        yield from self._checkpoint_wrapped_module.named_modules(memo, prefix, remove_duplicate)


def checkpoint_wrapper(module: nn.Module) -> NxDCheckpointWrapper:
    """`module`, recomputing its activations in backward."""
    return NxDCheckpointWrapper(module, checkpoint_fn=checkpoint)


def apply_activation_checkpointing(model: nn.Module, check_fn: Callable[[nn.Module], bool]) -> None:
    """Wraps each module inside `model` that `check_fn` picks, in place; not `model` itself."""
    torch_wrapper.apply_activation_checkpointing(model, checkpoint_wrapper, check_fn)
