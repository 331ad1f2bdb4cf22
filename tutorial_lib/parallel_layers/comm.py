"""The collectives, each a pure function: no input is modified, on any backend.

The device of a tensor decides how it is sent: host and CUDA tensors go through `torch.distributed`
(gloo, NCCL) at once; XLA tensors are traced into the graph with their replica groups, as a compiler
for Trainium needs them; tensors on the meta device, which hold no values, are not sent, and the
result has the right shape (so the planner's dry run works). Names are those of
`neuronx_distributed.parallel_layers.comm`, whose functions write into their arguments; these do not
take an `output`, a list of tensors, or `shard_count` and `pin_layout`, which follow from the group.
"""

import builtins
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from . import parallel_state
from .recording import Collective as Collective
from .recording import count as count
from .recording import note
from .recording import record as record

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
Groups = dist.ProcessGroup | parallel_state.ReplicaGroups | None
_LARGE = 1 << 18  # bytes from which an all-gather on gloo is faster as broadcasts


def _dimension(tensor: torch.Tensor, dim: int) -> int:
    """`dim` counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


class Pending:
    """A collective under way: `wait()` returns its result, once."""

    def __init__(
        self,
        result: torch.Tensor,
        works: Sequence[dist.Work] = (),
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self._result, self._works, self._finish = result, works, finish

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        result = self._result if self._finish is None else self._finish(self._result)
        self._result, self._works, self._finish = None, (), None
        return result


def _operation(op_type: str) -> dist.ReduceOp:
    if op_type not in _OPS:
        raise ValueError(f"reduction {op_type!r} is not one of {', '.join(_OPS)}")
    return _OPS[op_type]


def all_reduce_start(
    op_type: str, tensor: torch.Tensor, groups: Groups = None, reuse: bool = False
) -> Pending:
    """Begins an all-reduce that may overlap with computation; see `all_reduce`.

    Args:
        reuse: the caller gives `tensor` up, and its memory may hold the result: saves a copy.
    """
    operation = _operation(op_type)
    tensor = tensor.detach()  # gradients are the mappings' business
    axis = parallel_state.axis_of(groups)
    if axis.size == 1:
        return Pending(tensor if reuse else tensor.clone())
    note("all_reduce", axis, tensor)
    if tensor.device.type == "xla":
        import torch_xla.core.xla_model as xm

        return Pending(xm.all_reduce(op_type, tensor, groups=axis.replica_groups, pin_layout=False))
    if tensor.is_meta:
        return Pending(torch.empty_like(tensor, memory_format=torch.contiguous_format))
    if not (reuse and tensor.is_contiguous()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return Pending(tensor, [dist.all_reduce(tensor, operation, axis.group, async_op=True)])


def all_reduce(op_type: str, tensor: torch.Tensor, groups: Groups = None) -> torch.Tensor:
    """The sum (`max`, `min`) of `tensor` over the group, bitwise equal on all its ranks.

    Args:
        op_type: `sum`, `max` or `min`. For the last two, NaN propagation depends on the backend.
        tensor: the same shape on every rank.
        groups: a process group of `parallel_state` or its replica groups; by default the
            tensor-parallel one.

    Raises:
        ValueError: an unknown `op_type` or group.
    """
    return all_reduce_start(op_type, tensor, groups).wait()


def all_gather_start(
    tensor: torch.Tensor, dim: int = 0, groups: Groups = None, out: torch.Tensor | None = None
) -> Pending:
    """Begins an all-gather that may overlap with computation; see `all_gather`.

    Args:
        out: contiguous memory for the result, with `dim` 0: saves a copy.
    """
    tensor, dim = tensor.detach(), _dimension(tensor, dim)
    axis = parallel_state.axis_of(groups)
    place = None if out is None else out.copy_
    if axis.size == 1:
        return Pending(tensor.clone(), finish=place)
    note("all_gather", axis, tensor)
    if tensor.device.type == "xla":
        import torch_xla.core.xla_model as xm

        gathered = xm.all_gather(tensor, dim=dim, groups=axis.replica_groups, pin_layout=False)
        return Pending(gathered, finish=place)
    if tensor.is_meta:
        return Pending(_resized(tensor, dim, axis.size * tensor.size(dim)), finish=place)
    tensor = tensor.contiguous()
    gathered = _resized(tensor, 0, axis.size * tensor.size(0)) if out is None else out
    if tensor.device.type == "cpu" and tensor.nbytes >= _LARGE:
        works = _all_gather_of_gloo(gathered, tensor, axis)
    else:
        works = [dist.all_gather_into_tensor(gathered, tensor, group=axis.group, async_op=True)]
    if dim == 0:
        return Pending(gathered, works)
    return Pending(gathered, works, lambda result: torch.cat(result.chunk(axis.size), dim=dim))


def _all_gather_of_gloo(gathered: torch.Tensor, tensor: torch.Tensor, axis) -> list[dist.Work]:
    """One broadcast from each rank, all at once: for large tensors twice as fast as gloo's own."""
    chunks = gathered.chunk(axis.size)
    chunks[axis.rank].copy_(tensor)
    return [
        dist.broadcast(chunk, rank, group=axis.group, async_op=True)
        for chunk, rank in zip(chunks, axis.ranks)
    ]


def all_gather(tensor: torch.Tensor, dim: int = 0, groups: Groups = None) -> torch.Tensor:
    """The tensors of all ranks of the group, concatenated along `dim` in rank order.

    Args:
        tensor: the same shape on every rank, at least one dimension.
        dim: the dimension to concatenate along.
        groups: as for `all_reduce`.

    Raises:
        ValueError: an unknown group, or a dimension that the tensor does not have.
    """
    return all_gather_start(tensor, dim, groups).wait()


