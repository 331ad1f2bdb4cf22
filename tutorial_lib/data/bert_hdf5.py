"""BERT pretraining samples from HDF5 shards, and the data loader of the developer guide."""

import os
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tutorial_lib.backends import current_backend
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.utils import ensure_positive

PATTERN = "*_training_*.hdf5"
KEYS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
IGNORED = -100  # label of a token that is not to be predicted
LARGEST_RATIO = 1032  # of data to a file's bytes: what gzip reaches


class PretrainingDataset(Dataset):
    """The samples of one shard, or of all training shards of a folder, by a running index.

    An item is what the tutorial's loop unpacks, all int64: `[input_ids, segment_ids, input_mask,
    masked_lm_labels, next_sentence_labels]`, the first four `[S]`, the last a scalar.

    No HDF5 handle outlives a call, since a handle that forked workers share returns wrong data.
    Contiguous data are memory-mapped, so ranks on one host share their pages; compressed data
    (as other writers make them) are held in memory from a shard's first use on.

    Args:
        input_file: a shard, or a folder with files named `*_training_*.hdf5`.
        max_pred_length: most predictions used of a sample; default all that the shards hold.
        vocab_size: every sample is checked for ids that the model does not have; by default, for
            ids from 2³¹ on.

    Raises:
        FileNotFoundError: no such shard, or no training shard in the folder.
        ValueError: data sets that are not integers of fitting shapes within the file, or
            `max_pred_length` above what is there. A sample with values out of range raises it when
            it is read.
    """

    def __init__(
        self,
        input_file: str | os.PathLike,
        max_pred_length: int | None = None,
        vocab_size: int | None = None,
    ):
        self.paths = training_shards(input_file)
        shapes = [_shape(path) for path in self.paths]
        _, self.seq_length, predictions = shapes[0]
        for path, (_, *lengths) in zip(self.paths, shapes):
            if lengths != [self.seq_length, predictions]:
                raise ValueError(
                    f"{path} has sequence length and predictions {lengths}, "
                    f"{self.paths[0]} has {[self.seq_length, predictions]}"
                )
        self.max_pred_length = predictions if max_pred_length is None else max_pred_length
        if not 1 <= self.max_pred_length <= predictions:
            raise ValueError(
                f"max_pred_length is {self.max_pred_length}, must be from 1 to {predictions}, the "
                f"predictions in {self.paths[0]}"
            )
        ids = 2**31 if vocab_size is None else vocab_size
        ends = ids, 2, 2, self.seq_length, ids, 2
        self._ends_of_values = dict(zip(KEYS, ends))  # each value is at least 0 and below
        self._ends = list(accumulate(rows for rows, _, _ in shapes))
        self._arrays: dict[int, dict[str, np.ndarray]] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = self._read(index)
        positions = sample["masked_lm_positions"][: self.max_pred_length]
        (padding,) = np.nonzero(positions == 0)  # 0 is [CLS], never predicted: it ends the list
        count = padding[0] if len(padding) else len(positions)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        labels[positions[:count]] = sample["masked_lm_ids"][:count]
        values = [sample[key] for key in ("input_ids", "segment_ids", "input_mask")]
        values += [labels, sample["next_sentence_labels"]]
        return [torch.as_tensor(value, device="cpu") for value in values]

    def _read(self, index: int) -> dict[str, np.ndarray]:
        shard = bisect_right(self._ends, index)
        if shard not in self._arrays:
            self._arrays[shard] = _open(self.paths[shard])
        row = index - (self._ends[shard - 1] if shard else 0)
        sample = {}
        for key, array in self._arrays[shard].items():
            sample[key] = values = array[row].astype(np.int64)
            if values.min() < 0 or values.max() >= self._ends_of_values[key]:
                raise ValueError(
                    f"{self.paths[shard]}, {key!r}: sample {row} has values from {values.min()} to "
                    f"{values.max()}, they must be from 0 to {self._ends_of_values[key] - 1}"
                )
        return sample

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_arrays": {}}  # a spawned worker maps the files itself


