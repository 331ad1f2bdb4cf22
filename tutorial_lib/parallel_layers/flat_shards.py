"""How ZeRO-1 shards a parameter, whatever its shape.

A parameter of n elements over R ranks is flattened, padded with zeros to R · ⌈n / R⌉ elements and
divided into R equal runs; rank r holds run r. So a shard is at most R - 1 elements longer than
n / R, and the shards of all ranks, concatenated, are the parameter.
"""

import torch
import torch.nn.functional as F


def shard_length(numel: int, size: int) -> int:
    """Elements in each of `size` shards."""
    return -(-numel // size)


def as_rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """`tensor` as a matrix of its shards, `(size, shard length)`; a view if it needs no padding and
    is contiguous.
    """
    length = shard_length(tensor.numel(), size)
    flat, padding = tensor.reshape(-1), size * length - tensor.numel()
    if padding:  # F.pad copies even where there is nothing to add
        flat = F.pad(flat, (0, padding))
    return flat.view(size, length)


def take_shard(tensor: torch.Tensor, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy, in `dtype`, of the shard of `tensor` that `rank` holds; flat."""
    return as_rows(tensor.detach(), size)[rank].to(dtype, copy=True)
