"""Writing Megatron-LM's indexed data set: from documents, or from other data sets."""

import os
import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from tutorial_lib.data.indexed_dataset import (
    BLOCK,
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    check_tokens,
    idx_path,
)


class IndexedDatasetBuilder:
    """Writes an indexed data set, document by document, beside its place and then renames it.

        with IndexedDatasetBuilder(prefix, token_dtype(vocab_size)) as builder:
            for tokens in documents:
                builder.add_document(tokens)

    Leaving the block by an exception leaves no file, and an earlier data set as it was. In memory
    are 4 bytes for each sequence and 8 for each document, no tokens. A document without tokens is
    left out, and counted in `empty_documents`.

    Args:
        prefix: path without `.bin` and `.idx`; its folder is created.
        dtype: the tokens' type, one of `DTYPES`.
        vocab_size: tokens must be below; default what the type holds.
    """

    def __init__(
        self, prefix: str | os.PathLike, dtype: np.dtype | type, vocab_size: int | None = None
    ):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {np.dtype(name): code for code, name in DTYPES.items()}
        if self.dtype not in codes:
            raise ValueError(f"tokens of type {self.dtype}: the format has none but integers")
        self._code = codes[self.dtype]
        most = int(np.iinfo(self.dtype).max) + 1
        self.vocab_size = most if vocab_size is None else vocab_size
        if not 0 < self.vocab_size <= most:
            raise ValueError(f"a vocabulary of {vocab_size} does not fit into {self.dtype}")
        self.empty_documents = 0
        self.num_tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._open = 0  # tokens of the sequence that has not ended
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._partial = f"{self.prefix}.{os.getpid()}.partial"
        self._file = open(bin_path(self._partial), "wb")

    def add_tokens(self, tokens: ArrayLike) -> None:
        """Append to the sequence that is open; so a document need not be in memory as a whole.

        Raises:
            ValueError: an id is not in the vocabulary, or the sequence is longer than int32 says.
        """
        longer = self._open + len(tokens)
        if longer > np.iinfo(np.int32).max:
            raise ValueError(f"{self.prefix}: a sequence of {longer:,} tokens exceeds int32")
        self._write(tokens)
        self._open = longer

    def _write(self, tokens: ArrayLike) -> None:
        values = np.asarray(tokens)
        if values.size == 0:
            return
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise ValueError(f"tokens are {values.dtype} {values.shape}, not a row of integers")
        where = f"{bin_path(self.prefix)}, document {len(self._documents) - 1}"
        check_tokens(values, self.vocab_size, where)
        self._file.write(np.ascontiguousarray(values, self.dtype))
        self.num_tokens += len(values)

    def end_sequence(self) -> None:
        """End the open sequence, if it has tokens."""
        if self._open:
            self._lengths.append(self._open)
            self._open = 0

    def end_document(self) -> None:
        """End the open sequence and the document."""
        self.end_sequence()
        if len(self._lengths) > self._documents[-1]:
            self._documents.append(len(self._lengths))
        else:
            self.empty_documents += 1

    def add_document(self, tokens: ArrayLike) -> None:
        """A document of one sequence; an end-of-document token is the caller's to append."""
        self.add_tokens(tokens)
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: Iterable[int]) -> None:
        """Documents of one sequence each, one after the other in `tokens`; none may be empty."""
        lengths = array("i", lengths)
        if self._open or sum(lengths) != len(tokens) or (lengths and min(lengths) < 1):
            raise ValueError(f"{len(tokens)} tokens are not those of documents of {lengths[:9]} …")
        self._write(tokens)
        start = len(self._lengths) + 1
        self._lengths.extend(lengths)
        self._documents.extend(range(start, start + len(lengths)))

    def add_index(self, prefix: str | os.PathLike) -> None:
        """All documents of another data set.

        Raises:
            ValueError: its tokens are of another type.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(
                f"{other.prefix} has tokens of type {other.dtype}, {self.prefix} of {self.dtype}: "
                f"tokenize one of them again"
            )
        self._documents.extend((other.document_indices[1:] + len(self._lengths)).tolist())
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self.num_tokens += other.num_tokens
        with open(bin_path(prefix), "rb") as tokens:
            shutil.copyfileobj(tokens, self._file, 1 << 20)

    def finalize(self) -> None:
        """Write the index and put both files in their place."""
        assert self._open == 0, "end_document before finalize"
        self._file.close()
        lengths = np.frombuffer(self._lengths, "<i4") if self._lengths else np.empty(0, "<i4")
        with open(idx_path(self._partial), "wb") as idx:
            counts = len(self._lengths), len(self._documents)
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, *counts))
            idx.write(lengths)
            start = 0
            for first in range(0, len(lengths), BLOCK):
                ends = np.cumsum(lengths[first : first + BLOCK], dtype="<i8")
                ends = start + ends * self.dtype.itemsize
                idx.write(np.concatenate(([start], ends[:-1])).astype("<i8"))
                start = int(ends[-1])
            idx.write(np.frombuffer(self._documents, "<i8"))
        # Without its index there is no data set: never a new half beside an old one.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(bin_path(self._partial), bin_path(self.prefix))
        os.replace(idx_path(self._partial), idx_path(self.prefix))

    @property
    def partial_files(self) -> tuple[Path, Path]:
        """What it writes before both files take their place."""
        return bin_path(self._partial), idx_path(self._partial)

    def discard(self) -> None:
        """Remove what was written."""
        self._file.close()
        for path in self.partial_files:
            path.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self.finalize()
        finally:
            self.discard()


def merge_datasets(prefixes: list[str | os.PathLike], output: str | os.PathLike) -> IndexedDataset:
    """One data set of all documents of others, in order; ValueError if their types differ."""
    if not prefixes:
        raise ValueError("no data set to merge")
    if any(bin_path(prefix).resolve() == bin_path(output).resolve() for prefix in prefixes):
        raise ValueError(f"{output} is one of the data sets to merge: name another output")
    with IndexedDatasetBuilder(output, IndexedDataset(prefixes[0]).dtype) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
    return IndexedDataset(output)
