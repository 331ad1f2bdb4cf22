"""A check for a fault that lets training run and never converge."""

import hashlib

import torch
from torch.utils._pytree import tree_flatten

from tutorial_lib.parallel_layers import parallel_state


def check_same_batch(batch) -> None:
    """Raise on all ranks that share layers unless each has the very same batch.

    For debugging, at any step: it exchanges a hash over the tensor-parallel group, on the host.

    Args:
        batch: tensors in lists, tuples or dicts.

    Raises:
        ValueError: the batches differ; on every rank of the group, with the hashes by rank.
    """
    leaves, structure = tree_flatten(batch)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            values = leaf.detach().cpu().contiguous()
            digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    group = parallel_state.get_tensor_model_parallel_group()
    digests = parallel_state.gather_python_object(digest.hexdigest()[:12], group)
    if len(set(digests)) > 1:
        ranks = torch.distributed.get_process_group_ranks(group)
        listed = ", ".join(f"rank {rank}: {found}" for rank, found in zip(ranks, digests))
        raise ValueError(
            f"ranks of one tensor-parallel group hold different batches ({listed}): sample by "
            f"data-parallel rank, not by global rank"
        )
