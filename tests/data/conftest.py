"""The real corpus, prepared once a session, and small shards with known rows."""

import h5py
import numpy as np
import pytest

from data_scripts.prepare import prepare


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def bert(data_dir):
    """The default data set, by one worker."""
    return prepare("bert", data_dir=data_dir, workers=1, progress=False)


@pytest.fixture
def make_shard(tmp_path):
    """`make_shard(name, rows, first=0)`: a shard whose row r reads `first + r` in every token."""

    def make(name, rows, first=0, seq_length=8, compression=None, **changes):
        ids = np.arange(first, first + rows, dtype="i4")
        data = {
            "input_ids": np.repeat(ids[:, None], seq_length, axis=1),
            "input_mask": np.ones((rows, seq_length), dtype="i1"),
            "segment_ids": np.zeros((rows, seq_length), dtype="i1"),
            "masked_lm_positions": np.tile(np.array([2, 5, 0], dtype="i4"), (rows, 1)),
            "masked_lm_ids": np.tile(np.array([70, 71, 0], dtype="i4"), (rows, 1)),
            "next_sentence_labels": (ids % 2).astype("i1"),
        }
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            for key, values in (data | changes).items():
                if values is not None:
                    file.create_dataset(key, data=values, compression=compression)
        return path

    return make
