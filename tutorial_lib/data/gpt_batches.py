"""Micro-batches for GPT on the model's device, read by each rank or by one for its group."""

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
    broadcast: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """An endless stream of `{"input_ids", "targets"}`, each int64 `[B, S]`, from the position on.

    The ranks of a tensor-parallel group get the same samples. By default each reads them for
    itself, which costs no communication. Where the files are on a slow or distant disk, one can
    read for the group: a T-th of the reads.

    Args:
        dataset: samples of S + 1 tokens.
        sampler: which of them, and the batch size B.
        device: of the model.
        num_workers: processes that read ahead, for each rank that reads.
        broadcast: the first rank of each tensor-parallel group reads, the others are sent.

    Raises:
        Exception: what a rank met while reading, on every rank.
    """
    reads = not broadcast or parallel_state.get_tensor_model_parallel_rank() == 0
    stream = None
    if reads:
        loader = data_loader(
            dataset, sampler, num_workers=num_workers, worker_init_fn=_leave_interrupts_to_the_rank
        )
        stream = iter(loader)
    shape = (sampler.batch_size, dataset.seq_length + 1)
    while True:
        text, error = torch.zeros(shape, dtype=torch.int64, device="cpu"), None
        try:
            if reads:
                text = next(stream)["text"]
        except Exception as raised:  # raised again below, on every rank
            error = raised
        comm.raise_on_all(error, parallel_state.get_world_group())
        text = text.to(device)
        if broadcast:
            text = comm.broadcast(text)
        yield {"input_ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _leave_interrupts_to_the_rank(_: int) -> None:
    """Ctrl-C in a terminal reaches a loader's workers too, which would end under it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
