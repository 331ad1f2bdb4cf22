"""From JSON lines to Megatron-LM's data set: `python -m data_scripts.preprocess_data`.

Writes `PREFIX_KEY_document.bin` and `.idx` for each key, a document a line. A document without
tokens is left out. The file is divided into blocks of bytes, which worker processes read, tokenize
and hand back in order, a few at a time: memory does not grow with the file, nor do bytes change
with the number of workers.
"""

import argparse
import logging
import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from data_scripts.byte_pair import (
    END_OF_DOCUMENT,
    MERGES,
    TRAINED_SIZE,
    VOCAB,
    load_byte_pair,
    train_byte_pair,
)
from data_scripts.json_lines import blocks, read_block, texts
from data_scripts.processes import exit_on_signals, in_order, removed_afterwards
from tutorial_lib.data.indexed_dataset import token_dtype
from tutorial_lib.data.indexed_dataset_builder import IndexedDatasetBuilder

log = logging.getLogger("data_scripts")


@dataclass(frozen=True)
class Tokenize:
    """What a worker has to know; `started` tells one run of this process from the next."""

    input: Path
    keys: tuple[str, ...]
    vocab: Path
    merges: Path
    append_eod: bool
    started: int


def preprocess(
    input: Path,
    output_prefix: Path,
    vocab: Path,
    merges: Path,
    *,
    keys: tuple[str, ...] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    log_interval: int = 100,
    progress: bool = True,
) -> dict[str, dict[str, int]]:
    """Tokenize a file of JSON lines; returns the counts for each key.

    Args:
        input: a JSON object a line.
        output_prefix: of the files to write.
        vocab, merges: the tokenizer's `vocab.json` and `merges.txt`.
        keys: of the texts in the objects.
        append_eod: end each document with `<|endoftext|>`.
        workers: processes.
        log_interval: documents between two updates of the bar.
        progress: show it.

    Returns:
        `{key: {"documents", "empty_documents", "tokens", "vocab_size", "eod"}}`.

    Raises:
        FileNotFoundError: no input or no tokenizer.
        ValueError: a line is not an object with these keys (with its number), a key comes twice, or
            there is no text.
    """
    for name, value in (("workers", workers), ("log_interval", log_interval), ("keys", len(keys))):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if len(set(keys)) < len(keys):
        raise ValueError(f"keys are {', '.join(keys)}: one comes twice, each has files of its own")
    if not input.is_file():
        raise FileNotFoundError(f"no {input} to read")
    tokenizer = load_byte_pair(vocab, merges)
    vocab_size, eod = tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_DOCUMENT)
    job = Tokenize(input, keys, vocab, merges, append_eod, time.monotonic_ns())
    parts = blocks(input)
    jobs = [(job, *part) for part in parts]
    columns_of = in_order(_tokenize_block, jobs, max(1, min(workers, len(jobs))))
    shown = done = 0
    with ExitStack() as stack:
        bar = tqdm(total=input.stat().st_size, unit="B", unit_scale=True, disable=not progress)
        stack.enter_context(bar)
        builders = [
            IndexedDatasetBuilder(
                f"{output_prefix}_{key}_document", token_dtype(vocab_size), vocab_size
            )
            for key in keys
        ]
        stack.enter_context(removed_afterwards(*chain(*(one.partial_files for one in builders))))
        for builder in builders:
            stack.enter_context(builder)
        stack.enter_context(closing(columns_of))
        for (_, read), columns in zip(parts, columns_of):
            for builder, (tokens, lengths, empty) in zip(builders, columns):
                builder.add_documents(tokens, lengths)
                builder.empty_documents += empty
            done += len(lengths) + empty
            if done - shown >= log_interval or read == bar.total:
                shown = done
                bar.set_postfix(documents=f"{done:,}", refresh=False)
                bar.update(read - bar.n)
        for key, builder in zip(keys, builders):
            if builder.num_tokens == 0:
                raise ValueError(f"{input}: none of its {done:,} documents has text in {key!r}")
    return {
        key: {
            "documents": done - builder.empty_documents,
            "empty_documents": builder.empty_documents,
            "tokens": builder.num_tokens,
            "vocab_size": vocab_size,
            "eod": eod,
        }
        for key, builder in zip(keys, builders)
    }


