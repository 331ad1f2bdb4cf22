"""Which ranks work together: the mesh of tensor-parallel and data-parallel ranks, and the process
group of this rank along each axis.

Names and layout are those of `neuronx_distributed.parallel_layers.parallel_state`; sizes are
checked, never clamped. The tutorials teach no pipeline, context or expert parallelism, so these
sizes are 1.

On every backend a group is a `torch.distributed.ProcessGroup` (on `xla` a gloo one, for what the
hosts exchange), and `as_list=True` gives its replica groups: the list of all groups along that
axis, which a traced collective carries.
"""

import warnings
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from .utils import divide, ensure_positive

ReplicaGroups = list[list[int]]


@dataclass(frozen=True)
class _Axis:
    """One axis of the mesh as this rank sees it."""

    name: str
    replica_groups: ReplicaGroups
    ranks: list[int]  # the group that this rank is in
    group: ProcessGroup
    rank: int  # this rank's place in it

    @property
    def size(self) -> int:
        return len(self.ranks)


_axes: dict[str, _Axis] = {}
_world: ProcessGroup | None = None  # the world that the axes were made in


def layout(
    world_size: int, tensor_model_parallel_size: int = 1
) -> tuple[ReplicaGroups, ReplicaGroups]:
    """The tensor-parallel and the data-parallel groups. Pure arithmetic, for any world size.

    The ranks `0 … W-1` are laid out row by row as `[DP, TP]`: those of a tensor-parallel group are
    neighbours, which on Trainium share a chip.

    Raises:
        ValueError: a size that is not a positive integer, or one that does not divide `world_size`.
    """
    tp = tensor_model_parallel_size
    ensure_positive(world_size=world_size, tensor_model_parallel_size=tp)
    divide(world_size, tp, f"world size {world_size} over tensor_model_parallel_size {tp}")
    rows = [list(range(first, first + tp)) for first in range(0, world_size, tp)]
    return rows, [list(column) for column in zip(*rows)]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
) -> None:
    """Builds the groups of both axes. Every rank calls it; a second call builds them anew.

    Args:
        tensor_model_parallel_size: T; what it leaves of the world is data parallel.
        pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size: 1.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError: the sizes do not fit the world (`layout`), or one that has to be 1 is not; on
            every rank.
    """
    global _world
    if not dist.is_initialized():
        raise RuntimeError(
            "call torch.distributed.init_process_group (or tutorial_lib.backends.init_distributed) "
            "first"
        )
    others = pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size
    if others != (1, 1, 1):
        raise ValueError(f"pipeline, context and expert sizes {others} are not supported, only 1")
    tp_groups, dp_groups = layout(dist.get_world_size(), tensor_model_parallel_size)
    destroy_model_parallel()
    _world = dist.group.WORLD
    _add_axis("tp", tp_groups)
    _add_axis("dp", dp_groups)
    _add_axis("world", [list(range(dist.get_world_size()))], group=dist.group.WORLD)


def initialize_fallback_parallel_state() -> None:
    """A world of this process alone, so that layers work without `initialize_model_parallel`."""
    warnings.warn(
        "model parallelism is not initialised: falling back to the non-parallel equivalent",
        stacklevel=3,
    )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1:
        raise RuntimeError(
            f"{dist.get_world_size()} ranks are up, but initialize_model_parallel was not called: "
            "call it on every rank"
        )
    initialize_model_parallel()


def destroy_model_parallel() -> None:
    """Forgets every axis (and closes its process groups). Safe to call twice."""
    global _world
    if dist.is_initialized() and _world is dist.group.WORLD:
        for group in {axis.group for axis in _axes.values()} - {_world}:
            dist.destroy_process_group(group)
    _axes.clear()
    _world = None


def model_parallel_is_initialized() -> bool:
    """True if the axes exist and belong to the process group that is up now."""
    return dist.is_initialized() and _world is dist.group.WORLD and "tp" in _axes


def _add_axis(name: str, replica_groups: ReplicaGroups, group: ProcessGroup | None = None) -> None:
    rank = dist.get_rank()
    ranks = next(ranks for ranks in replica_groups if rank in ranks)
    if group is None:  # axes of the same ranks share one process group
        same = (axis.group for axis in _axes.values() if axis.replica_groups == replica_groups)
        group = next(same, None) or _create_groups(replica_groups)[replica_groups.index(ranks)]
    _axes[name] = _Axis(name, replica_groups, ranks, group, ranks.index(rank))


def _create_groups(replica_groups: ReplicaGroups) -> list[ProcessGroup]:
    """A process group for each list of ranks; every rank makes all of them, member or not."""
    # torch-xla's own process group is for traced collectives: what hosts exchange goes over gloo.
    backend = "gloo" if dist.get_backend() == "xla" else None
    limit = distributed_c10d.default_pg_timeout  # torch-xla's `new_group` would take half an hour
    return [dist.new_group(ranks, limit, backend) for ranks in replica_groups]


