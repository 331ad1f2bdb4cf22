"""Blocks of tokens for language models, as a Hugging Face data set on disk.

Articles are tokenised, joined with a separator after each, and cut into blocks of N tokens; what is
left at the end of all is dropped. Columns are `input_ids`, `attention_mask` (all ones) and `labels`
(a copy: the model shifts them), as the tutorials' `get_dataset.py` writes them.
"""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

from tokenizers import Tokenizer
from tqdm import tqdm

from data_scripts.articles import deal, texts_at
from data_scripts.byte_pair import (
    END_OF_DOCUMENT,
    MERGES,
    VOCAB,
    load_byte_pair,
    prepare_byte_pair,
)
from data_scripts.corpus import ARTICLES
from data_scripts.stages import Stage, ensure, sha256

TOKENIZER = "tokenizer.json"
TRAIN, HELD_OUT = "train", "heldout"
LAYOUT = 1  # counted up when the code below writes other bytes for the same parameters


@dataclass(frozen=True)
class BlockOptions:
    """What the blocks depend on beside text and tokenizer; ValueError when out of range."""

    block_size: int = 2048
    separator: str = END_OF_DOCUMENT
    held_out: float = 0.05
    seed: int = 12349

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}, must be at least 2")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, must be between 0 and 1")


def prepare_blocks(
    data_dir: Path,
    corpus: Stage,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    options: BlockOptions = BlockOptions(),
    *,
    workers: int = 1,
    progress: bool = True,
) -> Stage:
    """Stage `blocks`: `train/` and `heldout/` for `datasets.load_from_disk`, and `tokenizer.json`.

    Args:
        data_dir: folder of all stages.
        corpus: the text.
        tokenizer: a given `tokenizer.json` of any kind; default byte-level BPE, trained.
        vocab_size: exact size; of a given tokenizer it is only checked. Default 8192 when trained.
        options: size of the blocks, separator (empty: none), share that is held out.
        workers: unused: the tokenizer runs threads of its own.
        progress: show a bar over articles.

    Raises:
        ValueError: a wrong tokenizer, or too little text for one block.
    """
    if tokenizer is not None:
        encoder = load_tokenizer(tokenizer, vocab_size)
        source = {"tokenizer_sha256": sha256(tokenizer)}
    else:
        bpe = prepare_byte_pair(data_dir, corpus, vocab_size=vocab_size)
        encoder = load_byte_pair(bpe.folder / VOCAB, bpe.folder / MERGES)
        source = {"vocab_sha256": bpe.sha256(VOCAB), "merges_sha256": bpe.sha256(MERGES)}
    if options.separator and encoder.token_to_id(options.separator) is None:
        raise ValueError(
            f"{tokenizer or TOKENIZER} has no token {options.separator!r} to separate articles by: "
            "name another as separator, or '' for none"
        )
    parameters = asdict(options) | {
        "layout": LAYOUT,
        "corpus_sha256": corpus.sha256(ARTICLES),
        **source,
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "datasets")},
    }

    def build(folder: Path) -> dict:
        encoder.save(os.fspath(folder / TOKENIZER))
        articles = corpus.folder / ARTICLES
        held_out, (training,) = deal(articles, 1, options.held_out, options.seed)
        blocks = {}
        for split, offsets in ((TRAIN, training), (HELD_OUT, held_out)):
            shown = tqdm(offsets, unit="article", desc=f"{split} blocks", disable=not progress)
            stream = cut(texts_at(articles, shown), encoder, options)
            if (first := next(stream, None)) is None:
                raise ValueError(
                    f"{len(offsets)} articles of {split} do not fill a block of "
                    f"{options.block_size:,} tokens"
                )
            blocks[split] = _save(chain([first], stream), folder / split, options)
        return {
            "vocab_size": encoder.get_vocab_size(),
            "training_blocks": blocks[TRAIN],
            "held_out_blocks": blocks[HELD_OUT],
        }

    # An upper bound: 4.2 characters a token; 4 + 1 + 4 bytes a token, twice while it is saved.
    needs_bytes = corpus.counts["characters"] // 3 * 9 * 2
    return ensure(
        data_dir, f"blocks-{options.block_size}", parameters, build, needs_bytes=needs_bytes
    )


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        ValueError: the file is none, or holds another number of tokens than `vocab_size`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    if vocab_size not in (None, size := tokenizer.get_vocab_size()):
        raise ValueError(f"{path} holds {size:,} tokens, not vocab_size {vocab_size:,}")
    return tokenizer


def cut(articles: Iterator[str], encoder: Tokenizer, options: BlockOptions) -> Iterator[list[int]]:
    """Blocks of `block_size` ids from the joined articles."""
    separator = [encoder.token_to_id(options.separator)] if options.separator else []
    ids: list[int] = []
    while some := list(islice(articles, 100)):
        for encoding in encoder.encode_batch(some):
            ids += encoding.ids + separator
        whole = len(ids) - len(ids) % options.block_size
        for start in range(0, whole, options.block_size):
            yield ids[start : start + options.block_size]
        del ids[:whole]


def _save(blocks: Iterator[list[int]], folder: Path, options: BlockOptions) -> int:
    """Write a data set that `datasets.load_from_disk` reads; returns the number of blocks."""
    import datasets  # here, since it takes a second that other formats need not spend

    tokens = datasets.List(datasets.Value("int32"), options.block_size)
    flags = datasets.List(datasets.Value("int8"), options.block_size)
    columns = {"input_ids": tokens, "attention_mask": flags, "labels": tokens}
    ones = [1] * options.block_size
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # ours counts articles
    cache = folder.with_suffix(".cache")  # all need not fit in memory
    try:
        data = datasets.Dataset.from_generator(
            lambda: ({"input_ids": ids, "attention_mask": ones, "labels": ids} for ids in blocks),
            features=datasets.Features(columns),
            cache_dir=str(cache),
            fingerprint=folder.name,
        )
        data.save_to_disk(folder)
        return len(data)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        if not quiet:
            datasets.enable_progress_bars()
