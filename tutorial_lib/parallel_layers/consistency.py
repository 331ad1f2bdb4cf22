"""The check that what ranks share is bitwise the same on all, and the name of what is not."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from . import parallel_state
from .marks import is_tensor_parallel


def _digest(values: torch.Tensor) -> bytes:
    data = values.reshape(-1).contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).digest()


def find_drift(named_parameters: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Compares every parameter on all ranks that share it; empty if all agree, bit for bit.

    A replicated parameter is shared by the tensor-parallel and the data-parallel group, a sharded
    one by the data-parallel group, and the key and value heads of grouped-query attention by the kv
    group too. Host-side, and called on every rank.

    Returns:
        A sentence for each parameter and group that disagrees, with the ranks that differ from the
        majority (from the lowest rank, where there is none). The same on every rank.
    """
    if isinstance(named_parameters, nn.Module):
        named_parameters = named_parameters.named_parameters()
    mine: dict[str, dict[str, bytes]] = {"data": {}, "tensor": {}, "kv": {}}
    for name, parameter in named_parameters:
        values = parameter.cpu().detach()  # whole: where work is traced, each shape is compiled
        mine["data"][name] = _digest(values)
        if not is_tensor_parallel(parameter):
            mine["tensor"][name] = mine["data"][name]
        elif shared := getattr(parameter, "kv_shared_numel", 0):
            mine["kv"][name] = _digest(values.reshape(-1)[-shared:])
    digests = parallel_state.gather_python_object(mine, parallel_state.get_world_group())
    groups = {
        "data": parallel_state.get_data_parallel_replica_groups(),
        "tensor": parallel_state.get_tensor_model_parallel_replica_groups(),
    }
    if any(known["kv"] for known in digests):
        groups["kv"] = parallel_state.get_kv_shared_replica_groups()
    return [
        f"parameter {name!r} on rank {wrong} differs from rank {right} of the same "
        f"{axis}-parallel group"
        for axis, replica_groups in groups.items()
        for ranks in replica_groups
        for name, right, wrong in _disagreements({rank: digests[rank][axis] for rank in ranks})
    ]


def _disagreements(digests: dict[int, dict[str, bytes]]) -> Iterable[tuple[str, str, str]]:
    """The names whose digests differ between ranks, with the ranks that are right and wrong."""
    for name in {name: None for known in digests.values() for name in known}:
        found: dict[bytes | None, list[int]] = {}
        for rank, known in digests.items():
            found.setdefault(known.get(name), []).append(rank)
        if len(found) > 1:
            right = max(found.values(), key=len)
            wrong = [rank for rank in digests if rank not in right]
            yield name, ", ".join(map(str, right)), ", ".join(map(str, wrong))
