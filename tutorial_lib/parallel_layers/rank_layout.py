"""Where each rank sits on the mesh, as arithmetic on lists of ranks. Nothing here talks to another process.

The ranks `0 … W-1` are laid out row by row as `[PP, DP, CP, TP]`: the ranks of a tensor-parallel group are neighbours
(on Trainium they share a chip), then come context, data and pipeline parallelism. The experts' view of the same ranks
is `[PP, DP_expert, EP, TP]`.
"""

from numbers import Integral
from typing import NamedTuple

import numpy as np

ReplicaGroups = list[list[int]]


class ParallelGroups(NamedTuple):
    """The groups along each axis, as lists of ranks (`initialize_model_parallel(mesh_only=True)`)."""

    tp_groups: ReplicaGroups
    dp_groups: ReplicaGroups
    pp_groups: ReplicaGroups
    ep_model_groups: ReplicaGroups
    ep_data_groups: ReplicaGroups
    cp_groups: ReplicaGroups


def layout(
    world_size: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    trn1_tp4_ring: int | None = None,
) -> ParallelGroups:
    """The groups of ranks along every axis. Pure arithmetic, for any world size.

    Args:
        trn1_tp4_ring: the number of ranks on a node, to interleave tensor-parallel groups of 4 inside it as the
            vendor's library does on trn1 (`[[0, 2, 4, 6], [1, 3, 5, 7]]` for 8); None leaves them contiguous.

    Raises:
        ValueError: a size below 1, or sizes whose product does not divide `world_size`.
    """
    tp, pp, cp, ep = sizes = (
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        expert_model_parallel_size,
    )
    if not all(
        isinstance(n, Integral) and not isinstance(n, bool) and n >= 1 for n in (*sizes, world_size)
    ):
        raise ValueError(
            f"sizes must be whole numbers from 1 on: world {world_size!r}, tensor {tp!r}, "
            f"pipeline {pp!r}, context {cp!r}, expert {ep!r}"
        )
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"invalid implied data parallel degree: world size {world_size} is not divisible by tensor {tp} × "
            f"pipeline {pp} × context {cp} = {tp * pp * cp}"
        )
    if world_size % (tp * pp * ep):
        raise ValueError(
            f"invalid implied expert data parallel degree: world size {world_size} is not divisible by tensor {tp} × "
            f"pipeline {pp} × expert {ep} = {tp * pp * ep}"
        )
    ranks = np.arange(world_size)
    if trn1_tp4_ring is not None:
        if tp != 4 or trn1_tp4_ring % 4 or world_size % trn1_tp4_ring:
            raise ValueError(
                f"the trn1 ring is for tensor parallel size 4 (got {tp}) on nodes of a multiple of 4 "
                f"ranks that divides the world (got {trn1_tp4_ring} of {world_size})"
            )
        ranks = ranks.reshape(-1, 4, trn1_tp4_ring // 4).swapaxes(1, 2).reshape(-1)

    def along(mesh: np.ndarray, axis: int) -> ReplicaGroups:
        return np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis]).tolist()

    mesh = ranks.reshape(pp, -1, cp, tp)
    expert_mesh = ranks.reshape(pp, -1, ep, tp)
    return ParallelGroups(
        tp_groups=along(mesh, 3),
        dp_groups=along(mesh, 1),
        pp_groups=along(mesh, 0),
        ep_model_groups=along(expert_mesh, 2),
        ep_data_groups=along(expert_mesh, 1),
        cp_groups=along(mesh, 2),
    )


def same_weight_groups(groups: ParallelGroups) -> ReplicaGroups:
    """The ranks that hold the same weights, data and context parallel together: what ZeRO-1 shards over."""
    dp_of = {rank: ranks for ranks in groups.dp_groups for rank in ranks}
    return [
        sorted(rank for peer in cp_group for rank in dp_of[peer])
        for cp_group in groups.cp_groups
        if cp_group[0] == min(dp_of[cp_group[0]])
    ]


def arrange_kv_groups(
    tp_groups: ReplicaGroups, kv_shared_group_size: int, sequential_ranks_in_group: bool = False
) -> ReplicaGroups:
    """Cuts each tensor-parallel group into the groups of ranks that hold the same key/value heads.

    With 4 ranks and groups of 2: `[[0, 2], [1, 3]]`, or `[[0, 1], [2, 3]]` if sequential.

    Raises:
        ValueError: `kv_shared_group_size` does not divide the tensor-parallel size.
    """
    tp = len(tp_groups[0])
    if kv_shared_group_size < 1 or tp % kv_shared_group_size:
        raise ValueError(
            f"kv_shared_group_size {kv_shared_group_size} does not divide the tensor parallel size {tp}"
        )
    shape = (-1, kv_shared_group_size) if sequential_ranks_in_group else (kv_shared_group_size, -1)
    result = []
    for ranks in tp_groups:
        block = np.array(ranks).reshape(shape)
        result += (block if sequential_ranks_in_group else block.T).tolist()
    return result
