"""Batches for data-parallel ranks that go on after a stop exactly where training was."""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from tutorial_lib.backends import current_backend
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.utils import ensure_positive


class PlacedBatch(list):
    """The indices of a batch; `place` is the sampler's seed, the epoch and the first sample."""

    place: tuple[int, int, int]


class ResumableBatchSampler(Sampler):
    """An endless stream of batches of indices for one data-parallel rank, with a position.

    Each epoch is a new permutation of the data, drawn from `seed + epoch`, and is cut into global
    micro-batches of `batch_size × num_replicas` samples in a row, of which each rank takes its
    `batch_size` in a row, as in Megatron-LM. So the order in which samples are consumed does not
    depend on the number of ranks, and all ranks get equally many batches. What does not fill the
    last one is left out.

    The position is what the training loop has consumed: it moves by `advance` only, which the loop
    calls after each optimizer step. Workers that fetch ahead do not move it, and a step that was
    cut short is done again. Iterating begins at the position and never ends:

        batches = iter(data_loader(dataset, sampler, num_workers=2))
        for step in range(steps):
            for _ in range(accumulation):
                batch = next(batches)
                ...
            sampler.advance(accumulation)

    Args:
        dataset: sized.
        batch_size: samples of a micro-batch on one rank.
        num_replicas, rank: default the data-parallel size and rank; with tensor parallelism the
            global ones would give the ranks that share a layer different samples.
        shuffle: False keeps the data's order in each epoch.
        seed: the same on all ranks.

    Raises:
        ValueError: fewer samples than one global micro-batch, or a `batch_size` below 1.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ):
        if num_replicas is None:
            num_replicas = parallel_state.get_data_parallel_size()
        if rank is None:
            rank = parallel_state.get_data_parallel_rank()
        ensure_positive(batch_size=batch_size, num_replicas=num_replicas)
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank is {rank}, must be from 0 to {num_replicas - 1}")
        if len(dataset) < batch_size * num_replicas:
            raise ValueError(
                f"{len(dataset)} samples do not fill a batch of {batch_size} on each of "
                f"{num_replicas} data-parallel ranks"
            )
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.batch_size = batch_size
        self.consumed_samples = 0  # by all ranks, in all epochs
        self.offset = 0  # of these, in the current epoch

    @property
    def global_batch_size(self) -> int:
        """Samples of a micro-batch on all ranks together."""
        return self.batch_size * self.num_replicas

    @property
    def batches_per_epoch(self) -> int:
        """Batches that a whole epoch gives each rank."""
        return len(self.dataset) // self.global_batch_size

    def __iter__(self) -> Iterator["PlacedBatch"]:
        """The batches from the position on."""
        epoch, offset, size = self.epoch, self.offset, self.global_batch_size
        while True:
            order = self._order(epoch)
            for start in range(offset, len(order) - size + 1, size):
                first = start + self.rank * self.batch_size
                batch = PlacedBatch(order[first : first + self.batch_size].tolist())
                batch.place = self.seed, epoch, first
                yield batch
            epoch, offset = epoch + 1, 0

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset), device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed + epoch)
        return torch.randperm(len(self.dataset), generator=generator, device="cpu")

    def advance(self, batches: int = 1) -> None:
        """Count `batches` batches of each rank as consumed.

        On a new sampler, `advance(steps * accumulation)` is the position after so many steps.
        """
        self.consumed_samples += batches * self.global_batch_size
        left = (len(self.dataset) - self.offset) // self.global_batch_size
        if batches < left:
            self.offset += batches * self.global_batch_size
        else:
            epochs, rest = divmod(batches - left, self.batches_per_epoch)
            self.epoch += 1 + epochs
            self.offset = rest * self.global_batch_size

    def state_dict(self) -> dict[str, int | bool]:
        """The position in samples, the same on all ranks and for any number of ranks."""
        return {
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "offset": self.offset,
            "dataset_size": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go on from a saved position, with any batch size and number of ranks.

        Takes effect at the next `iter`.

        Raises:
            ValueError: the position is one in other data or in another order.
        """
        mine = self.state_dict()
        for name in ("dataset_size", "shuffle", "seed"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"the saved data position is for {name} {state[name]}, not {mine[name]}"
                )
        self.consumed_samples = state["consumed_samples"]
        self.epoch, self.offset = state["epoch"], state["offset"]
        if len(self.dataset) - self.offset < self.global_batch_size:
            self.epoch, self.offset = self.epoch + 1, 0  # what is left does not fill a batch


class _SeededReads(Dataset):
    """Reads and collates whole batches, each with random streams that its place begins."""

    def __init__(self, dataset: Dataset, collate: Callable):
        self.dataset, self.collate = dataset, collate

    def __getitems__(self, batch: PlacedBatch):
        with _random_streams(batch.place):
            if hasattr(self.dataset, "__getitems__"):
                return self.collate(self.dataset.__getitems__(batch))
            return self.collate([self.dataset[index] for index in batch])


@contextmanager
def _random_streams(place: tuple[int, ...]) -> Iterator[None]:
    """Inside the block the host's streams of Python, NumPy and PyTorch begin with `place`."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(place).generate_state(4)
    random.seed(words.tobytes())
    np.random.seed(words)
    torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _as_it_is(batch):
    return batch


def _leave_interrupts_to_the_rank(_: int) -> None:
    """Ctrl-C in a terminal reaches a loader's workers too, which would end under it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def data_loader(
    dataset: Dataset,
    sampler: ResumableBatchSampler,
    *,
    num_workers: int = 0,
    collate_fn: Callable = default_collate,
) -> DataLoader:
    """A loader over the sampler's batches, whose random numbers depend on a batch's place alone.

    Augmentation draws the same numbers for a batch whether a run was resumed before it or not, with
    any number of workers, and on all tensor-parallel ranks. (PyTorch seeds a worker once, when it
    starts.) The random streams of the training itself stand still meanwhile.

    Args:
        dataset, sampler: the samples, and which of them.
        num_workers: processes that read ahead, for each rank.
        collate_fn: makes a batch of a list of samples; it may draw random numbers too.
    """
    return DataLoader(
        _SeededReads(dataset, collate_fn),
        batch_sampler=sampler,
        num_workers=num_workers,
        worker_init_fn=_leave_interrupts_to_the_rank,
        collate_fn=_as_it_is,
        pin_memory=current_backend() == "cuda",
        generator=torch.Generator("cpu"),  # not the training's own stream
    )
