"""Every collective of a step of one rank, in closed form."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.models.configs import kv_multiplier
from tutorial_lib.parallel_layers.buckets import buckets_of, meta_stands_for_host
from tutorial_lib.parallel_layers.comm import Collective
from tutorial_lib.parallel_layers.flat_shards import shard_length

from .parameters import parameters, qkv_features


def collectives(run: Run, backend: str = "xla") -> list[Collective]:
    """All of a step: those of one kind are in order, different kinds are not.

    Args:
        backend: on `cpu` gradients travel in smaller buckets.
    """
    once = list(_micro_batch(run))
    with meta_stands_for_host() if backend == "cpu" else nullcontext():
        found = once * run.accumulation + list(_step(run))
    return [c for c in found if c.group_size > 1]


def _micro_batch(run: Run) -> Iterator[Collective]:
    """Forward and backward of one micro-batch, all over tensor parallelism."""
    config, tp, wide = run.config, run.tp, run.wide
    batch, length, hidden = run.micro_batch, run.sequence, config.hidden_size
    again = run.checkpointing == "full"
    whole = (length, batch, hidden) if run.sequence_parallel else (batch, length, hidden)
    chunk = (length // tp, batch, hidden)

    def over_tp(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Collective:
        return Collective(kind, tp, shape, dtype, "tp")

    gather = over_tp("all_gather", chunk, run.dtype)
    scatter, reduce = (over_tp(kind, whole, wide) for kind in ("reduce_scatter", "all_reduce"))
    if run.shards("vocabulary"):
        yield over_tp("reduce_scatter" if run.sequence_parallel else "all_reduce", whole, run.dtype)
        yield over_tp("all_gather", (1, 2, batch, length), wide)  # of the cross entropy
    if run.sequence_parallel:
        yield gather  # the embedding's gradient
        yield from (gather, gather, scatter)  # the head: forward, backward
        forward, backward = [gather, scatter], [gather, gather, scatter]  # of a column and a row
        yield from (forward * (1 + again) + backward) * (2 * config.num_hidden_layers)
    else:
        yield from [reduce] * run.shards("vocabulary")  # the head's backward
        columns, rows = 3 if run.family == "bert" else 1, 1
        if run.shards("mlp"):
            columns, rows = columns + 1, rows + 1
        yield from [reduce] * (config.num_hidden_layers * (columns + rows * (1 + again)))
    copies = kv_multiplier(config, tp) if run.family == "llama" else 1
    if copies > 1:
        shared = 2 * qkv_features(run)[1]
        axis = "kv" if copies < tp else "tp"  # all of a model's ranks may hold the same head
        shapes = [(shared, hidden)] + [(shared,)] * config.attention_bias
        for shape in shapes * config.num_hidden_layers:
            yield Collective("all_reduce", copies, shape, run.dtype, axis)


def _step(run: Run) -> Iterator[Collective]:
    """Counts and loss; gradients, their norm, and with ZeRO-1 the weights."""
    dp, wide = run.dp, run.wide
    yield Collective("all_reduce", dp, (2,) if run.family == "bert" else (), torch.int64, "dp")
    yield Collective("all_reduce", dp, (), wide, "dp")

    held = parameters(run)
    gradient = wide if run.float32_gradients else run.dtype
    shares = [p.numel() for p in held if getattr(p, "sequence_parallel_enabled", False)]
    for flat in _buckets(shares, gradient):
        yield Collective("all_reduce", run.tp, (sum(flat),), gradient, "tp")
    yield Collective("all_reduce", run.tp, (), wide, "tp")  # the norm
    sizes = [p.numel() for p in held]
    if not run.zero:
        for flat in _buckets(sizes[::-1], gradient):
            yield Collective("all_reduce", dp, (sum(flat),), gradient, "dp")
        return
    yield Collective("all_reduce", dp, (), wide, "dp")  # the norm
    for bucket in _buckets(sizes, gradient):
        row = sum(shard_length(numel, dp) for numel in bucket)
        yield Collective("reduce_scatter", dp, (dp, row), gradient, "dp")
    for bucket in _buckets(sizes, run.dtype):
        row = sum(shard_length(numel, dp) for numel in bucket)
        yield Collective("all_gather", dp, (row,), run.dtype, "dp")


def _buckets(sizes: list[int], dtype: torch.dtype) -> list[list[int]]:
    """The sizes of the tensors of each bucket."""
    tensors = [torch.empty(size, dtype=dtype, device="meta") for size in sizes]
    return [[sizes[place] for place in places] for places in buckets_of(tensors)]
