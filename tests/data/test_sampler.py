"""The position in the data: resuming equals never having stopped."""

import gc
import os
import random

import numpy as np
import pytest
import torch

from tutorial_lib.data.sampler import ResumableBatchSampler, data_loader

ACCUMULATION = 2


class Numbers(torch.utils.data.Dataset):
    """Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def make(size=24, batch=2, dp=2, rank=0, **options):
    return ResumableBatchSampler(Numbers(size), batch, num_replicas=dp, rank=rank, **options)


def train(steps, state=None, num_workers=0, **options):
    """What one rank's loop sees: its samples by optimizer step, and its state after the last."""
    sampler = make(**options)
    if state is not None:
        sampler.load_state_dict(state)
    batches = iter(data_loader(sampler.dataset, sampler, num_workers=num_workers))
    seen = []
    for _ in range(steps):
        seen.append(sum((next(batches).tolist() for _ in range(ACCUMULATION)), []))
        sampler.advance(ACCUMULATION)
    return seen, sampler.state_dict()


def test_an_uninterrupted_run():
    ranks = [train(9, rank=rank)[0] for rank in (0, 1)]
    for epoch in range(3):  # 3 optimizer steps of 2 × 2 × 2 samples each
        seen = [sum(rank[3 * epoch : 3 * epoch + 3], []) for rank in ranks]
        assert sorted(seen[0] + seen[1]) == list(range(24))
    assert ranks[0][:3] != ranks[0][3:6] != ranks[0][6:]
    assert train(9)[0] == train(9, num_workers=2)[0]
    assert train(9)[0] != train(9, seed=1)[0]
    assert train(3, shuffle=False)[0] == [[0, 1, 4, 5], [8, 9, 12, 13], [16, 17, 20, 21]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 3, 7])  # within epoch 0, at its end, within epoch 2
def test_stop_and_resume(stop, num_workers):
    for rank in (0, 1):
        whole, end = train(9, rank=rank)
        before, state = train(stop, rank=rank, num_workers=num_workers)
        assert state["consumed_samples"] == stop * 8
        assert (state["epoch"], state["offset"]) == (stop // 3, stop % 3 * 8)
        after, end_again = train(9 - stop, state, rank=rank, num_workers=num_workers)
        assert before + after == whole
        assert end_again == end


class Augmented(Numbers):
    """Draws from each of the host's random streams."""

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()])


def noisy(samples):
    return torch.stack(samples) + torch.rand(())


def numbers(steps, state=None, num_workers=2):
    sampler = ResumableBatchSampler(Augmented(24), 2, num_replicas=2, rank=1)
    if state is not None:
        sampler.load_state_dict(state)
    loader = data_loader(sampler.dataset, sampler, num_workers=num_workers, collate_fn=noisy)
    batches, found = iter(loader), []
    for _ in range(steps):
        found.append(next(batches))
        sampler.advance()
    return torch.stack(found), sampler.state_dict()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_resume_draws_the_numbers_that_follow(num_workers):
    """Whatever the workers: those of augmentation and of collation, over the end of an epoch."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    whole, _ = numbers(9)
    assert len(whole.unique()) == whole.numel()
    for stop in (2, 7):
        first, state = numbers(stop, num_workers=num_workers)
        second, _ = numbers(9 - stop, state, num_workers=num_workers)
        assert torch.equal(torch.cat([first, second]), whole)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after, "the training's own streams stand still"


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 4), (4, 2), (4, 1)])
def test_another_data_parallel_size_goes_on_from_the_consumed_samples(before, after):
    steps = 4 // before  # 16 of 48 samples
    state = train(steps, dp=before, size=48)[1]
    assert (state["epoch"], state["consumed_samples"]) == (0, 16)
    consumed, rest = [], []
    for rank in range(before):
        consumed += sum(train(steps, dp=before, size=48, rank=rank)[0], [])
    for rank in range(after):
        seen, end = train(8 // after, state, dp=after, size=48, rank=rank)
        rest += sum(seen, [])
    assert sorted(consumed + rest) == list(range(48))  # none repeated, none skipped
    assert (end["epoch"], end["offset"], end["consumed_samples"]) == (1, 0, 48)


def test_the_order_of_samples_does_not_depend_on_the_number_of_ranks():
    def blocks(dp, batch):
        streams = [iter(make(dp=dp, batch=batch, rank=rank)) for rank in range(dp)]
        return [set(sum((next(stream) for stream in streams), [])) for _ in range(9)]

    assert blocks(1, 8) == blocks(2, 4) == blocks(4, 2) == blocks(8, 1)


def test_an_epoch_that_does_not_divide():
    size = 30  # 7 batches of 2 × 2, and 2 samples left out
    whole = train(12, size=size)[0]
    for stop in range(12):
        before, state = train(stop, size=size)
        assert before + train(12 - stop, state, size=size)[0] == whole
        assert (state["epoch"], state["offset"]) == (stop * 2 // 7, stop * 2 % 7 * 4)


class Collected:
    """Garbage that only the garbage collector finds, and a file that says who did."""

    def __init__(self, file):
        self.file, self.cycle = file, self

    def __del__(self):
        self.file.write_text(str(os.getpid()))


class Collecting(Numbers):
    def __getitem__(self, index):
        gc.collect()
        return index


def test_a_worker_leaves_the_garbage_of_its_rank_alone(tmp_path):
    """A process group in it would crash the worker."""
    gc.disable()
    try:
        Collected(tmp_path / "collected")
        sampler = make()
        next(iter(data_loader(Collecting(24), sampler, num_workers=2)))
        assert not (tmp_path / "collected").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "collected").read_text() == str(os.getpid())


def test_wrong_input():
    with pytest.raises(ValueError, match="3 samples do not fill a batch of 2 on each of 2"):
        make(size=3)
    for batch in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"batch_size is {batch}"):
            make(batch=batch)
    state = make().state_dict()
    for options, message in [
        ({"size": 25}, "dataset_size 24, not 25"),
        ({"seed": 7}, "seed 0, not 7"),
        ({"shuffle": False}, "shuffle True, not False"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**options).load_state_dict(state)
