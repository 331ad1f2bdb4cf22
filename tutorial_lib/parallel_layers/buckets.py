"""Many small tensors in a few collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import comm, parallel_state

# What travels in one collective, in 10⁶ bytes. On the host a bucket should fit the cache, and
# larger tensors travel without a copy; on a device a collective has to be large to be fast.
BUCKET_CAP_MB = 130.0
HOST_BUCKET_CAP_MB = 1.0
_host_kinds = {"cpu"}


@contextmanager
def meta_stands_for_host() -> Iterator[None]:
    """Inside the block, tensors on meta fill buckets as tensors on the host do, not as on a
    device.
    """
    _host_kinds.add("meta")
    try:
        yield
    finally:
        _host_kinds.discard("meta")


def buckets_of(tensors: list[torch.Tensor]) -> list[list[int]]:
    """The places of tensors that are to travel together, each bucket of one dtype."""
    buckets: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], float]] = {}  # the bucket and the bytes left in it
    for place, tensor in enumerate(tensors):
        host = tensor.device.type in _host_kinds
        cap = 1e6 * (HOST_BUCKET_CAP_MB if host else BUCKET_CAP_MB)
        if tensor.nbytes >= cap:  # alone, and without a copy
            buckets.append([place])
            continue
        bucket, left = filling.get(tensor.dtype, (None, 0.0))
        if tensor.nbytes > left:
            bucket, left = [], cap
            buckets.append(bucket)
        bucket.append(place)
        filling[tensor.dtype] = bucket, left - tensor.nbytes
    return buckets


def one_ahead(buckets: list[list[int]], start: Callable, finish: Callable) -> None:
    """Starts each bucket's collective before the one before is finished, so that one travels while
    another is copied.
    """
    under_way = None
    for places in buckets:
        started = start(places)
        if under_way is not None:
            finish(*under_way)
        under_way = started
    if under_way is not None:
        finish(*under_way)


@torch.no_grad()
def all_reduce_bucketed(
    tensors: list[torch.Tensor], groups: comm.Groups, scale: float = 1.0
) -> None:
    """Replaces each tensor by `scale` times its sum over the group, in few large all-reduces.

    Args:
        tensors: the same shapes in the same order on every rank of the group.
    """

    def start(places: list[int]) -> tuple[list[torch.Tensor], comm.Pending]:
        bucket = [tensors[place] for place in places]
        flat = [tensor.reshape(-1) for tensor in bucket]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0]
        return bucket, comm.all_reduce_start("sum", whole, groups, reuse=True)

    def finish(bucket: list[torch.Tensor], pending: comm.Pending) -> None:
        flat = pending.wait()
        if scale != 1.0:
            flat *= scale
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket])):
            tensor.copy_(part.view(tensor.shape))

    if parallel_state.axis_of(groups).size > 1:
        one_ahead(buckets_of(tensors), start, finish)