@lru_cache(maxsize=1)
def _tokenizer(job: Tokenize) -> Tokenizer:
    return load_byte_pair(job.vocab, job.merges)


def _tokenize_block(block: tuple[Tokenize, int, int]) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """(Tokens, lengths, empty documents) for each key, of the lines that begin in this block."""
    job, start, stop = block
    tokenizer = _tokenizer(job)
    eod = [tokenizer.token_to_id(END_OF_DOCUMENT)] if job.append_eod else []
    dtype = token_dtype(tokenizer.get_vocab_size())
    result = []
    for column in read_block(job.input, job.keys, start, stop):
        tokens, lengths = [], []
        for encoding in tokenizer.encode_batch_fast(column, add_special_tokens=False):
            if ids := encoding.ids:
                tokens += ids
                tokens += eod
                lengths.append(len(ids) + len(eod))
        empty = len(column) - len(lengths)
        result.append((np.array(tokens, dtype), np.array(lengths, np.int32), empty))
    return result


def main() -> None:
    """The command line, with the tutorial's options."""
    parser = argparse.ArgumentParser(prog="data_scripts.preprocess_data", description=__doc__)
    add = parser.add_argument
    add("--input", type=Path, required=True, help="JSON lines")
    add("--json-keys", nargs="+", default=["text"], help="keys of the texts; default: text")
    add("--tokenizer-type", choices=["GPT2BPETokenizer"], default="GPT2BPETokenizer")
    add("--vocab-file", "--vocab", type=Path, help="vocab.json; default: trained on the input")
    add("--merge-file", type=Path, help="merges.txt; default: trained on the input")
    add("--vocab-size", type=int, help=f"checked, or to train; default then: {TRAINED_SIZE}")
    add("--append-eod", action="store_true", help=f"end each document with {END_OF_DOCUMENT}")
    add("--output-prefix", type=Path, required=True)
    add("--dataset-impl", choices=["mmap"], default="mmap")
    add("--workers", type=int, default=1, help="processes; they do not change a byte")
    add("--log-interval", type=int, default=100, help="documents between updates of the bar")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    exit_on_signals()
    try:
        _run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


def _run(arguments: argparse.Namespace) -> None:
    vocab, merges = arguments.vocab_file, arguments.merge_file
    prefix, keys = arguments.output_prefix, tuple(arguments.json_keys)
    if (vocab is None) != (merges is None):
        raise ValueError("--vocab-file and --merge-file go together, or are both trained")
    with ExitStack() as stack:
        trained = {}
        if vocab is None:
            if not arguments.input.is_file():
                raise FileNotFoundError(f"no {arguments.input} to train on")
            prefix.parent.mkdir(parents=True, exist_ok=True)
            folder = prefix.with_name(f".{prefix.name}.{os.getpid()}.partial")
            stack.enter_context(removed_afterwards(folder))
            folder.mkdir()
            vocab, merges = folder / VOCAB, folder / MERGES
            size = TRAINED_SIZE if arguments.vocab_size is None else arguments.vocab_size
            train_byte_pair(texts(arguments.input, keys), vocab, merges, size)
            trained = {path: Path(f"{prefix}-{path.name}") for path in (vocab, merges)}
        else:
            load_byte_pair(vocab, merges, arguments.vocab_size)
        counts = preprocess(
            arguments.input,
            prefix,
            vocab,
            merges,
            keys=keys,
            append_eod=arguments.append_eod,
            workers=arguments.workers,
            log_interval=arguments.log_interval,
        )
        for path, place in trained.items():  # once there are tokens that go with them
            path.replace(place)
            log.info("trained %s", place)
    for key, count in counts.items():
        log.info(
            "%s_%s_document: %s documents, %s tokens, %s empty documents left out",
            arguments.output_prefix,
            key,
            *(f"{count[name]:,}" for name in ("documents", "tokens", "empty_documents")),
        )


if __name__ == "__main__":
    main()
