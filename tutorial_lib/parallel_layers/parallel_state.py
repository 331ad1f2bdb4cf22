"""Which ranks work together: the mesh of ranks, its axes, and the process group of this rank along each axis.

Names and layout are those of `neuronx_distributed.parallel_layers.parallel_state`; sizes are checked, never clamped.

On every backend a group is a `torch.distributed.ProcessGroup` (on `xla` a gloo one, for what the host exchanges), and
`as_list=True` gives its replica groups: the list of all groups along that axis, which a traced collective carries.
"""

import warnings
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .rank_layout import (
    ParallelGroups,
    ReplicaGroups,
    arrange_kv_groups,
    layout,
    same_weight_groups,
)

_MESH_AXES = ("tp", "dp", "pp", "ep_model", "ep_data", "cp")


@dataclass(frozen=True)
class _Axis:
    """One axis of the mesh as this rank sees it."""

    name: str  # that it was made under; another name may stand for the same axis
    replica_groups: ReplicaGroups
    ranks: list[int]  # the group that this rank is in
    group: ProcessGroup
    rank: int  # this rank's place in it

    @property
    def size(self) -> int:
        return len(self.ranks)


_axes: dict[str, _Axis] = {}
_world: ProcessGroup | None = None  # the world that the axes were made in


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
    *,
    trn1_tp4_ring: int | None = None,
) -> ParallelGroups | None:
    """Builds the groups of every axis. Every rank calls it; a second call builds them anew.

    Args:
        tensor_model_parallel_size, pipeline_model_parallel_size: ranks along these axes.
        context_parallel_size, expert_model_parallel_size: likewise. What they leave of the world is
            data parallel.
        skip_collective_init, lnc_size: accepted for the vendor's library's sake; nothing here depends on them.
        mesh_only: return the groups as lists of ranks and create nothing.
        trn1_tp4_ring: see `layout`.

    Returns:
        The groups with `mesh_only`, else None.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError: the sizes do not fit the world (`layout`); on every rank.
    """
    global _world
    if not dist.is_initialized():
        raise RuntimeError(
            "call torch.distributed.init_process_group (or tutorial_lib.backends.init_distributed) first"
        )
    groups = layout(
        dist.get_world_size(),
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        expert_model_parallel_size,
        trn1_tp4_ring,
    )
    if mesh_only:
        return groups
    destroy_model_parallel()
    _world = dist.group.WORLD
    for name, replica_groups in zip(_MESH_AXES, groups):
        _add_axis(name, replica_groups)
    if context_parallel_size == 1:
        _axes["zero1"] = _axes["dp"]
    else:
        _add_axis("zero1", same_weight_groups(groups))
    _add_axis("world", [list(range(dist.get_world_size()))], group=dist.group.WORLD)


