"""Batches for data-parallel ranks that go on after a stop exactly where training was."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.utils import ensure_positive


class ResumableBatchSampler(DistributedSampler):
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
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=True)
        ensure_positive(batch_size=batch_size)
        if len(dataset) < batch_size * num_replicas:
            raise ValueError(
                f"{len(dataset)} samples do not fill a batch of {batch_size} on each of "
                f"{num_replicas} data-parallel ranks"
            )
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

    def __iter__(self) -> Iterator[list[int]]:
        return (indices for _, indices in self.placed_batches())

    def placed_batches(self) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """The batches from the position on, each with its place: epoch, and first sample in it."""
        epoch, offset, size = self.epoch, self.offset, self.global_batch_size
        while True:
            order = self._order(epoch)
            for start in range(offset, len(order) - size + 1, size):
                first = start + self.rank * self.batch_size
                yield (epoch, first), order[first : first + self.batch_size].tolist()
            epoch, offset = epoch + 1, 0

    def __len__(self) -> int:
        raise TypeError("the stream has no end; batches_per_epoch is the length of an epoch")

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset), device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed + epoch)
        return torch.randperm(len(self.dataset), generator=generator, device="cpu")

    def advance(self, batches: int = 1) -> None:
        """Count `batches` batches of each rank as consumed.

        On a new sampler, `advance(steps * accumulation)` is the position after so many steps.
        """
        _check_count("batches", batches)
        self.consumed_samples += batches * self.global_batch_size
        left = (len(self.dataset) - self.offset) // self.global_batch_size
        if batches < left:
            self.offset += batches * self.global_batch_size
        else:
            epochs, rest = divmod(batches - left, self.batches_per_epoch)
            self.epoch += 1 + epochs
            self.offset = rest * self.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; for a loop that counts epochs itself."""
        _check_count("epoch", epoch)
        self.epoch, self.offset = epoch, 0
        self.consumed_samples = epoch * self.batches_per_epoch * self.global_batch_size

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


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, Integral) or count < 0:
        raise ValueError(f"{name} is {count!r}, must be an integer of at least 0")


class _PlacedBatches:
    """What the loader is given as its batch sampler: the seed of each batch beside its indices."""

    def __init__(self, sampler: ResumableBatchSampler):
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        for place, indices in self.sampler.placed_batches():
            yield (self.sampler.seed, *place), indices


class _SeededReads(Dataset):
    """Reads and collates whole batches, each with random streams that its seed begins."""

    def __init__(self, dataset: Dataset, collate: Callable):
        self.dataset, self.collate = dataset, collate

    def __getitems__(self, batch: tuple[tuple[int, ...], list[int]]):
        seed, indices = batch
        with _random_streams(seed):
            if hasattr(self.dataset, "__getitems__"):
                return self.collate(self.dataset.__getitems__(indices))
            return self.collate([self.dataset[index] for index in indices])


@contextmanager
def _random_streams(seed: tuple[int, ...]) -> Iterator[None]:
    """Inside the block the host's streams of Python, NumPy and PyTorch begin with `seed`."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(seed).generate_state(4)
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


def data_loader(
    dataset: Dataset,
    sampler: ResumableBatchSampler,
    *,
    num_workers: int = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    collate_fn: Callable = default_collate,
) -> DataLoader:
    """A loader over the sampler's batches, whose random numbers depend on a batch's place alone.

    Augmentation draws the same numbers for a batch whether a run was resumed before it or not, with
    any number of workers, and on all tensor-parallel ranks. (PyTorch seeds a worker once, when it
    starts.) The random streams of the training itself stand still meanwhile.

    Args:
        dataset, sampler: the samples, and which of them.
        num_workers, worker_init_fn: as for `DataLoader`.
        collate_fn: makes a batch of a list of samples; it may draw random numbers too.
    """
    return DataLoader(
        _SeededReads(dataset, collate_fn),
        batch_sampler=_PlacedBatches(sampler),
        num_workers=num_workers,
        worker_init_fn=worker_init_fn,
        collate_fn=_as_it_is,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator("cpu"),  # not the training's own stream
    )