pretraining_dataset = PretrainingDataset  # the guide's spelling


def create_pretraining_dataset(
    input_file: str | os.PathLike,
    max_pred_length: int | None,
    mini_batch_size: int,
    worker_init: Callable[[int], None] | None = None,
) -> DataLoader:
    """The guide's loader: the same batches on all tensor-parallel ranks of one data-parallel rank.

    Call `loader.sampler.set_epoch(epoch)` before each epoch, or each has the same order. What does
    not fill a batch on every rank is left out, another part in each epoch. To resume within an
    epoch, use `ResumableBatchSampler`.

    Raises:
        ValueError: fewer samples than one batch for each data-parallel rank.
    """
    train_data = pretraining_dataset(input_file=input_file, max_pred_length=max_pred_length)
    dp_size = parallel_state.get_data_parallel_world_size()
    ensure_positive(mini_batch_size=mini_batch_size)
    if len(train_data) < mini_batch_size * dp_size:
        raise ValueError(
            f"{len(train_data)} samples in {input_file} do not fill a batch of {mini_batch_size} "
            f"on each of {dp_size} data-parallel ranks"
        )
    rank = parallel_state.get_data_parallel_rank()
    train_sampler = DistributedSampler(train_data, dp_size, rank, drop_last=True)
    return DataLoader(
        train_data,
        sampler=train_sampler,
        batch_size=mini_batch_size,
        num_workers=0,
        worker_init_fn=worker_init,
        drop_last=True,
        pin_memory=current_backend() == "cuda",
    )


def training_shards(input_file: str | os.PathLike) -> list[Path]:
    """The shard itself, or a folder's training shards in the order of their names."""
    path = Path(input_file)
    shards = [path] if path.is_file() else sorted(path.glob(PATTERN))
    if not shards:
        raise FileNotFoundError(f"{path} is neither a shard nor a folder with {PATTERN}")
    return shards


def _read_all(path: Path, read: Callable[[h5py.Dataset], Any]) -> dict[str, Any]:
    """What `read` returns for each data set of a shard: integers, stored within the file.

    HDF5 can refer to other files (links, external storage, virtual data sets), and h5py returns
    Python objects for references and values of variable length; no shard needs either.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    key, found = None, {}
    try:
        with h5py.File(path) as file:
            for key in KEYS:
                if type(file.get(key, getlink=True)) is not h5py.HardLink:
                    raise ValueError("missing, or a link")
                data = file[key]
                if not isinstance(data, h5py.Dataset) or data.dtype.kind not in "iu":
                    raise ValueError("not a data set of integers")
                if data.external or data.is_virtual:
                    raise ValueError("stored outside of the file")
                if data.shape is None or data.nbytes > LARGEST_RATIO * path.stat().st_size:
                    raise ValueError(f"of shape {data.shape}, which the file is too small for")
                found[key] = read(data)
    except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
        where = "not a readable HDF5 file" if key is None else f"data set {key!r}"
        raise ValueError(f"{path}: {where}: {error}") from error
    return found


def _shape(path: Path) -> tuple[int, int, int]:
    """(samples, sequence length, predictions) of a shard."""
    shapes = _read_all(path, lambda data: data.shape)
    tokens, predictions = shapes["input_ids"], shapes["masked_lm_positions"]
    fitting = [tokens] * 3 + [predictions] * 2 + [tokens[:1]]
    if (
        list(shapes.values()) != fitting
        or not len(tokens) == len(predictions) == 2
        or tokens[0] != predictions[0]
        or 0 in tokens + predictions
    ):
        raise ValueError(f"{path}: shapes {shapes} are not [N, S], [N, P] and [N], none of them 0")
    return (*tokens, predictions[1])


def _open(path: Path) -> dict[str, np.ndarray]:
    def read(data: h5py.Dataset) -> np.ndarray:
        offset = data.id.get_offset()  # None where the data are in chunks
        if offset is None or data.file.userblock_size:
            return data[...]
        return np.memmap(path, data.dtype, "r", offset, data.shape)

    return _read_all(path, read)
