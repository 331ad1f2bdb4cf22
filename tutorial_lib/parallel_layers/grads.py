"""Gradients between backward and the optimizer: averaged over replicas, summed where a rank saw a
part, clipped.

The order within a step is: sum the gradients of sequence-parallel regions over the tensor-parallel
group, average over the data-parallel group, clip, step. Names are those of
`neuronx_distributed.parallel_layers.grads`. Nothing here reads a value back to the host, so that a
step can be traced.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import comm, parallel_state
from .buckets import all_reduce_bucketed
from .marks import is_tensor_parallel


def _distinct(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter once, however many names it has. A generator is consumed."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return list({id(p): p for p in parameters}.values())


def bucket_allreduce_gradients(
    grads_list: Iterable[torch.Tensor], *, groups: comm.Groups = None
) -> None:
    """Averages gradients over the data-parallel replicas, in place.

    Args:
        grads_list: the same on every replica; see `fill_missing_gradients` where one of them may
            lack a gradient.
        groups: the replicas; by default the data-parallel group.
    """
    groups = groups or parallel_state.get_data_parallel_replica_groups()
    scale = 1.0 / parallel_state.axis_of(groups).size
    # Backward makes the last layer's gradients first.
    all_reduce_bucketed(list(grads_list)[::-1], groups, scale)


class _WidelyAccumulated(nn.Parameter):
    """A parameter whose `grad` may have a wider dtype than the parameter, which torch 2.9 allows
    only when the data of an existing gradient is replaced.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None or value.dtype == self.dtype:
            torch.Tensor.grad.__set__(self, value)
        else:
            torch.Tensor.grad.__set__(self, value.to(self.dtype))
            self.grad.data = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def wide_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What is precise enough to add many small numbers to: float32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def accumulate_widely(parameter: torch.Tensor) -> RemovableHandle:
    """Lets backward add up the micro-batches' gradients of a parameter in its `wide_dtype`.

    `parameter.grad` is then a tensor of this dtype, from the first micro-batch on, and stays the
    only gradient: what clears, scales or replaces it has its usual effect.

    Returns:
        A handle; its `remove()` ends this.
    """

    def widen(p: torch.Tensor) -> None:
        p.grad.data = p.grad.data.to(wide_dtype(p))

    if type(parameter) is nn.Parameter:
        parameter.__class__ = _WidelyAccumulated
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one takes no hook, and may be trained later
    handle = parameter.register_post_accumulate_grad_hook(widen)
    parameter.requires_grad_(trained)
    return handle


def fill_missing_gradients(parameters: Iterable[torch.Tensor], groups: comm.Groups) -> None:
    """Gives a zero gradient to a parameter that has none here but has one on another rank of the
    group, and every gradient the widest dtype that it has on a rank.

    So the ranks agree on what they reduce, whatever part of the model each one's batch went
    through. One small exchange between the hosts.
    """
    axis = parallel_state.axis_of(groups)
    if axis.size == 1:
        return
    parameters = _distinct(parameters)
    have = [0 if p.grad is None else p.grad.element_size() for p in parameters]
    anywhere = torch.tensor(have, dtype=torch.uint8, device="cpu")
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=axis.group)
    for parameter, mine, widest in zip(parameters, have, anywhere.tolist()):
        if mine == widest:
            continue
        dtype = {4: torch.float32, 8: torch.float64}.get(widest, parameter.dtype)
        if mine:
            parameter.grad = parameter.grad.to(dtype)
        else:
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)


