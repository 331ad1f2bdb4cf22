"""Every row once, on the right ranks, whatever the workers; wrong input is named."""

import os

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tutorial_lib.data.bert_hdf5 import KEYS, PretrainingDataset, create_pretraining_dataset
from tutorial_lib.data.sampler import ResumableBatchSampler, data_loader


def rows_of(batch):
    """Which rows a batch of `make_shard`'s holds."""
    return batch[0][:, 0].tolist()


def test_order_dtype_and_labels_of_a_sample(make_shard):
    dataset = PretrainingDataset(make_shard("a_training_0.hdf5", 4, first=10))
    ids, segments, mask, labels, next_sentence = dataset[3]
    assert ids.tolist() == [13] * 8 and segments.tolist() == [0] * 8 and mask.tolist() == [1] * 8
    assert labels.tolist() == [-100, -100, 70, -100, -100, 71, -100, -100]
    assert next_sentence.shape == () and next_sentence == 1
    assert all(values.dtype == torch.int64 for values in dataset[3])
    shorter = PretrainingDataset(dataset.paths[0], max_pred_length=1)
    assert shorter[3][3].tolist() == [-100, -100, 70, -100, -100, -100, -100, -100]
    batch = next(iter(DataLoader(dataset, batch_size=4)))
    assert [values.shape for values in batch] == [(4, 8)] * 4 + [(4,)]


@pytest.mark.parametrize(
    "positions, expected",
    [([2, 5, 7], {2: 70, 5: 71, 7: 72}), ([0, 5, 7], {}), ([2, 0, 7], {2: 70})],
)
def test_the_first_zero_ends_the_labels(make_shard, positions, expected):
    masked = dict(masked_lm_positions=[positions], masked_lm_ids=[[70, 71, 72]])
    path = make_shard("a.hdf5", 1, **masked)
    labels = PretrainingDataset(path)[0][3].tolist()
    assert {place: label for place, label in enumerate(labels) if label != -100} == expected


