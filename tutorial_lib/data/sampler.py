"""Batches for data-parallel ranks that go on after a stop exactly where training was."""

from collections.abc import Callable, Iterator
from numbers import Integral

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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
        epoch, offset, size = self.epoch, self.offset, self.global_batch_size
        while True:
            order = self._order(epoch)
            for start in range(offset, len(order) - size + 1, size):
                first = start + self.rank * self.batch_size
                yield order[first : first + self.batch_size].tolist()
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
        raise ValueError(f"{name} is {count!r}, must be a whole number from 0 on")


def data_loader(
    dataset: Dataset,
    sampler: ResumableBatchSampler,
    *,
    num_workers: int = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    collate_fn: Callable | None = None,
) -> DataLoader:
    """A loader over the sampler's batches whose workers' random state depends on its rank alone.

    PyTorch seeds workers from the process's own random state, which tensor-parallel ranks may not
    share: augmentation would give them different tensors for the same sample.
    """
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        worker_init_fn=worker_init_fn,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator("cpu").manual_seed(sampler.seed + sampler.rank),
    )
