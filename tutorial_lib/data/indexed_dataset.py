"""Megatron-LM's indexed data set: tokens in `PREFIX.bin`, where they start in `PREFIX.idx`.

`.bin` holds nothing but tokens, little-endian. `.idx` is, packed and little-endian:

    9 bytes   "MMIDIDX\\0\\0"
    u64       version, 1
    u8        code of the tokens' type, see `DTYPES`
    u64 u64   n sequences, m = documents + 1
    i32 [n]   length of each sequence, in tokens
    i64 [n]   where it starts in `.bin`, in bytes
    i64 [m]   first sequence of each document, then n

GPT data have one sequence a document.
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import os
import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating point
UINT16_BELOW = 65500  # Megatron-LM's threshold on the size of the vocabulary


def bin_path(prefix: str | os.PathLike) -> Path:
    """The file of the tokens."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike) -> Path:
    """The file of the index."""
    return Path(f"{os.fspath(prefix)}.idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for a vocabulary of fewer than 65,500 tokens, else int32."""
    if not 0 < vocab_size <= 2**31:
        raise ValueError(f"vocab_size is {vocab_size}, must be between 1 and 2**31")
    return np.dtype("<u2" if vocab_size < UINT16_BELOW else "<i4")


class IndexedDataset:
    """Token sequences of an indexed data set, mapped into memory and checked when opened.

    Attributes:
        prefix: path without `.bin` and `.idx`.
        dtype: the tokens' type.
        sequence_lengths: int32 [n], in tokens.
        sequence_pointers: int64 [n], in bytes.
        document_indices: int64 [documents + 1], the first sequence of each document, then n.

    Raises:
        FileNotFoundError: `.bin` or `.idx` is missing.
        ValueError: one of them is damaged, or the two do not belong together.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        idx, tokens = idx_path(prefix), bin_path(prefix)
        for path in (idx, tokens):
            if not path.is_file():
                raise FileNotFoundError(f"no {path}, of the data set {self.prefix}")
        self.dtype, n, m = _read_header(idx)
        buffer = np.memmap(idx, mode="r")
        offset = HEADER.size
        self.sequence_lengths = np.frombuffer(buffer, "<i4", n, offset)
        self.sequence_pointers = np.frombuffer(buffer, "<i8", n, offset + 4 * n)
        self.document_indices = np.frombuffer(buffer, "<i8", m, offset + 12 * n)
        self.num_tokens = int(self.sequence_lengths.sum(dtype=np.int64))
        self._check()
        empty = self.num_tokens == 0  # an empty file cannot be mapped
        self._tokens = np.frombuffer(b"" if empty else np.memmap(tokens, mode="r"), self.dtype)

    def _check(self) -> None:
        idx, tokens = idx_path(self.prefix), bin_path(self.prefix)
        lengths = self.sequence_lengths
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        starts = np.concatenate(([0], ends))
        if (lengths < 0).any() or not np.array_equal(self.sequence_pointers, starts[:-1]):
            raise ValueError(f"{idx} is damaged: its byte pointers do not follow its lengths")
        documents = self.document_indices
        from_to = documents[0], documents[-1]
        if from_to != (0, len(lengths)) or (documents[1:] < documents[:-1]).any():
            raise ValueError(
                f"{idx} is damaged: its document index does not go from 0 to {len(lengths)}, the "
                f"number of its sequences, but from {documents[0]} to {documents[-1]}"
            )
        if (size := tokens.stat().st_size) != starts[-1]:
            raise ValueError(
                f"{tokens} has {size:,} bytes, but {idx} describes {self.num_tokens:,} tokens of "
                f"{self.dtype.itemsize} bytes: cut short, or of another data set"
            )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of sequence `index` from `offset` on, `length` of them; a read-only view."""
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        stop = int(self.sequence_lengths[index]) if length is None else offset + length
        return self._tokens[start + offset : start + stop]

    def __reduce__(self):
        return IndexedDataset, (self.prefix,)  # a worker of a data loader maps the files itself


def check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """ValueError, naming `where` they come from, if a token is not in the vocabulary."""
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        index = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        raise ValueError(
            f"{where}: token {index} has id {tokens[index]}, but the vocabulary has {vocab_size}: "
            f"made with another tokenizer"
        )


def _read_header(idx: Path) -> tuple[np.dtype, int, int]:
    """Type of the tokens, number of sequences, length of the document index."""
    with open(idx, "rb") as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise ValueError(f"{idx} is not an index of Megatron-LM: it starts with {header[:9]!r}")
    if len(header) < HEADER.size:
        raise ValueError(f"{idx} is cut short: {len(header)} bytes")
    _, version, code, n, m = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{idx} has version {version}, not {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{idx} has type code {code}; tokens have one of {sorted(DTYPES)}")
    if m < 1:
        raise ValueError(f"{idx} is damaged: its document index is empty, must start with 0")
    expected = HEADER.size + 12 * n + 8 * m
    if (size := idx.stat().st_size) != expected:
        raise ValueError(
            f"{idx} is damaged: {n:,} sequences and {m:,} document marks take {expected:,} bytes, "
            f"it has {size:,}"
        )
    return np.dtype(DTYPES[code]), n, m
