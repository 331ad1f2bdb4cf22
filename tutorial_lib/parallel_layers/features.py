"""Notes on activations: whether their last dimension holds all features of a layer, or one rank's
shard of them.

A layer or a loss given the wrong one would often find that sizes fit and compute a wrong number.
So whatever shards or gathers features leaves a note, and whatever takes them reads it.
"""

from typing import NamedTuple

import torch


class Features(NamedTuple):
    """What is noted about the last dimension of a tensor."""

    whole: int  # features in all, without padding
    shard: int  # features of one rank, with padding
    gathered: bool  # the tensor holds them all, or one rank's shard


def note_features(output: torch.Tensor, whole: int, shard: int, gathered: bool) -> torch.Tensor:
    """Leaves the note on `output` and in its autograd graph; returns `output`."""
    output.parallel_features = Features(whole, shard, gathered)
    if output.grad_fn is not None:
        output.grad_fn.metadata["parallel_features"] = output.parallel_features
    return output


def noted_features(x: torch.Tensor) -> Features | None:
    """The note on `x`, or on what `x` was computed from by functions of one tensor (views, casts,
    activations; not matrix products or reductions over ranks); None if there is none.

    Without an autograd graph only the tensor that a region or a layer returned has its note.
    """
    if hasattr(x, "parallel_features"):
        return x.parallel_features
    node = x.grad_fn
    while node is not None:
        if "parallel_features" in node.metadata:
            return node.metadata["parallel_features"]
        inputs = [source for source, _ in node.next_functions if source is not None]
        mixes = any(word in node.name().lower() for word in ("mm", "linear", "reduce"))
        node = None if mixes or len(inputs) != 1 else inputs[0]
    return None


def holds_shard(x: torch.Tensor) -> bool | None:
    """True if the features of `x` are one rank's shard, False if they are all, None if unknown."""
    noted = noted_features(x)
    if noted is None:
        return None
    return not noted.gathered or x.size(-1) < min(noted.whole, noted.shard + 1)
