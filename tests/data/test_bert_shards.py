"""The shards made from the real dump: what is in them, against the rules and the text."""

import json
import math
import unicodedata

import h5py
import numpy as np
import pytest

from data_scripts.corpus import ARTICLES, prepare_corpus
from data_scripts.wordpiece import check_vocab
from tutorial_lib.data.bert_hdf5 import PretrainingDataset, training_shards

SPECIAL = [0, 1, 2, 3, 4]
PAD, UNK, CLS, SEP, MASK = SPECIAL


@pytest.fixture(scope="module")
def rows(bert):
    """All training samples: key → one array."""
    shards = [h5py.File(path) for path in training_shards(bert.folder)]
    return {key: np.concatenate([shard[key][...] for shard in shards]) for key in shards[0]}


def within(count, trials, probability):
    """Five standard deviations: fails by chance once in two million times."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    return abs(count - trials * probability) < 5 * deviation


def test_keys_shapes_and_names(bert, rows):
    names = sorted(path.name for path in bert.folder.iterdir())
    training = [f"wiki_training_{i:04d}.hdf5" for i in range(8)]
    assert names == sorted(["manifest.json", "vocab.txt", "wiki_heldout.hdf5", *training])
    n = bert.counts["training_samples"]
    assert n == len(PretrainingDataset(bert.folder)) > 20_000
    assert {key: (values.shape, values.dtype) for key, values in rows.items()} == {
        "input_ids": ((n, 128), "i4"),
        "input_mask": ((n, 128), "i1"),
        "segment_ids": ((n, 128), "i1"),
        "masked_lm_positions": ((n, 20), "i4"),
        "masked_lm_ids": ((n, 20), "i4"),
        "next_sentence_labels": ((n,), "i1"),
    }
    assert len(check_vocab(bert.folder / "vocab.txt")) == bert.counts["vocab_size"] == 8192


def test_layout_of_a_sample(rows):
    ids, mask, segments = rows["input_ids"], rows["input_mask"], rows["segment_ids"]
    lengths = mask.sum(axis=1, dtype=int)
    columns = np.arange(128)
    assert np.array_equal(mask, columns < lengths[:, None])
    assert (ids[:, 0] == CLS).all() and (ids[mask == 0] == PAD).all()
    assert (ids[mask == 1] != PAD).all() and ids.max() < 8192
    assert ((ids == SEP).sum(axis=1) == 2).all() and ((ids == CLS).sum(axis=1) == 1).all()
    first_sep = (ids == SEP).argmax(axis=1)
    assert (ids[np.arange(len(ids)), lengths - 1] == SEP).all()
    assert (first_sep >= 2).all() and (lengths - first_sep >= 3).all()  # no half is empty
    assert np.array_equal(segments, (columns > first_sep[:, None]) & (mask == 1))


def test_masking_statistics(rows):
    positions, labels, ids = rows["masked_lm_positions"], rows["masked_lm_ids"], rows["input_ids"]
    used = positions > 0
    counts = used.sum(axis=1)
    lengths = rows["input_mask"].sum(axis=1, dtype=int)
    special = (ids == CLS) | (ids == SEP)
    candidates = lengths - 3
    expected = [min(20, max(1, round(0.15 * n)), c) for n, c in zip(lengths, candidates)]
    assert counts.tolist() == expected
    # The list comes first and ascends, what follows is zero.
    assert np.array_equal(used, np.arange(20) < counts[:, None])
    assert (np.diff(positions, axis=1)[used[:, 1:]] > 0).all() and (labels[~used] == 0).all()
    assert not np.isin(labels[used], [PAD, CLS, SEP, MASK]).any()

    row = np.nonzero(used)[0]
    now, before = ids[row, positions[used]], labels[used]
    assert not special[row, positions[used]].any()
    n = len(now)
    masked, kept = (now == MASK).sum(), (now == before).sum()
    assert within(masked, n, 0.8)
    assert within(kept, n, 0.1 + 0.1 / 8187)  # a random token is the same one by chance
    assert within(n - masked - kept, n, 0.1)
    assert not np.isin(now[(now != MASK) & (now != before)], SPECIAL).any()
    pairs = rows["next_sentence_labels"]  # half of them are random
    assert set(pairs.tolist()) == {0, 1} and within(pairs.sum(dtype=int), len(pairs), 0.5)


def plain(text):
    """Lower case, without accents and white space."""
    letters = unicodedata.normalize("NFD", text.lower())
    return "".join(c for c in letters if unicodedata.category(c) != "Mn" and not c.isspace())


def test_samples_decode_to_text_of_the_corpus(bert, data_dir):
    """Without our tokenizer: undo the masks, join the pieces, look the halves up in the text."""
    corpus = prepare_corpus(data_dir, progress=False)
    lines = (corpus.folder / ARTICLES).read_text(encoding="utf-8").splitlines()
    texts = [plain(json.loads(line)["text"]) for line in lines]
    vocab = (bert.folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    dataset = PretrainingDataset(bert.folder)
    checked = {0: 0, 1: 0}
    for index in range(0, len(dataset), 200):
        ids, segments, mask, labels, next_sentence = dataset[index]
        whole = labels.where(labels >= 0, ids)
        if UNK in whole:
            continue
        homes = []
        for side in (0, 1):
            tokens = [vocab[i] for i in whole[(mask == 1) & (segments == side)] if i not in SPECIAL]
            half = "".join(token.removeprefix("##") for token in tokens)
            homes.append({i for i, text in enumerate(texts) if half in text})
            assert homes[side], f"sample {index}: {half!r} is not in the corpus"
        shared = homes[0] & homes[1]
        if next_sentence == 0:
            assert shared
        elif len(homes[0]) == len(homes[1]) == 1:  # else a half so short that it is everywhere
            assert not shared
        checked[next_sentence.item()] += 1
    assert min(checked.values()) > 50, checked


def test_held_out_text_is_not_trained_on(bert):
    """A held-out sample's unmasked run of 20 tokens occurs in no training sample."""

    def runs(path):
        with h5py.File(path) as file:
            ids = file["input_ids"][...].astype("i4")
        windows = np.lib.stride_tricks.sliding_window_view(ids, 20, axis=1).reshape(-1, 20)
        clean = windows[(windows > MASK).all(axis=1)]
        return set(map(bytes, np.ascontiguousarray(clean)))

    held_out = runs(bert.folder / "wiki_heldout.hdf5")
    assert len(held_out) > 500
    assert not any(held_out & runs(path) for path in training_shards(bert.folder))
