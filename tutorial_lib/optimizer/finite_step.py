"""A step is taken on all ranks with finite gradients, or on none.

The norm of all gradients is inf or NaN where one element of any rank is, and every rank has the
same norm, so no further communication is needed to agree. A step that is left out changes neither
weights nor the optimizer's state, and is counted. (Micikevicius et al., 2018, section 3.2, who skip
and count in the same way.)
"""

import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from tutorial_lib.parallel_layers.ranks import gather


def check_finite(norm: torch.Tensor, param_groups: list[dict]) -> torch.Tensor:
    """Whether a step may be taken, a 0-d tensor: for `update_where`. Where the norm is not traced,
    rank 0 warns of a step that is left out.

    Args:
        norm: of all gradients of the model, the same on every rank; a 0-d tensor.
        param_groups: the parameters whose gradients make up the norm, to name the culprits.
    """
    finite = norm.isfinite()
    if norm.device.type not in ("xla", "meta") and not finite:
        names = sorted(set().union(*gather(_nonfinite(param_groups))))
        culprits = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        why = f"not finite are those of {culprits}" if names else "their sum overflows"
        if dist.get_rank() == 0:
            warnings.warn(
                f"the norm of the gradients is {norm.item()}: {why}; the step is left out on all "
                "ranks",
                stacklevel=4,
            )
    return finite


@torch.no_grad()
def update_where(
    finite: torch.Tensor,
    update: Callable[[], object],
    optimizer: torch.optim.Optimizer,
    weights: Iterable[torch.Tensor] = (),
) -> None:
    """Calls `update` if `finite` is true.

    Where the value is traced (XLA), nothing is known before the step has ended: there the update is
    always computed, and the graph selects what was before it. A field of the optimizer's state that
    a first step creates is then zero. A step count that an optimizer keeps on the host, as
    `torch.optim.AdamW` does, counts such steps too.

    Args:
        update: changes the parameters and the state of `optimizer`, and `weights`. It may contain
            collectives, although torch-xla, to order them, adds 0 times the result of each to the
            input of the next, so that after a NaN all results are NaN.
    """
    if finite.device.type == "xla":
        weights = list(weights)
        before = {key: tensor.clone() for key, tensor in _tensors(optimizer, weights).items()}
        update()
        for key, tensor in _tensors(optimizer, weights).items():
            tensor.copy_(torch.where(finite, tensor, before.get(key, torch.zeros_like(tensor))))
    elif finite.is_meta or finite:
        update()


def _nonfinite(param_groups: list[dict]) -> list[str]:
    """The parameters whose gradient on this rank is not finite: their names, or their places in the
    groups.
    """
    found = []
    for number, group in enumerate(param_groups):
        places = [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
        names = group.get("param_names", places)
        for name, parameter in zip(names, group["params"]):
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                found.append(f"{name} of shape {tuple(parameter.shape)}")
    return found


def _tensors(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> dict:
    """The weights, the optimizer's parameters with a gradient, and the state that lies where these
    are.
    """
    found = {(weight, None): weight for weight in weights}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                found[parameter, None] = parameter
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.device == parameter.device:
                        found[parameter, name] = value
    return found