@pytest.mark.parametrize("dtype", ["i8", "u2", ">i4"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_any_integer_type_compressed_or_not(make_shard, dtype, compression):
    ids = np.arange(24).reshape(3, 8).astype(dtype)
    path = make_shard("a.hdf5", 3, compression=compression, input_ids=ids)
    dataset = PretrainingDataset(path)
    assert [dataset[i][0].tolist() for i in range(3)] == np.arange(24).reshape(3, 8).tolist()


def test_wrong_files(make_shard, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=str(empty)):
        PretrainingDataset(empty)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        PretrainingDataset(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no HDF5")
    wrong = {
        "not a readable HDF5 file": tmp_path / "text",
        "data set 'segment_ids': missing": make_shard("a.hdf5", 2, segment_ids=None),
        "shapes": make_shard("b.hdf5", 2, input_mask=np.ones((2, 9), dtype="i1")),
        "none of them 0": make_shard("c.hdf5", 0),
    }
    for message, path in wrong.items():
        with pytest.raises(ValueError, match=message) as caught:
            PretrainingDataset(path)
        assert str(path) in str(caught.value)
    os.mkfifo(tmp_path / "empty" / "a_training_0.hdf5")
    with pytest.raises(ValueError, match="not a regular file"):
        PretrainingDataset(empty)
    good = make_shard("d_training_0.hdf5", 2)
    with pytest.raises(ValueError, match="max_pred_length is 4, must be from 1 to 3"):
        PretrainingDataset(good, max_pred_length=4)
    make_shard("d_training_1.hdf5", 2, seq_length=9)
    with pytest.raises(ValueError, match=r"\[9, 3\].*\[8, 3\]"):
        PretrainingDataset(tmp_path)
    with pytest.raises(IndexError, match="sample 2 of 2"):
        PretrainingDataset(good)[2]


def replaced(key, **options):
    def change(file):
        del file[key]
        file.create_dataset(key, **options)

    return change


def linked(link):
    def change(file):
        del file["input_ids"]
        file["input_ids"] = link

    return change


def virtual(file):
    del file["input_ids"]
    layout = h5py.VirtualLayout((4, 8), "i4")
    layout[:] = h5py.VirtualSource("other.hdf5", "input_ids", (4, 8))
    file.create_virtual_dataset("input_ids", layout)


def group(file):
    del file["input_ids"]
    file.create_group("input_ids")


def first_value(key, value):
    def change(file):
        file[key][(0,) * file[key].ndim] = value

    return change


def terabytes(file):
    for key in KEYS:
        shape = (10**10, *file[key].shape[1:])
        del file[key]
        file.create_dataset(key, shape=shape, dtype="i4", chunks=(1, *shape[1:]))


@pytest.mark.parametrize(
    "change, message",
    [
        (replaced("input_ids", shape=(4, 8), dtype=h5py.vlen_dtype(np.int32)), "of integers"),
        (replaced("input_ids", shape=(4, 8), dtype=h5py.string_dtype()), "of integers"),
        (replaced("input_ids", shape=(4, 8), dtype=h5py.ref_dtype), "of integers"),
        (replaced("input_ids", data=np.ones((4, 8))), "of integers"),
        (replaced("input_ids", shape=(4, 8), dtype=[("a", "i4")]), "of integers"),
        (replaced("input_ids", data=h5py.Empty("i4")), "shape None"),
        (replaced("input_ids", shape=(4, 8), dtype="i4", external=[(__file__, 0, 128)]), "outside"),
        (linked(h5py.ExternalLink("other.hdf5", "/input_ids")), "a link"),
        (linked(h5py.SoftLink("/input_mask")), "a link"),
        (virtual, "outside"),
        (group, "of integers"),
        (terabytes, "too small"),
        (first_value("input_ids", 300), "sample 0 has values from 0 to 300.* from 0 to 299"),
        (first_value("input_ids", -1), "from 0 to 299"),
        (first_value("masked_lm_ids", 300), "from 0 to 299"),
        (first_value("masked_lm_positions", 8), "from 0 to 7"),
        (first_value("masked_lm_positions", -3), "from 0 to 7"),
        (first_value("segment_ids", 2), "from 0 to 1"),
        (first_value("input_mask", -1), "from 0 to 1"),
        (first_value("next_sentence_labels", 2), "from 0 to 1"),
        (replaced("input_ids", data=np.full((4, 8), 2**63 + 5, "u8")), "from 0 to 299"),
    ],
)
def test_hostile_shards_are_refused_by_file_and_data_set(make_shard, change, message):
    path = make_shard("a.hdf5", 4)
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(ValueError, match=message) as caught:
        PretrainingDataset(path, vocab_size=300)[0]
    assert str(path) in str(caught.value) and any(repr(key) in str(caught.value) for key in KEYS)


def guide_epoch(path, batch, epoch=0):
    loader = create_pretraining_dataset(path, 3, batch, None)
    loader.sampler.set_epoch(epoch)
    return [rows_of(b) for b in loader]


def stream_epoch(path, batch, num_workers):
    sampler = ResumableBatchSampler(PretrainingDataset(path), batch)
    batches = iter(data_loader(sampler.dataset, sampler, num_workers=num_workers))
    return [rows_of(next(batches)) for _ in range(sampler.batches_per_epoch)]


@pytest.mark.parametrize(
    "function, args", [(guide_epoch, ()), (stream_epoch, (0,)), (stream_epoch, (2,))]
)
def test_every_row_once_in_an_epoch_and_the_same_on_tensor_parallel_ranks(
    ranks, make_shard, tmp_path, function, args
):
    for shard in range(4):
        make_shard(f"w_training_{shard}.hdf5", 4, first=4 * shard)
    found = ranks(function, tmp_path, 2, *args, world_size=4, tp=2)
    first, second = found[0], found[2]
    assert found == [first, first, second, second]
    assert [len(batch) for batch in first + second] == [2] * 8
    assert sorted(sum(first + second, [])) == list(range(16))


def test_damaged_shards_are_named(make_shard):
    path = make_shard("a.hdf5", 4)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=4):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            dataset = PretrainingDataset(path, vocab_size=300)
            [dataset[row] for row in range(len(dataset))]
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 20


class Noisy(torch.utils.data.Dataset):
    """Augmentation: another tensor each time."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.rand(3), index


def augmented():
    torch.manual_seed(torch.distributed.get_rank())  # as a run that seeds each rank's dropout does
    sampler = ResumableBatchSampler(Noisy(), 2)
    batches = iter(data_loader(sampler.dataset, sampler, num_workers=2))
    return [next(batches) for _ in range(4)]


def test_augmented_tensors_are_the_same_on_tensor_parallel_ranks(ranks):
    found = ranks(augmented, world_size=4, tp=2)
    noise = [torch.cat([batch[0] for batch in batches]) for batches in found]
    assert torch.equal(noise[0], noise[1]) and torch.equal(noise[2], noise[3])
    assert not torch.isin(noise[0], noise[2]).any() and len(noise[0].unique()) == 24