def _axis(name: str) -> _Axis:
    if not model_parallel_is_initialized():
        raise RuntimeError(
            "model parallelism is not initialised: call initialize_model_parallel on every rank "
            "first"
        )
    if name not in _axes:
        raise RuntimeError(f"the {name} group is not initialised: call initialize_{name}_group")
    return _axes[name]


def axis_of(group: ProcessGroup | ReplicaGroups | _Axis | None) -> _Axis:
    """The axis of a process group or of its replica groups; by default the tensor-parallel one.
    An axis is its own.

    Raises:
        ValueError: a group that `parallel_state` did not make.
    """
    if group is None:
        return _axis("tp")
    if isinstance(group, _Axis):
        return group
    _axis("world")
    for axis in _axes.values():
        if axis.group is group or axis.replica_groups == group:
            return axis
    raise ValueError(f"{group} is not a group of parallel_state: {', '.join(_axes)}")


def _get_group(name: str, as_list: bool) -> ProcessGroup | ReplicaGroups:
    axis = _axis(name)
    return axis.replica_groups if as_list else axis.group


def get_tensor_model_parallel_group(as_list: bool = False):
    """This rank's tensor-parallel process group; with `as_list` all of them as lists of ranks."""
    return _get_group("tp", as_list)


def get_tensor_model_parallel_replica_groups() -> ReplicaGroups:
    return _axis("tp").replica_groups


def get_tensor_model_parallel_size() -> int:
    return _axis("tp").size


def get_tensor_model_parallel_rank() -> int:
    return _axis("tp").rank


def get_data_parallel_group(as_list: bool = False):
    """This rank's data-parallel process group, or with `as_list` all of them as lists of ranks."""
    return _get_group("dp", as_list)


def get_data_parallel_replica_groups() -> ReplicaGroups:
    """The ranks that hold the same weights: what gradients are averaged and ZeRO-1 shards over."""
    return _axis("dp").replica_groups


def get_data_parallel_size() -> int:
    return _axis("dp").size


def get_data_parallel_rank() -> int:
    return _axis("dp").rank


# The spellings of the developer guide.
get_tensor_parallel_size = get_tensor_model_parallel_size
get_data_parallel_world_size = get_data_parallel_size


# Scripts query these axes; here their size is always 1.
def get_pipeline_model_parallel_size() -> int:
    return 1


def get_pipeline_model_parallel_rank() -> int:
    return 0


def get_context_model_parallel_size() -> int:
    return 1


def initialize_kv_group(kv_shared_group_size: int) -> None:
    """Makes the groups of neighbouring tensor-parallel ranks that hold copies of a key/value head,
    `[[0, 1], [2, 3]]` for 4 ranks and groups of 2. A second call with the same size keeps them.

    Raises:
        ValueError: a size that does not divide T; or groups of another size exist.
    """
    size = kv_shared_group_size
    ensure_positive(kv_shared_group_size=size)
    divide(get_tensor_model_parallel_size(), size, "tensor-parallel size over kv_shared_group_size")
    wanted = [
        ranks[first : first + size]
        for ranks in _axis("tp").replica_groups
        for first in range(0, len(ranks), size)
    ]
    if "kv" not in _axes:
        _add_axis("kv", wanted)
    elif _axes["kv"].replica_groups != wanted:
        raise ValueError(
            f"kv groups {_axes['kv'].replica_groups} exist, {wanted} were asked for: all layers "
            "need one kv_size_multiplier"
        )


def get_kv_shared_replica_groups() -> ReplicaGroups:
    return _axis("kv").replica_groups


def get_kv_shared_group_size() -> int:
    return _axis("kv").size


def get_world_group(as_list: bool = False):
    return _get_group("world", as_list)


def is_global_rank_zero() -> bool:
    """True on rank 0, and in a process that is not a rank of anything."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_python_object(obj, group: ProcessGroup) -> list:
    """The objects of all ranks of `group`, in rank order, on every one of them."""
    axis = axis_of(group)
    gathered = [None] * axis.size
    dist.all_gather_object(gathered, obj, group=axis.group)
    return gathered


def rmsg(msg: str) -> str:
    """`msg` prefixed with this rank's coordinates, such as `[rank_3_tp1_dp1]`."""
    place = f"rank_{dist.get_rank() if dist.is_initialized() else 0}"
    if model_parallel_is_initialized():
        place += f"_tp{_axis('tp').rank}_dp{_axis('dp').rank}"
    return f"[{place}] {msg}"
