"""Writing Megatron-LM's indexed data set."""

import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from tutorial_lib.storage import put_in_place

from .indexed_dataset import DTYPES, HEADER, MAGIC, VERSION, bin_path, check_tokens, idx_path


class IndexedDatasetBuilder:
    """Writes an indexed data set, document by document, beside its place and then renames it.

        with IndexedDatasetBuilder(prefix, token_dtype(vocab_size)) as builder:
            builder.add_documents(tokens, lengths)

    If the block raises, no file is left, and an earlier data set stays as it was. Memory holds 4
    bytes for each document, and no tokens.

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
            raise ValueError(f"dtype is {self.dtype}, must be one of {', '.join(DTYPES.values())}")
        self._code = codes[self.dtype]
        self.vocab_size = vocab_size or int(np.iinfo(self.dtype).max) + 1
        self.empty_documents = 0  # how many the caller left out
        self.num_tokens = 0
        self._lengths = array("i")
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._partial = f"{self.prefix}.{os.getpid()}.partial"
        self._file = open(bin_path(self._partial), "wb")  # noqa: SIM115 (open until the end)

    def add_documents(self, tokens: ArrayLike, lengths: Iterable[int]) -> None:
        """Documents whose tokens are concatenated; none may be empty, and end-of-document tokens
        are the caller's to append.

        Raises:
            ValueError: an id is not in the vocabulary; lengths that are not those of the tokens.
        """
        values, lengths = np.asarray(tokens), list(lengths)
        if sum(lengths) != len(values) or min(lengths, default=1) < 1:
            raise ValueError(
                f"{len(lengths)} lengths, from {min(lengths, default=0)}, sum to {sum(lengths)}: "
                f"each must be positive, and their sum {len(values)}, the number of tokens"
            )
        where = f"{bin_path(self.prefix)}, document {len(self._lengths)}"
        check_tokens(values, self.vocab_size, where)
        self._file.write(np.ascontiguousarray(values, self.dtype))
        self.num_tokens += len(values)
        self._lengths.extend(lengths)

    def finalize(self) -> None:
        """Write the index and put both files in their place."""
        self._file.close()
        lengths = np.frombuffer(self._lengths, "<i4") if self._lengths else np.empty(0, "<i4")
        with open(idx_path(self._partial), "wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1))
            idx.write(lengths)
            ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
            idx.write(np.concatenate(([0], ends))[:-1].astype("<i8"))
            idx.write(np.arange(len(lengths) + 1, dtype="<i8"))  # a sequence is a document
        # Without its index there is no data set: never a new half beside an old one.
        idx_path(self.prefix).unlink(missing_ok=True)
        put_in_place(bin_path(self._partial), bin_path(self.prefix))
        put_in_place(idx_path(self._partial), idx_path(self.prefix))

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