def reduce_scatter_start(
    reduce_type: str,
    tensor: torch.Tensor,
    scale: float = 1.0,
    scatter_dim: int = 0,
    groups: Groups = None,
    reuse: bool = False,
) -> Pending:
    """Begins a reduce-scatter that may overlap with computation; see `reduce_scatter`, and
    `all_reduce_start` for `reuse`.
    """
    operation = _operation(reduce_type)
    tensor, scatter_dim = tensor.detach(), _dimension(tensor, scatter_dim)
    axis = parallel_state.axis_of(groups)
    if tensor.size(scatter_dim) % axis.size:
        raise ValueError(
            f"dimension {scatter_dim} of size {tensor.size(scatter_dim)} is not divisible by the "
            f"group's size {axis.size}"
        )
    if axis.size == 1:
        return Pending(tensor * scale if scale != 1.0 else tensor if reuse else tensor.clone())
    note("reduce_scatter", axis, tensor)
    if tensor.device.type == "xla":
        import torch_xla.core.xla_model as xm

        options = dict(groups=axis.replica_groups, pin_layout=False)
        return Pending(
            xm.reduce_scatter(reduce_type, tensor, scale, scatter_dim, axis.size, **options)
        )
    if tensor.is_meta:
        return Pending(_resized(tensor, scatter_dim, tensor.size(scatter_dim) // axis.size))
    # The chunks have to be contiguous.
    source = tensor.movedim(scatter_dim, 0).contiguous()
    combine = _COMBINE[reduce_type] if tensor.device.type == "cpu" else None
    if combine:  # gloo's own reduces all chunks on all ranks
        chunks, works = _exchange(source.chunk(axis.size), axis)
        result = chunks[1 if axis.rank == 0 else 0]  # received: its memory is free
    else:
        if source.data_ptr() == tensor.data_ptr() and not reuse:
            source = source.clone()
        result = _resized(source, 0, source.size(0) // axis.size)
        works = [dist.reduce_scatter_tensor(result, source, operation, axis.group, async_op=True)]

    def finish(result: torch.Tensor) -> torch.Tensor:
        if combine:  # in the order of the ranks
            combine(chunks[0], chunks[1], out=result)
            for chunk in chunks[2:]:
                combine(result, chunk, out=result)
        result = result.movedim(0, scatter_dim).contiguous()
        return result.mul_(scale) if scale != 1.0 else result

    return Pending(result, works, finish)


def _exchange(chunks: Sequence[torch.Tensor], axis) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Sends each rank its chunk and receives one from each. Returns these in rank order (its own
    is not copied), and the works to wait for.
    """
    received, works = list(chunks), []
    for place, rank in enumerate(axis.ranks):
        if place != axis.rank:
            received[place] = torch.empty_like(chunks[axis.rank])
            works.append(dist.isend(chunks[place], rank, group=axis.group))
            works.append(dist.irecv(received[place], rank, group=axis.group))
    return received, works


def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A contiguous tensor without values, like `tensor` but for the size of `dim`."""
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_empty(shape)


def reduce_scatter(
    reduce_type: str,
    tensor: torch.Tensor,
    scale: float = 1.0,
    scatter_dim: int = 0,
    groups: Groups = None,
) -> torch.Tensor:
    """This rank's chunk, along `scatter_dim`, of the sum of `tensor` over the group, times `scale`.

    Args:
        reduce_type: `sum`, `max` or `min`.
        tensor: the same shape on every rank.
        scale: factor on the result.
        scatter_dim: the dimension that is sharded; the group's size has to divide it.
        groups: as for `all_reduce`.

    Raises:
        ValueError: an unknown `reduce_type` or group, or a dimension that does not exist or is not
            divisible, with the numbers.
    """
    return reduce_scatter_start(reduce_type, tensor, scale, scatter_dim, groups).wait()


def broadcast(tensor: torch.Tensor, src: int = 0, groups: Groups = None) -> torch.Tensor:
    """The tensor of the group's rank number `src` (its place in the group), on all its ranks."""
    tensor, axis = tensor.detach(), parallel_state.axis_of(groups)
    if not 0 <= src < axis.size:
        raise ValueError(f"src is {src}, must be a place in the group, 0 to {axis.size - 1}")
    if axis.size == 1:
        return tensor.clone()
    if tensor.device.type == "xla":
        # A sum of one tensor and zeros: an operation that every compiler has.
        return all_reduce("sum", tensor if axis.rank == src else torch.zeros_like(tensor), groups)
    note("broadcast", axis, tensor)
    result = tensor.clone(memory_format=torch.contiguous_format)
    if not tensor.is_meta:
        dist.broadcast(result, axis.ranks[src], group=axis.group)
    return result


def barrier(groups: Groups = None) -> None:
    """Returns on each rank of the group once all have called it. Host-side, on every backend."""
    parallel_state.gather_python_object(None, groups)


def raise_on_all(error: Exception | None, groups: Groups = None) -> None:
    """Raises on every rank of the group if any rank passes an error: its own where it has one, else
    the first peer's (of the same built-in type if a message makes one, else RuntimeError).

    Call it on all ranks at a point that all reach, so that none waits for one that has failed.
    """
    axis = parallel_state.axis_of(groups)
    mine = None if error is None else (type(error).__name__, str(error))
    found = parallel_state.gather_python_object(mine, axis)
    if error is not None:
        raise error
    for rank, report in zip(axis.ranks, found):
        if report is not None:
            name, message = report
            raise _error(getattr(builtins, name, None), f"rank {rank}: {message}")


def _error(kind: object, message: str) -> Exception:
    """An error of another rank's type, if a message makes one (unlike UnicodeDecodeError)."""
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(message)
    return RuntimeError(message)
