"""Which tokens make up sample i of a GPT data set: Megatron-LM's three indices, and their cache.

All epochs' documents are laid end to end in shuffled order (document index), the row of tokens is
cut into samples of S + 1 tokens, the last of which is the first of the next sample (sample index),
and the samples are shuffled in turn (shuffle index). For one seed the indices are those of
Megatron-LM, number by number: megatron/core/datasets/gpt_dataset.py and helpers.cpp. There the
sample index is a loop over documents in C++; here it is a cumulative sum and a binary search.
"""

import errno
import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np

from tutorial_lib.parallel_layers.utils import ensure_positive
from tutorial_lib.storage import write_file, write_text

log = logging.getLogger(__name__)

SEPARATE_BELOW = 0.80  # an emptier last epoch is shuffled by itself
DOCUMENTS = 1 << 20  # documents in memory at a time while building the sample index
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class Indices(NamedTuple):
    """Arrays, in memory or mapped from the cache.

    Attributes:
        document: int32 [epochs · documents], sequence numbers in the data set.
        sample: int32 [samples + 1, 2], where each sample starts: place in `document`, token in it.
        shuffle: uint32 [samples], the sample that is the i-th to be drawn.
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


class Epochs(NamedTuple):
    """How often the documents are laid end to end.

    Attributes:
        count: epochs.
        before_last: samples that start and end in all of them but the last.
        separate: the last is shuffled by itself.
    """

    count: int
    before_last: int
    separate: bool


def epochs_for(tokens: int, num_samples: int, seq_length: int) -> Epochs:
    """The epochs that `num_samples` samples take, at `tokens` tokens an epoch."""
    count = -(-(num_samples * seq_length + 1) // tokens)
    before_last = ((count - 1) * tokens - 1) // seq_length
    enough = int(SEPARATE_BELOW * ((tokens - 1) // seq_length))
    return Epochs(count, before_last, count > 1 and num_samples - before_last < enough)


def build_indices(
    lengths: np.ndarray, first: int, num_samples: int, seq_length: int, seed: int
) -> Indices:
    """The indices for at least `num_samples` samples, from as many epochs as that takes.

    Args:
        lengths: int32, tokens of each document of the split; not all 0.
        first: number of the first of them in the data set.
        num_samples: samples that will be drawn.
        seq_length: S; a sample is S + 1 tokens.
        seed: of both shuffles.

    Raises:
        ValueError: a number below 1.
    """
    ensure_positive(num_samples=num_samples, seq_length=seq_length)
    tokens = int(lengths.sum(dtype=np.int64))
    epochs, before_last, separate = epochs_for(tokens, num_samples, seq_length)

    rng = np.random.RandomState(seed)
    documents = np.arange(first, first + len(lengths), dtype=np.int32)
    document = np.tile(documents, epochs)
    together = (epochs - 1) * len(documents) if separate else len(document)
    rng.shuffle(document[:together])
    rng.shuffle(document[together:])
    sample = build_sample_index(lengths, document - np.int32(first), epochs * tokens, seq_length)
    total = len(sample) - 1
    shuffle = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    together = before_last if separate else total
    rng.shuffle(shuffle[:together])
    rng.shuffle(shuffle[together:])
    return Indices(document, sample, shuffle)


def build_sample_index(
    lengths: np.ndarray, document: np.ndarray, tokens: int, seq_length: int
) -> np.ndarray:
    """Where each sample starts: [samples + 1, 2] of places in `document` and tokens in it.

    Args:
        lengths: int32, tokens of each document.
        document: int32, numbers in `lengths`, in the order in which the documents are laid.
        tokens: of all of `document`.
        seq_length: S; sample i starts at token i · S of the row.
    """
    largest = max(len(document), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    index = np.empty(((tokens - 1) // seq_length + 1, 2), dtype)
    laid = done = 0  # tokens of the row, samples found
    for place in range(0, len(document), DOCUMENTS):
        ends = laid + np.cumsum(lengths[document[place : place + DOCUMENTS]], dtype=np.int64)
        stop = min(len(index), -(-int(ends[-1]) // seq_length))  # those that start before its end
        for low in range(done, stop, DOCUMENTS):
            high = min(low + DOCUMENTS, stop)
            starts = np.arange(low, high, dtype=np.int64) * seq_length
            found = np.searchsorted(ends, starts, side="right")
            index[low:high, 0] = place + found
            index[low:high, 1] = starts - np.where(found > 0, ends[found - 1], laid)
        laid, done = int(ends[-1]), stop
    assert laid == tokens and done == len(index)
    index[0] = 0  # also where the first documents are empty
    return index


def lengths_sha256(lengths: np.ndarray) -> str:
    """What tells the documents of one data set from those of another, without reading them."""
    return hashlib.sha256(np.ascontiguousarray(lengths, "<i4")).hexdigest()


def cached_indices(
    cache: Path, name: str, lengths: np.ndarray, first: int, num_samples: int, *order: int
) -> Indices:
    """`build_indices` from files of Megatron-LM's names in the folder `cache`, written if need be.

    Any number of processes may call it: one builds under a lock, the others wait and map the files.
    A side file, written last, says what they were made from, so files of other lengths, of another
    split or cut short are built anew. A folder that cannot be written to is used as it is; without
    a valid cache in it the indices are built in memory, with a warning.

    Args:
        cache: folder, created when missing.
        name: `{prefix}_{split}`, how the files' names begin.
        lengths, first, num_samples, order: see `build_indices`; the last are S and the seed.
    """
    stem = "{}_indexmap_{}ns_{}sl_{}s".format(name, num_samples, *order)
    side = cache / f"{stem}.json"
    paths = [cache / f"{stem}_{part}_idx.npy" for part in ("doc", "sample", "shuffle")]
    made_from = {"lengths_sha256": lengths_sha256(lengths), "first_document": first}

    if (found := _load(side, paths, made_from)) is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # The kernel releases the lock when its holder dies.
        with filelock.FileLock(cache / f".{stem}.lock"):
            if (found := _load(side, paths, made_from)) is None:  # else built while we waited
                side.unlink(missing_ok=True)
                sizes = {}
                for path, values in zip(paths, build_indices(lengths, first, num_samples, *order)):
                    written = write_file(path, lambda file, x=values: np.save(file, x))
                    sizes[path.name] = written.size
                write_text(side, json.dumps(made_from | {"bytes": sizes}, indent=1))
                log.info("%s: built in %s", stem, cache)
                found = _load(side, paths, made_from)
                assert found is not None
            return found
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        log.warning(
            "no permission to write to %s (%s): the sample index %s is built in memory, by each "
            "process; name another cache folder to keep it", cache, error.strerror, stem
        )  # fmt: skip
        return build_indices(lengths, first, num_samples, *order)


def _load(side: Path, paths: list[Path], made_from: dict) -> Indices | None:
    """The files' arrays if they are whole and were made from this; None, and why, if not."""
    if not all(path.is_file() for path in (side, *paths)):
        return None
    try:
        found = json.loads(side.read_bytes())
        if found != made_from | {"bytes": {path.name: path.stat().st_size for path in paths}}:
            raise ValueError("it is of other documents, or one of its files is cut short")
        indices = Indices(*(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths))
        document, sample, shuffle = (array.shape for array in indices)
        if (len(document), sample[1:], len(shuffle)) != (1, (2,), 1) or sample[0] != shuffle[0] + 1:
            raise ValueError(f"its arrays are of shapes {document}, {sample} and {shuffle}")
        return indices
    except (ValueError, EOFError, RecursionError) as reason:
        log.warning("the cached sample index %s is built anew: %s", side, reason)
        return None
