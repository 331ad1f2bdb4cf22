"""GPT samples: Megatron-LM's order, the cache on disk, splits, and batches by consumed samples."""

import json
import logging
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.megatron_core import import_megatron
from tests.standin import as_nobody
from tutorial_lib.data import gpt_index
from tutorial_lib.data.gpt_dataset import GPTDataset, build_gpt_datasets, split_documents
from tutorial_lib.data.gpt_index import build_indices, cached_indices
from tutorial_lib.data.indexed_dataset import IndexedDataset
from tutorial_lib.data.indexed_dataset_builder import IndexedDatasetBuilder

GOLDEN = np.array([3, 2, 1], np.int32)


@pytest.fixture
def make(tmp_path):
    """`make(lengths)`: prefix of a data set whose tokens count from 0, through all documents."""

    def build(lengths, name="data"):
        with IndexedDatasetBuilder(tmp_path / name, np.int32) as builder:
            builder.add_documents(np.arange(np.sum(lengths)), lengths)
        return tmp_path / name

    return build


def random_lengths(count, seed=0, low=1, high=40):
    return np.random.default_rng(seed).integers(low, high, count).astype(np.int32)


def test_golden_vector():
    indices = build_indices(GOLDEN, 0, 5, 2, 1234)
    assert indices.document.tolist() == [2, 1, 2, 0, 1, 0]
    assert indices.sample.tolist() == [[0, 0], [1, 1], [3, 0], [3, 2], [4, 1], [5, 1]]
    assert indices.shuffle.tolist() == [2, 0, 4, 3, 1]
    assert [array.dtype for array in indices] == [np.int32, np.int32, np.uint32]


