"""The `.bin`/`.idx` format: golden bytes, megatron-core in both directions, damaged files."""

import pickle
import struct

import numpy as np
import pytest

from tests.megatron_core import import_megatron
from tutorial_lib.data.indexed_dataset import IndexedDataset, bin_path, idx_path, token_dtype
from tutorial_lib.data.indexed_dataset_builder import IndexedDatasetBuilder

DOCUMENTS = [[1, 2, 3], [4, 5], [6]]
BIN = "010002000300040005000600"
IDX = (
    "4d4d4944494458000001000000000000000803000000000000000400000000000000030000000200000001000000"
    "000000000000000006000000000000000a0000000000000000000000000000000100000000000000020000000000"
    "00000300000000000000"
)


def build(prefix, documents, dtype="<u2", vocab_size=None):
    with IndexedDatasetBuilder(prefix, dtype, vocab_size) as builder:
        for document in documents:
            builder.add_documents(document, [len(document)])
    return prefix


@pytest.fixture
def golden(tmp_path):
    return build(tmp_path / "golden", DOCUMENTS, token_dtype(50257), 50257)


def test_golden_bytes(golden):
    assert bin_path(golden).read_bytes().hex() == BIN
    assert idx_path(golden).read_bytes().hex() == IDX
    data = IndexedDataset(golden)
    assert [data[i].tolist() for i in range(len(data))] == DOCUMENTS
    assert data.num_tokens == 6 and data.dtype == np.uint16 and not data[0].flags.writeable
    assert data.get(0, 1).tolist() == [2, 3] and data.get(0, 1, 1).tolist() == [2]
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32
    assert pickle.loads(pickle.dumps(data))[1].tolist() == [4, 5] and len(pickle.dumps(data)) < 500
    assert [path.name for path in sorted(golden.parent.iterdir())] == ["golden.bin", "golden.idx"]


@pytest.mark.parametrize("lengths", [[2], [3, 0], [], [4]])
def test_builder_refuses_lengths_that_are_not_those_of_the_tokens(tmp_path, lengths):
    with pytest.raises(ValueError, match=rf"{len(lengths)} lengths, from \d, sum to .* sum 3"):
        with IndexedDatasetBuilder(tmp_path / "a", "<u2") as builder:
            builder.add_documents([1, 2, 3], lengths)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [[70000], [-1], [100]])
def test_builder_refuses_a_token_out_of_range(tmp_path, bad):
    old = build(tmp_path / "a", DOCUMENTS)
    with pytest.raises(ValueError, match=rf"a\.bin, document 1: token 1 has id {bad[0]}"):
        build(tmp_path / "a", [[1], [2, *bad]], "<u2", 100)
    assert bin_path(old).read_bytes().hex() == BIN, "the earlier data set is as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("change", [-2, -1, 2])
def test_truncated_bin_or_index_of_another_data_set(golden, change):
    data = bin_path(golden).read_bytes()
    bin_path(golden).write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(ValueError, match=rf"golden\.bin has {12 + change} bytes.*golden\.idx"):
        IndexedDataset(golden)


@pytest.mark.parametrize(
    "offset, new, message",
    [
        (0, b"TNTIDX\0\0", "not an index of Megatron-LM"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "type code 6"),
        (18, struct.pack("<Q", 4), "is damaged"),  # number of sequences
        (26, struct.pack("<Q", 0), "is damaged"),  # length of the document index
        (34, struct.pack("<i", -3), "byte pointers"),
        (34, struct.pack("<i", 2), "byte pointers"),
        (54, struct.pack("<q", 8), "byte pointers"),
        (70, struct.pack("<q", 1), "document index"),
        (78, struct.pack("<q", 3), "document index"),
        (94, struct.pack("<q", 2), "document index"),
        (78, struct.pack("<qq", 2**63 - 1, -2), "document index"),  # their difference overflows
        (18, struct.pack("<QQ", 2**63, 2**63), "is damaged"),
        (34, struct.pack("<iii", 2**31 - 1, 2**31 - 1, 2**31 - 1), "byte pointers"),
        (54, struct.pack("<q", -(2**63)), "byte pointers"),
    ],
)
def test_damaged_index(golden, offset, new, message):
    data = bytearray(idx_path(golden).read_bytes())
    data[offset : offset + len(new)] = new
    idx_path(golden).write_bytes(data)
    with pytest.raises(ValueError, match=rf"golden\.idx.*{message}"):
        IndexedDataset(golden)


def random_documents(count, vocab_size=1000):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, n) for n in rng.integers(1, 50, count)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_core_writes_the_same_bytes_and_each_reads_the_other(tmp_path, dtype):
    megatron, _, _ = import_megatron()
    documents = random_documents(200)
    ours = build(tmp_path / "ours", documents, dtype)
    theirs = tmp_path / "theirs"
    builder = megatron.IndexedDatasetBuilder(str(bin_path(theirs)), dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(idx_path(theirs)))
    for path in (bin_path, idx_path):
        assert path(ours).read_bytes() == path(theirs).read_bytes()
    read_by_it, read_by_us = megatron.IndexedDataset(str(ours)), IndexedDataset(theirs)
    assert len(read_by_it) == len(read_by_us) == 200
    for i, document in enumerate(documents):
        assert np.array_equal(read_by_it[i], document) and np.array_equal(read_by_us[i], document)
    assert np.array_equal(read_by_it.document_indices, read_by_us.document_indices)
