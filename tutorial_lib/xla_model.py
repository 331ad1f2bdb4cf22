"""What the tutorials call on `torch_xla.core.xla_model`, on every backend: `import
tutorial_lib.xla_model as xm`.
"""

import torch
import torch.distributed as dist

from tutorial_lib import backends
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.grads import bucket_allreduce_gradients, fill_missing_gradients

mark_step, xla_device = backends.mark_step, backends.get_device


def master_print(*args, **kwargs) -> None:
    """Prints on global rank 0."""
    if parallel_state.is_global_rank_zero():
        print(*args, **kwargs)


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: comm.Groups = None) -> None:
    """Averages the gradients of an optimizer's parameters over the groups, in a few large
    all-reduces.

    The sum is divided by the size of the group. torch-xla divides by that of the world, so that its
    result is too small by the tensor-parallel degree.

    Args:
        groups: `parallel_state.get_data_parallel_group(as_list=True)`; by default the world.

    Raises:
        ValueError: the default, where tensor parallelism is on: it would average parts of different
            weights.
    """
    if groups is None:
        tp = parallel_state.get_tensor_model_parallel_size()
        if tp > 1:
            raise ValueError(
                f"groups is None, which averages over all {dist.get_world_size()} ranks, and "
                f"tensor-parallel groups of {tp} hold different weights: pass "
                "groups=parallel_state.get_data_parallel_group(as_list=True)"
            )
        groups = parallel_state.get_world_group()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fill_missing_gradients(parameters, groups)
    bucket_allreduce_gradients([p.grad for p in parameters if p.grad is not None], groups=groups)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict | None = None,
    groups: comm.Groups = None,
    pin_layout: bool = True,
):
    """Averages the gradients over the groups (`reduce_gradients`), steps the optimizer and ends the
    traced step.

    Args:
        barrier, pin_layout: accepted for torch-xla's sake; the step is ended in any case.
        optimizer_args: for `optimizer.step`.

    Returns:
        What `optimizer.step` does.
    """
    reduce_gradients(optimizer, groups)
    loss = optimizer.step(**(optimizer_args or {}))
    mark_step()
    return loss