@pytest.mark.parametrize("seed", range(20))
def test_indices_equal_those_of_megatron_core(monkeypatch, seed):
    _, gpt, helpers = import_megatron()
    monkeypatch.setattr(gpt_index, "DOCUMENTS", (1, 3, 1 << 20)[seed % 3])
    rng = np.random.default_rng(seed)
    lengths, first = random_lengths(rng.integers(1, 30), seed, 0), int(rng.integers(5))
    lengths[rng.integers(len(lengths))] += 2 + 48 * (seed % 2)  # one longer than many samples
    seq_length, wanted = int(rng.integers(1, 30)), int(rng.integers(1, 500))
    indices = build_indices(lengths, first, wanted, seq_length, seed)

    # Its number of epochs and its rule on the last one, then its three functions.
    per_epoch = int(lengths.sum())
    epochs = next(e for e in range(1, 10**6) if e * per_epoch >= wanted * seq_length + 1)
    sans_last = ((epochs - 1) * per_epoch - 1) // seq_length
    separate = epochs > 1 and wanted - sans_last < int(0.8 * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    documents = np.arange(first, first + len(lengths), dtype=np.int32)
    document = gpt._build_document_index(documents, epochs, random, separate)
    all_lengths = np.concatenate((np.full(first, 99, np.int32), lengths))
    sample = helpers.build_sample_idx(all_lengths, document, seq_length, epochs, per_epoch)
    total = len(sample) - 1
    shuffle = gpt._build_shuffle_index(sans_last if separate else total, total, random)
    for ours, theirs in zip(indices, (document, sample, shuffle), strict=True):
        assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype


@pytest.mark.parametrize("split, wanted", [("100,0,0", (90, 0, 0)), ("8,1,1", (300, 20, 3))])
def test_samples_equal_those_of_megatron_core(make, tmp_path, split, wanted):
    """Its whole data set class, on our files: the same tokens in the same order."""
    indexed_dataset, gpt, _ = import_megatron()
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    prefix = make(random_lengths(53))
    config = gpt.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=([str(prefix)], None),
        split=split,
        path_to_cache=str(tmp_path / "theirs"),
        tokenizer=SimpleNamespace(vocab_size=10**6, eod=0, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wanted_of = [samples or None for samples in wanted]
    theirs = BlendedMegatronDatasetBuilder(gpt.GPTDataset, wanted_of, lambda: True, config).build()
    ours = build_gpt_datasets(prefix, split, wanted, 16, 1234)
    for our, their in zip(ours, theirs, strict=True):
        assert (our is None) == (their is None)
        if our is not None:
            assert len(our) == len(their)
            for i in range(len(our)):
                text = our[i]["text"]
                assert torch.equal(text[:-1], their[i]["tokens"])
                assert torch.equal(text[1:], their[i]["labels"])


@pytest.mark.parametrize(
    "split, n, expected",
    [
        ("100,0,0", 10, [10, 0, 0]),
        ("61.0,25.1,37.1", 264, [131, 54, 79]),  # megatron-core's, on every version of Python
        ("949,50,1", 1000, [949, 50, 1]),
        ("949,50,1", 106, [101, 5, 0]),
        ("0.9,0.1", 10, [9, 1, 0]),
        ("1", 7, [7, 0, 0]),
        ("1,1,1", 10, [3, 4, 3]),
        ("0,1,0", 10, [0, 10, 0]),
    ],
)
def test_split(split, n, expected):
    ranges = split_documents(split, n)
    assert list(ranges) == ["train", "valid", "test"]
    assert [len(part) for part in ranges.values()] == expected
    assert sum(map(list, ranges.values()), []) == list(range(n))


def test_a_token_that_the_model_does_not_have(make):
    prefix = make([9, 9])
    data = build_gpt_datasets(prefix, "1", (8, 0, 0), 4, 0, vocab_size=18)[0]
    assert len([data[i] for i in range(len(data))]) >= 8
    data = build_gpt_datasets(prefix, "1", (8, 0, 0), 4, 0, vocab_size=17)[0]
    with pytest.raises(ValueError, match=r"data\.bin, sample .* has id 17"):
        [data[i] for i in range(len(data))]


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,1", "0,0,0", "nan", "inf,1"])
def test_wrong_split(split):
    with pytest.raises(ValueError, match=f"split {split!r}"):
        split_documents(split, 10)


def test_numbers_and_splits_that_give_no_sample(make):
    prefix = make([9, 9])
    for samples, seq_length, message in [(5, 4, "'valid' hold no token, 5"), (-5, 4, "below 0")]:
        with pytest.raises(ValueError, match=message):
            build_gpt_datasets(prefix, "100,0,0", (5, samples, 0), seq_length, 0)
    with pytest.raises(ValueError, match="seq_length is 0"):
        build_gpt_datasets(prefix, "1", (5, 0, 0), 0, 0)


# The cache


STEM = "data_train_indexmap_30ns_8sl_7s"
PARTS = [f"{STEM}_{part}_idx.npy" for part in ("doc", "sample", "shuffle")]


def train_data(prefix, **options):
    return build_gpt_datasets(prefix, "9,1,0", (30, 0, 0), 8, 7, **options)[0]


def open_on_rank(prefix, cache):
    with mock.patch.object(gpt_index, "build_indices", wraps=build_indices) as built:
        data = train_data(prefix, cache_dir=cache)
    return built.call_count, data[3]["text"]


def test_one_rank_builds_for_all(make, tmp_path, ranks):
    prefix = make(random_lengths(20))
    found = ranks(open_on_rank, prefix, tmp_path / "cache", world_size=2)
    assert sum(built for built, _ in found) == 1
    assert all(torch.equal(text, found[0][1]) for _, text in found)
    found = ranks(open_on_rank, prefix, tmp_path / "cache", world_size=2)
    assert sum(built for built, _ in found) == 0


def test_a_folder_that_is_read_only(make, caplog):
    """Without a cache the index is built in memory, with a warning; a cache there is used."""
    prefix = make(random_lengths(20))
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder, found = Path(name), []
        for suffix in (".bin", ".idx"):
            shutil.copy(prefix.with_suffix(suffix), folder)
        for _ in range(2):
            folder.chmod(0o555)
            caplog.clear()
            with as_nobody():
                data = train_data(folder / "data")
                kept = isinstance(data.indices.sample, np.memmap)
                found.append((kept, data[0]["text"], "no permission" in caplog.text))
            folder.chmod(0o755)
            text = train_data(folder / "data")[0]["text"]  # this user's makes the cache
    assert [one[::2] for one in found] == [(False, True), (True, False)]
    assert all(torch.equal(one[1], text) for one in found)


@pytest.mark.parametrize("change", ["lengths", "split", "cut", "missing", "side", "marker"])
def test_a_stale_or_damaged_cache_is_built_anew(make, tmp_path, caplog, change):
    prefix = make(random_lengths(20))
    old = [np.array(array) for array in train_data(prefix).indices]
    lengths, documents = random_lengths(20), range(18)
    side = tmp_path / f"{STEM}.json"
    if change == "lengths":
        lengths = lengths[::-1].copy()
        make(lengths)  # other documents under the same name
    elif change == "split":
        documents = range(2, 20)
    elif change == "cut":
        with open(tmp_path / PARTS[1], "r+b") as file:
            file.truncate(200)
    elif change == "missing":
        (tmp_path / PARTS[2]).unlink()
    elif change == "side":
        side.write_text("[]")
    elif change == "marker":  # a run was killed before it wrote the side file
        side.unlink()
        (tmp_path / PARTS[0]).write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        data = GPTDataset(IndexedDataset(prefix), "train", documents, 30, 8, 7)
    part = lengths[documents.start : documents.stop]
    expected = build_indices(part, documents.start, 30, 8, 7)
    for found, array in zip(data.indices, expected):
        assert np.array_equal(found, array)
    assert all(isinstance(array, np.memmap) for array in data.indices)
    changed = any(not np.array_equal(a, b) for a, b in zip(old, expected))
    assert changed == (change in ("lengths", "split"))
    assert ("built anew" in caplog.text) == (change not in ("missing", "marker"))
    assert json.loads(side.read_text())["first_document"] == documents.start


def test_a_full_disk_leaves_no_half_cache(tmp_path, monkeypatch):
    def no_space(file, values, **kwargs):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", no_space)
    with pytest.raises(OSError, match="No space"):
        cached_indices(tmp_path, "data_train", GOLDEN, 0, 5, 2, 1234)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    monkeypatch.undo()
    indices = cached_indices(tmp_path, "data_train", GOLDEN, 0, 5, 2, 1234)
    assert indices.shuffle.tolist() == [2, 0, 4, 3, 1]
