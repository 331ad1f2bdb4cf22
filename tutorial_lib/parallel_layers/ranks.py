"""Where this rank is in the mesh, and steps that every rank takes or none."""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from . import comm, parallel_state
from .utils import ensure_positive

T = TypeVar("T")


class Place(NamedTuple):
    """The place of a rank among those that hold the same weights (`dp`, of `replicas`), and in its
    tensor-parallel group.
    """

    dp: int
    tp: int
    replicas: int


def my_place() -> Place:
    return Place(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_size(),
    )


def mesh_of(tp: int, dp: int) -> dict[str, int]:
    """The sizes of a mesh, by the names of `initialize_model_parallel`."""
    return {"world": tp * dp, "tp": tp, "dp": dp, "pp": 1, "cp": 1}


def mesh() -> dict[str, int]:
    """The sizes of the mesh that is up."""
    size = parallel_state.get_tensor_model_parallel_size()
    return mesh_of(size, parallel_state.get_data_parallel_size())


def together(function: Callable[..., T], *args, group=None, **kwargs) -> T:
    """`function` on every rank; if it fails on one, all raise.

    Args:
        group: used instead of the world's group, and of the same ranks; here and below.
    """
    result, error = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as caught:  # raised again below, on every rank
        error = caught
    comm.raise_on_all(error, group or parallel_state.get_world_group())
    return result


def from_rank_zero(function: Callable[[], T], group=None) -> T:
    """What `function` gives on rank 0, on every rank; its error likewise."""
    mine = together(lambda: function() if dist.get_rank() == 0 else None, group=group)
    return gather(mine, group)[0]


def gather(value: T, group=None) -> list[T]:
    """The values of all ranks, on all ranks."""
    return parallel_state.gather_python_object(value, group or parallel_state.get_world_group())


def check_folder(path: object) -> None:
    """Raises ValueError unless it is a non-empty path."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"{path!r} is not the path of a folder")


def waves(num_workers: int) -> int:
    """How many turns it takes when `num_workers` ranks of each node act at a time.

    Raises:
        ValueError: `num_workers` is below 1.
    """
    ensure_positive(num_workers=num_workers)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return -(-local_world // num_workers)


def in_turn(function: Callable[[], T], num_workers: int, group=None) -> T:
    """`together`, with at most `num_workers` ranks of a node at work at a time."""
    result, turns = [], max(gather(waves(num_workers), group))  # nodes may differ in ranks
    mine = int(os.environ.get("LOCAL_RANK", dist.get_rank())) // num_workers
    for turn in range(turns):
        together(lambda: result.append(function()) if turn == mine else None, group=group)
    return result[0]
