"""Gradients between backward and the optimizer: averaged over replicas, summed where a rank saw a
part, clipped.

The order within a step is: sum the gradients of sequence-parallel regions over the tensor-parallel
group, average over the data-parallel group, clip, step. Names are those of
`neuronx_distributed.parallel_layers.grads`. Nothing here reads a value back to the host, so that a
step can be traced.
"""

import math
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
    grads_list: Iterable[torch.Tensor],
    *,
    groups: comm.Groups = None,
    bucket_cap_mb: float | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Averages gradients over the data-parallel replicas, in place.

    Args:
        grads_list: the same on every replica; see `fill_missing_gradients` where one of them may
            lack a gradient.
        groups: the replicas; by default the data-parallel group.
        bucket_cap_mb: size of one all-reduce, see `buckets_of`.
        reduce_dtype: e.g. float32, to average bfloat16 gradients with one rounding.
    """
    groups = groups or parallel_state.get_data_parallel_replica_groups()
    size = parallel_state.axis_of(groups).size
    # Backward makes the last layer's gradients first.
    all_reduce_bucketed(list(grads_list)[::-1], groups, 1.0 / size, bucket_cap_mb, reduce_dtype)


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


def _shares(
    parameter: torch.Tensor, grad: torch.Tensor, force_spmd: bool
) -> Iterable[tuple[torch.Tensor, float]]:
    """Cuts a gradient into (part, share): of its powers this rank adds that share to the sum over
    tensor parallel.
    """
    if not is_tensor_parallel(parameter):
        if force_spmd:
            yield grad, 1.0 / parallel_state.get_tensor_model_parallel_size()
        elif parallel_state.get_tensor_model_parallel_rank() == 0:
            yield grad, 1.0
        return
    parts = getattr(parameter, "num_partitions", -1)
    size = parallel_state.get_tensor_model_parallel_size()
    if parts not in (-1, size):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is sharded over {parts} ranks, and the "
            f"norm is taken over the {size} of a tensor-parallel group"
        )
    shared = getattr(parameter, "kv_shared_numel", 0)
    if shared == 0:
        yield grad, 1.0
        return
    flat = grad.reshape(-1)
    own = flat.numel() - shared
    if own:
        yield flat[:own], 1.0
    yield flat[own:], 1.0 / parallel_state.get_kv_shared_group_size()


@torch.no_grad()
def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float | int = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: comm.Groups = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """The norm of all gradients of the model as if they lay on one device, bitwise equal on all
    ranks that share it.

    A sharded parameter counts on each tensor-parallel rank, a replicated one once, one shared by a
    kv group once in that group, a tied one once, and one marked `shared` or without a gradient not
    at all. Summed over the tensor-parallel group; over data parallel the gradients
    are taken to be averaged already.

    Args:
        parameters: any iterable of parameters, or one.
        norm_type: p of the p-norm; `inf` for the largest magnitude.
        zero1_optimizer: `parameters` are shards of ZeRO-1, so sum over those who hold the other
            shards too.
        zero1_optimizer_groups: who they are; by default the data-parallel group.
        force_spmd: count a replicated parameter as 1/T on each rank, the same program everywhere;
            otherwise whole, on rank 0 alone.

    Returns:
        A scalar tensor on the parameters' device, in float32 or, for such gradients, float64.

    Raises:
        ValueError: `zero1_optimizer_groups` without `zero1_optimizer`, a `norm_type` that is not
            above 0, or a parameter that is cut over another number of ranks than tensor-parallel
            groups have.
    """
    if zero1_optimizer_groups is not None and not zero1_optimizer:
        raise ValueError("zero1_optimizer_groups was given, but zero1_optimizer is False")
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type {norm_type} is not above 0")
    parameters = _distinct(parameters)
    counted = [p for p in parameters if p.grad is not None and not getattr(p, "shared", False)]
    grads, shares = [], []
    for parameter in counted:
        for grad, share in _shares(parameter, parameter.grad.detach(), force_spmd):
            if grad.numel():
                grads.append(grad)
                shares.append(share)
    wide = any(p.grad.dtype == torch.float64 for p in counted)
    dtype = torch.float64 if wide else torch.float32
    if grads:
        norms = torch.stack(
            [norm.to(dtype) for norm in torch._foreach_norm(grads, norm_type, dtype)]
        )
    else:
        norms = torch.zeros(1, dtype=dtype, device=parameters[0].device if parameters else "cpu")
        shares = [1.0]
    groups = [parallel_state.get_tensor_model_parallel_replica_groups()]
    if zero1_optimizer:
        groups.append(zero1_optimizer_groups or parallel_state.get_data_parallel_replica_groups())
    if math.isinf(norm_type):
        total = norms.max()
        for group in groups:  # gathered, as a NaN is lost in gloo's maximum
            total = comm.all_gather(total[None], 0, group).max()
        return total
    total = (norms.pow(norm_type) * torch.tensor(shares, dtype=dtype, device=norms.device)).sum()
    for group in groups:
        total = comm.all_reduce("sum", total, group)
    return total.pow(1.0 / norm_type)


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
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | int,
    norm_type: float | int = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: comm.Groups = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """Clips the gradients of the whole model, in place, to a norm of `max_norm` and returns the
    norm before.

    See `get_grad_norm` for the arguments and for what is counted, `clip_coefficient` for
    `max_norm`: one above the norm leaves every gradient bitwise as it was. Every rank of the
    tensor-parallel group has to call it.
    """
    parameters = _distinct(parameters)
    total_norm = get_grad_norm(
        parameters, norm_type, zero1_optimizer, zero1_optimizer_groups, force_spmd
    )
    clip_grads_with_norm(parameters, total_norm, max_norm)
    return total_norm
