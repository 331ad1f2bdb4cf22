"""Notebook 06: a fused weight from shards, other shards of it, and the latest checkpoint."""

import re

import torch

from .judge import Exercise


def _fused(features: int, ranks: int) -> list[torch.Tensor]:
    """Each rank's rows of gate, then its rows of up, of two matrices of so many rows."""
    gate = torch.arange(2.0 * features).view(features, 2)
    pairs = zip(gate.chunk(ranks), (100 + gate).chunk(ranks))
    return [torch.cat(pair) for pair in pairs]


def _halves(shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gate and up."""
    return [torch.cat(half) for half in zip(*(shard.chunk(2) for shard in shards))]


def full_gate(namespace) -> Exercise:
    """`full_gate(shards)`."""
    trials = [(_fused(8, 4),), (_fused(6, 2),), (_fused(4, 1),)]
    if "shards" in namespace:  # those of the notebook's own checkpoint
        trials.append((namespace["shards"].weights("model.layers.0.mlp.gate_up_proj.weight"),))
    return Exercise(
        right=lambda shards: _halves(shards)[0],
        wrong={
            "each rank's rows of up are still between them": torch.cat,
            "these are the rows of up": lambda shards: _halves(shards)[1],
            "that is what the first half of the ranks holds": (
                lambda shards: torch.cat(shards).chunk(2)[0]
            ),
            "that is the gate of the first rank": lambda shards: shards[0].chunk(2)[0],
            "gate and up are one after the other, not row by row": (
                lambda shards: torch.cat(shards)[::2]
            ),
        },
        inputs=trials,
    )


def reshard(namespace) -> Exercise:
    """`reshard_fused(shards, T)`."""

    def sharded(halves, T):
        return [torch.cat(pair) for pair in zip(*(half.chunk(T) for half in halves))]

    return Exercise(
        right=lambda shards, T: sharded(_halves(shards), T),
        wrong={
            "that shards the concatenated files: gate and up of a rank lie apart in them": (
                lambda shards, T: list(torch.cat(shards).chunk(T))
            ),
            "that shards gate and up as one: the first ranks get no up": (
                lambda shards, T: list(torch.cat(_halves(shards)).chunk(T))
            ),
            "a rank's rows of gate come before its rows of up": (
                lambda shards, T: sharded(_halves(shards)[::-1], T)
            ),
            "these are the shards of gate alone": (
                lambda shards, T: list(_halves(shards)[0].chunk(T))
            ),
            "that is the whole weight on every rank": (
                lambda shards, T: [torch.cat(_halves(shards))] * T
            ),
        },
        inputs=[(_fused(8, 4), 2), (_fused(8, 2), 4), (_fused(12, 3), 2), (_fused(4, 4), 1)],
    )


def latest(namespace) -> Exercise:
    """`latest(folders)`."""

    def step(name):
        return int(re.match(r"step_(\d+)", name)[1])

    def largest(names, key=step):
        return max(names, key=key, default=None)

    def complete(folders):
        return [name for name, files in folders.items() if "done" in files]

    full, part = ["model", "optim", "scheduler.pt", "done"], ["model", "optim"]
    return Exercise(
        right=lambda folders: largest(complete(folders)),
        wrong={
            "that one has no done: the run was killed while it was saved": largest,
            "names are compared as texts: step_900 is not later than step_1000": (
                lambda folders: largest(complete(folders), key=str)
            ),
            "that is the one listed last; the order of a folder means nothing": (
                lambda folders: next(reversed(complete(folders)), None)
            ),
            "that is the earliest": lambda folders: min(complete(folders), key=step, default=None),
            "if the latest has no done, an earlier one may": (
                lambda folders: largest(folders) if largest(folders) in complete(folders) else None
            ),
        },
        inputs=[
            ({"step_1000": full, "step_900": full, "step_80": full},),
            ({"step_900": full, "step_1000": full, "step_1100.incomplete": part},),
            ({"step_80": part},),
            ({"step_5": full, "step_20": full, "step_7": full, "step_30": part},),
        ],
    )
