"""Samples of S + 1 tokens for GPT, from an indexed data set, in Megatron-LM's order."""

import os
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from .gpt_index import cached_indices, epochs_for, lengths_sha256
from .indexed_dataset import IndexedDataset, bin_path, check_tokens

SPLITS = ("train", "valid", "test")


class GPTDataset(Dataset):
    """At least `num_samples` samples, already shuffled: a sampler must not shuffle again.

    The order is fixed by the data set, the documents, S, `num_samples` and the seed, so the number
    of samples consumed is all the state there is. With `ResumableBatchSampler(shuffle=False)` the
    batches are Megatron-LM's: each data-parallel rank has its slice of the next B · ranks samples.

    Args:
        indexed: the tokens.
        split: one of `SPLITS`; in the cache's file names.
        documents: sequences of `indexed` to draw from.
        num_samples: samples that training will draw, over all epochs.
        seq_length: S.
        seed: of the shuffles.
        vocab_size: if given, every sample is checked for ids that the model does not have.
        cache_dir: folder of the index files; default the data set's own.

    Raises:
        ValueError: no tokens in these documents, or a number out of range.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        split: str,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        *,
        vocab_size: int | None = None,
        cache_dir: str | os.PathLike | None = None,
    ):
        prefix = Path(indexed.prefix)
        lengths = indexed.sequence_lengths[documents.start : documents.stop]
        if not lengths.any():
            raise ValueError(
                f"{bin_path(prefix)}: the {len(lengths)} documents of the split {split!r} hold no "
                f"token, {num_samples} samples are wanted of it"
            )
        self.indexed, self.split, self.vocab_size = indexed, split, vocab_size
        self._given = lengths, documents.start, num_samples, seq_length, seed
        folder = prefix.parent if cache_dir is None else Path(cache_dir)
        self.indices = cached_indices(folder, f"{prefix.name}_{split}", *self._given)

    @cached_property
    def order(self) -> dict[str, int | str]:
        """All that the order of samples follows from; equal for data sets with the same order.

        Only checkpoints need it, and it goes through the lengths of all documents.
        """
        lengths, first, num_samples, seq_length, seed = self._given
        epochs = epochs_for(int(lengths.sum(dtype=np.int64)), num_samples, seq_length)
        return {
            "seed": seed,
            "seq_length": seq_length,
            "epochs": epochs.count,
            "last_epoch_by_itself": epochs.separate,
            "first_document": first,
            "lengths_sha256": lengths_sha256(lengths),
        }

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`{"text": int64 [S + 1]}`: input is `text[:-1]`, what it should predict `text[1:]`."""
        tokens = np.concatenate([self.indexed.get(*part) for part in self.parts(index)])
        if self.vocab_size is not None:
            where = f"{bin_path(self.indexed.prefix)}, sample {index} of the split {self.split!r}"
            check_tokens(tokens, self.vocab_size, where)
        return {"text": torch.from_numpy(tokens.astype(np.int64))}

    def parts(self, index: int) -> list[tuple[int, int, int]]:
        """What the sample is made of: (sequence of the data set, offset in it, tokens) each."""
        row = int(self.indices.shuffle[index])
        (place, offset), (last, end) = self.indices.sample[row : row + 2].tolist()
        parts = []
        for document in range(place, last + 1):
            sequence = int(self.indices.document[document])
            stop = end + 1 if document == last else int(self.indexed.sequence_lengths[sequence])
            parts.append((sequence, offset, stop - offset))
            offset = 0
        return parts


def split_weights(split: str) -> dict[str, float]:
    """The shares of train, valid and test, from weights as in "949,50,1"; missing ones are 0.

    Raises:
        ValueError: no weights, more than three, or one that is not a number from 0 on.
    """
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError as error:
        raise ValueError(f"split {split!r} is not numbers and commas, as in 949,50,1") from error
    if len(weights) > 3 or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"split {split!r} must be one to three numbers, none below 0")
    if sum(weights) == 0:
        raise ValueError(f"split {split!r} gives no document to any split")
    weights += [0.0] * (3 - len(weights))
    total = float(np.sum(weights))  # sum() rounds in another way from Python 3.12 on
    return {name: weight / total for name, weight in zip(SPLITS, weights)}


def split_documents(split: str, documents: int) -> dict[str, range]:
    """Cut documents into train, valid and test by `split_weights`.

    The cuts are the rounded running sums of the weights, as in megatron-core.
    """
    start, ranges = 0.0, {}
    for name, weight in split_weights(split).items():
        stop = start + weight
        ranges[name] = range(round(start * documents), round(stop * documents))
        start = stop
    return ranges


def build_gpt_datasets(
    prefix: str | os.PathLike,
    split: str,
    num_samples: tuple[int, int, int],
    seq_length: int,
    seed: int,
    **options,
) -> list[GPTDataset | None]:
    """Train, valid and test data; None where no sample is wanted.

    Args:
        prefix: of the `.bin` and `.idx` files.
        split: weights, see `split_documents`.
        num_samples: of train, valid and test.
        seq_length, seed, **options: see `GPTDataset`.

    Raises:
        ValueError: samples are wanted of a split that has no document or no token.
    """
    indexed = IndexedDataset(prefix)
    ranges = split_documents(split, len(indexed))
    if any(samples < 0 for samples in num_samples):
        raise ValueError(f"num_samples is {num_samples}, none may be below 0")
    return [
        GPTDataset(indexed, name, documents, samples, seq_length, seed, **options)
        if samples
        else None
        for (name, documents), samples in zip(ranges.items(), num_samples, strict=True)
    ]
