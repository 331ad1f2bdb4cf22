"""Micro-batches for GPT on the model's device."""

import signal
from collections.abc import Iterator

import torch

from tutorial_lib.data.gpt_dataset import GPTDataset
from tutorial_lib.data.sampler import ResumableBatchSampler, data_loader
from tutorial_lib.parallel_layers import comm, parallel_state


def gpt_batches(
    dataset: GPTDataset,
    sampler: ResumableBatchSampler,
    device: torch.device,
    *,
    num_workers: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """An endless stream of `{"input_ids", "targets"}`, each int64 `[B, S]`, from the position on.

    Each rank of a tensor-parallel group reads the same samples, which costs no communication.

    Args:
        dataset: samples of S + 1 tokens.
        sampler: which of them, and the batch size B.
        device: of the model.
        num_workers: processes that read ahead, for each rank.

    Raises:
        Exception: what a rank met while reading, on every rank.
    """
    loader = data_loader(
        dataset, sampler, num_workers=num_workers, worker_init_fn=_leave_interrupts_to_the_rank
    )
    stream = iter(loader)
    while True:
        text, error = None, None
        try:
            text = next(stream)["text"].to(device)
        except Exception as raised:  # raised again below, on every rank
            error = raised
        comm.raise_on_all(error, parallel_state.get_world_group())
        yield {"input_ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _leave_interrupts_to_the_rank(_: int) -> None:
    """Ctrl-C in a terminal reaches a loader's workers too, which would end under it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