def allreduce_sequence_parallel_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sums the gradients of parameters marked `sequence_parallel_enabled` over the tensor-parallel
    group, in place.

    Each rank ran these parameters (norms, biases after a reduce-scatter) on its part of the
    sequence, so each holds a part of the gradient (Korthikanti et al., 2022, section 4.2.2). Call
    it once before the optimizer steps, not once a micro-batch: a second call would sum the sums.
    """
    parameters = _distinct(p for group in optimizer.param_groups for p in group["params"])
    marked = [p for p in parameters if getattr(p, "sequence_parallel_enabled", False)]
    groups = parallel_state.get_tensor_model_parallel_replica_groups()
    if marked:
        fill_missing_gradients(marked, groups)
    all_reduce_bucketed([p.grad for p in marked if p.grad is not None], groups)


# --- norm and clipping ----------------------------------------------------------------------------


def _shares(parameter: torch.Tensor, grad: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
    """Splits a gradient into `(part, share)`: this rank adds that share of the part's squares to
    the sum over tensor parallel.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    if not is_tensor_parallel(parameter):
        return [(grad, 1.0 / size)]
    parts = getattr(parameter, "num_partitions", -1)
    if parts not in (-1, size):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is sharded over {parts} ranks, and the "
            f"norm is taken over the {size} of a tensor-parallel group"
        )
    shared = getattr(parameter, "kv_shared_numel", 0)
    if not shared:
        return [(grad, 1.0)]
    own, copies = grad.reshape(-1).split([grad.numel() - shared, shared])
    return [(own, 1.0), (copies, 1.0 / parallel_state.get_kv_shared_group_size())]


@torch.no_grad()
def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], sharding_groups: comm.Groups = None
) -> torch.Tensor:
    """The Euclidean norm of all gradients of the model as if they lay on one device, bitwise equal
    on all ranks that share it.

    A sharded parameter counts on each tensor-parallel rank, a replicated one once, one shared by a
    kv group once in that group, a tied one once, and one without a gradient not at all. Summed over
    the tensor-parallel group; over data parallel the gradients are taken to be averaged already.

    Args:
        parameters: any iterable of parameters, or one.
        sharding_groups: `parameters` are the shards that ZeRO-1 makes over these groups, so the sum
            is over them too.

    Returns:
        A scalar tensor on the parameters' device, in float32 or, for such gradients, float64.

    Raises:
        ValueError: a parameter that is sharded over another number of ranks than tensor-parallel
            groups have.
    """
    parameters = _distinct(parameters)
    counted = [p for p in parameters if p.grad is not None]
    parts = [part for p in counted for part in _shares(p, p.grad.detach()) if part[0].numel()]
    if not parts:
        parts = [(torch.zeros(1, device=parameters[0].device if parameters else "cpu"), 1.0)]
    grads, shares = zip(*parts)
    wide = any(grad.dtype == torch.float64 for grad in grads)
    dtype = torch.float64 if wide else torch.float32
    norms = torch.stack([norm.to(dtype) for norm in torch._foreach_norm(grads, 2.0, dtype)])
    total = (norms.pow(2.0) * torch.tensor(shares, dtype=dtype, device=norms.device)).sum()
    total = comm.all_reduce("sum", total)
    if sharding_groups is not None:
        total = comm.all_reduce("sum", total, sharding_groups)
    return total.pow(0.5)


def clip_coefficient(total_norm: torch.Tensor, max_norm: float | int) -> torch.Tensor:
    """What gradients of norm `total_norm` are multiplied by: `max_norm / (total_norm + 1e-6)`, as
    in torch, and 1 if that is not below 1. NaN where the norm is NaN.

    Raises:
        ValueError: a `max_norm` that is not above 0; infinity clips nothing.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm} is not above 0")
    return (float(max_norm) / (total_norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grads_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    total_norm: torch.Tensor,
    max_norm: float | int,
) -> None:
    """Scales all gradients in place so that a norm of `total_norm` becomes at most `max_norm`."""
    coefficient = clip_coefficient(total_norm, max_norm)
    grads = [p.grad.detach() for p in _distinct(parameters) if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, coefficient)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float | int
) -> torch.Tensor:
    """Clips the gradients of the whole model, in place, to a norm of `max_norm` and returns the
    norm before.

    See `get_grad_norm` for what is counted, `clip_coefficient` for `max_norm`: one above the norm
    leaves every gradient bitwise as it was. Every rank of the tensor-parallel group has to call it.
    """
    parameters = _distinct(parameters)
    total_norm = get_grad_norm(parameters)
    clip_grads_with_norm(parameters, total_norm, max_norm)
    return total_norm
