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


def _ranks_by_value(ranks: list[int], digests: list[dict], key) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for rank in ranks:
        found.setdefault(digests[rank].get(key), []).append(rank)
    return found


def find_drift(named_parameters: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Compares every parameter on all ranks that share it; empty if all agree, bit for bit.

    A replicated parameter is shared by the tensor-parallel and the data-parallel group, a sharded
    one by the data-parallel group, and the key and value heads of grouped-query attention by the kv
    group too. Host-side, and called on every rank.

    Returns:
        A sentence for each parameter and group that disagrees, with the ranks that differ from the
        majority (from the lowest rank, where there is none). The same on every rank.
    """
    named = (
        named_parameters.named_parameters()
        if isinstance(named_parameters, nn.Module)
        else named_parameters
    )
    mine: dict[tuple[str, str], bytes] = {}
    for name, parameter in named:
        values = (
            parameter.detach().cpu()
        )  # before it is cut: where work is traced, each shape would be compiled
        mine[name, "data"] = _digest(values)
        if not is_tensor_parallel(parameter):
            mine[name, "tensor"] = mine[name, "data"]
        elif getattr(parameter, "kv_shared_numel", 0):
            mine[name, "kv"] = _digest(values.reshape(-1)[-parameter.kv_shared_numel :])
    digests = parallel_state.gather_python_object(mine, parallel_state.get_world_group())
    groups = {
        "data": parallel_state.get_zero1_sharding_groups(),
        "tensor": parallel_state.get_tensor_model_parallel_replica_groups(),
    }
    if any(axis == "kv" for known in digests for _, axis in known):
        groups["kv"] = parallel_state.get_kv_shared_replica_groups()
    drifted = []
    for axis, replica_groups in groups.items():
        for ranks in replica_groups:
            for name in {n: None for rank in ranks for n, a in digests[rank] if a == axis}:
                found = _ranks_by_value(ranks, digests, (name, axis))
                if len(found) > 1:
                    right = max(found.values(), key=len)
                    wrong = [rank for rank in ranks if rank not in right]
                    wrong, right = (", ".join(map(str, some)) for some in (wrong, right))
                    drifted.append(
                        f"parameter {name!r} on rank {wrong} differs from rank {right} of the same "
                        f"{axis}-parallel group"
                    )
    return drifted


def check_replicated(named_parameters: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises unless all ranks that share a parameter hold the same bits; see `find_drift`.

    Raises:
        RuntimeError: on every rank, naming each parameter that drifted and where.
    """
    drifted = find_drift(named_parameters)
    if drifted:
        raise RuntimeError("replicated parameters differ:\n" + "\n".join(drifted))