def initialize_fallback_parallel_state() -> None:
    """A world of this process alone, so that layers work before (or without) `initialize_model_parallel`."""
    warnings.warn(
        "model parallelism is not initialised: falling back to the non-parallel equivalent",
        stacklevel=3,
    )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1:
        raise RuntimeError(
            f"{dist.get_world_size()} ranks are up, but initialize_model_parallel was not called: call it on every rank"
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


def mesh_is(groups: ParallelGroups) -> bool:
    """True if the axes exist and are these (what `initialize_model_parallel` gives with `mesh_only`)."""
    return model_parallel_is_initialized() and all(
        _axes[name].replica_groups == replica_groups
        for name, replica_groups in zip(_MESH_AXES, groups)
    )


def create_pg_with_ranks(replica_groups: ReplicaGroups) -> ProcessGroup:
    """Creates one process group for each list of ranks and returns the one that this rank is in.

    Every rank has to call it with the same lists: a group is made by all ranks, members or not.
    """
    # torch-xla's own process group needs no host-side peers; objects and barriers go over gloo on every backend.
    backend = "gloo" if dist.get_backend() == "xla" else None
    mine = None
    for ranks in replica_groups:
        group = dist.new_group(ranks, backend=backend)
        if dist.get_rank() in ranks:
            mine = group
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the groups {replica_groups}")
    return mine


def _add_axis(name: str, replica_groups: ReplicaGroups, group: ProcessGroup | None = None) -> None:
    rank = dist.get_rank()
    if group is None:  # axes of the same ranks share one process group
        same = (axis.group for axis in _axes.values() if axis.replica_groups == replica_groups)
        group = next(same, None) or create_pg_with_ranks(replica_groups)
    ranks = next(g for g in replica_groups if rank in g)
    _axes[name] = _Axis(name, replica_groups, ranks, group, ranks.index(rank))


def _axis(name: str) -> _Axis:
    if not model_parallel_is_initialized():
        raise RuntimeError(
            "model parallelism is not initialised: call initialize_model_parallel on every rank first"
        )
    if name not in _axes:
        raise RuntimeError(f"the {name} group is not initialised")
    return _axes[name]


def axis_of(group: ProcessGroup | ReplicaGroups | None) -> _Axis:
    """The axis that a process group or its replica groups belong to; None stands for the tensor-parallel one.

    Raises:
        ValueError: a group that `parallel_state` did not make.
    """
    if group is None:
        return _axis("tp")
    _axis("world")
    for axis in _axes.values():
        if axis.group is group or axis.replica_groups == group:
            return axis
    raise ValueError(f"{group} is not a group of parallel_state; make it with register_group")


def register_group(name: str, replica_groups: ReplicaGroups) -> ProcessGroup:
    """Adds an axis of one's own; the collectives of `comm` then work over it on every backend."""
    _axis("world")
    _add_axis(name, replica_groups)
    return _axes[name].group


def _get_group(name: str, as_list: bool) -> ProcessGroup | ReplicaGroups:
    axis = _axis(name)
    return axis.replica_groups if as_list else axis.group


# --- tensor parallel ---------------------------------------------------------------------------------------------


def get_tensor_model_parallel_group(as_list: bool = False):
    """This rank's tensor-parallel process group, or with `as_list` all of them as lists of ranks."""
    return _get_group("tp", as_list)


def get_tensor_model_parallel_replica_groups() -> ReplicaGroups:
    return _axis("tp").replica_groups


def get_tensor_model_parallel_size() -> int:
    return _axis("tp").size


def get_tensor_model_parallel_rank() -> int:
    return _axis("tp").rank


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's tensor-parallel group."""
    return _axis("tp").ranks[0]


# --- data parallel -----------------------------------------------------------------------------------------------


def get_data_parallel_group(as_list: bool = False):
    """This rank's data-parallel process group, or with `as_list` all of them as lists of ranks."""
    return _get_group("dp", as_list)


def get_data_parallel_replica_groups() -> ReplicaGroups:
    return _axis("dp").replica_groups


def get_data_parallel_size() -> int:
    return _axis("dp").size


def get_data_parallel_rank() -> int:
    return _axis("dp").rank


def get_data_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's data-parallel group."""
    return _axis("dp").ranks[0]


def get_zero1_sharding_groups() -> ReplicaGroups:
    """The ranks that hold the same weights: data and context parallel together."""
    return _axis("zero1").replica_groups


# --- pipeline, context, expert -----------------------------------------------------------------------------------


def get_pipeline_model_parallel_group(as_list: bool = False):
    return _get_group("pp", as_list)


def get_pipeline_model_parallel_replica_groups() -> ReplicaGroups:
    return _axis("pp").replica_groups


def get_pipeline_model_parallel_size() -> int:
    return _axis("pp").size


def get_pipeline_model_parallel_rank() -> int:
    return _axis("pp").rank


def get_context_model_parallel_group(as_list: bool = False):
    return _get_group("cp", as_list)


def get_context_model_parallel_replica_groups() -> ReplicaGroups:
    return _axis("cp").replica_groups


def get_context_model_parallel_size() -> int:
    return _axis("cp").size


def get_context_model_parallel_rank() -> int:
    return _axis("cp").rank


def get_expert_model_parallel_group(as_list: bool = False):
    return _get_group("ep_model", as_list)


def get_expert_model_parallel_size() -> int:
    return _axis("ep_model").size


def get_expert_model_parallel_rank() -> int:
    return _axis("ep_model").rank


def get_expert_data_parallel_group(as_list: bool = False):
    return _get_group("ep_data", as_list)


def get_expert_data_parallel_size() -> int:
    return _axis("ep_data").size


def get_expert_data_parallel_rank() -> int:
    return _axis("ep_data").rank


# --- ranks that share a key/value head (grouped-query attention with fewer such heads than ranks) -----------------


def initialize_kv_group(
    kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = True
) -> None:
    """Makes the groups of `arrange_kv_groups`; a second call with the same arguments keeps them.

    Raises:
        ValueError: see `arrange_kv_groups`; or groups of another arrangement exist (`destroy_kv_group` first).
    """
    wanted = arrange_kv_groups(
        _axis("tp").replica_groups, kv_shared_group_size, sequential_ranks_in_group
    )
    if "kv" in _axes:
        if _axes["kv"].replica_groups != wanted:
            raise ValueError(
                f"kv groups {_axes['kv'].replica_groups} exist, {wanted} were asked for: "
                "call destroy_kv_group first"
            )
        return
    _add_axis("kv", wanted)


def destroy_kv_group() -> None:
    axis = _axes.pop("kv", None)
    if axis is not None and axis.group not in {other.group for other in _axes.values()}:
        dist.destroy_process_group(axis.group)


def get_kv_shared_group(as_list: bool = False):
    return _get_group("kv", as_list)


def get_kv_shared_replica_groups() -> ReplicaGroups:
    return _axis("kv").replica_groups


def get_kv_shared_group_size() -> int:
    return _axis("kv").size


# --- the world ---------------------------------------------------------------------------------------------------


def get_world_group(as_list: bool = False):
    return _get_group("world", as_list)


def is_global_rank_zero() -> bool:
    """True on rank 0, and in a process that is no rank of anything."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_python_object(obj, group: ProcessGroup) -> list:
    """The objects of all ranks of `group`, in rank order, on every one of them."""
    axis = axis_of(group)
    gathered = [None] * axis.size
    dist.all_gather_object(gathered, obj, group=axis.group)
    return gathered


def get_rank_info_str() -> str:
    """For example `rank_3_pp0_tp1_dp1_cp0`; the rank alone without model parallelism."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not model_parallel_is_initialized():
        return f"rank_{rank}"
    return f"rank_{rank}_pp{_axis('pp').rank}_tp{_axis('tp').rank}_dp{_axis('dp').rank}_cp{_axis('cp').rank}"


def rmsg(msg: str) -> str:
    """`msg` behind the coordinates of this rank."""
    return f"[{get_rank_info_str()}] {msg}"


# The developer guide, Megatron and earlier releases spell these differently; both work.
get_tensor_model_parallel_world_size = get_tensor_parallel_size = get_tensor_model_parallel_size
get_tensor_parallel_rank = get_tensor_model_parallel_rank
get_data_parallel_world_size = get_data_parallel_size
get_pipeline_model_parallel_world_size = get_pipeline_model_parallel_size
