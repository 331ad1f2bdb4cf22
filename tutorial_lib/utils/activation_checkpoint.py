"""Activation checkpointing: a module keeps its inputs alone, and runs its forward again when
backward needs the rest.

Names are those of `neuronx_distributed.utils.activation_checkpoint`. Unlike there a recomputed
forward draws the random numbers that the first one drew, from every stream, so that results are bit
for bit those without checkpointing.
"""

from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

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


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable = checkpoint,
    **checkpoint_fn_kwargs,
) -> NxDCheckpointWrapper:
    """`module`, recomputing its activations in backward.

    Args:
        checkpoint_impl: only `NO_REENTRANT`: the older kind neither replays every random stream nor
            sees keyword inputs.
        checkpoint_fn: called as `checkpoint_fn(module, *inputs, **checkpoint_fn_kwargs)`.

    Raises:
        ValueError: the reentrant implementation.
    """
    if checkpoint_impl is not CheckpointImpl.NO_REENTRANT:
        raise ValueError(
            f"checkpoint_impl {checkpoint_impl} is not {CheckpointImpl.NO_REENTRANT}, the only one"
        )
    return NxDCheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
) -> None:
    """Wraps each module inside `model` that `check_fn` picks, in place; not `model` itself."""
    torch_wrapper.apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper_fn, check_fn=check_fn
    )
