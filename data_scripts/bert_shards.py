"""BERT pretraining shards in HDF5, in the layout of NVIDIA's scripts that the tutorial reads.

Keys of a shard of N samples, sequence length S and P predictions: `input_ids` [N, S] int32,
`input_mask` and `segment_ids` [N, S] int8, `masked_lm_positions` and `masked_lm_ids` [N, P] int32
padded with zeros, `next_sentence_labels` [N] int8 (1 where the second half is random). The data
are stored contiguous and without compression, so that readers can map them.
"""

import importlib.metadata
import io
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np
from sentencex import segment
from tqdm import tqdm

from data_scripts.articles import deal, texts_at
from data_scripts.bert_samples import Document, Vocabulary, mask_tokens, sentence_pairs
from data_scripts.corpus import ARTICLES
from data_scripts.processes import in_order
from data_scripts.stages import Stage, ensure
from data_scripts.wordpiece import (
    SPECIAL_TOKENS,
    VOCAB,
    BertWordPieceTokenizer,
    load_wordpiece,
    prepare_wordpiece,
)

HELD_OUT = "wiki_heldout.hdf5"  # not matched by *_training_*.hdf5
LAYOUT = 1  # counted up when the code below writes other bytes for the same parameters


@dataclass(frozen=True)
class BertOptions:
    """What the shards depend on beside text and vocabulary; ValueError when out of range."""

    seq_length: int = 128
    max_predictions: int = 20
    duplication: int = 5
    shards: int = 8
    held_out: float = 0.05
    seed: int = 12349
    lowercase: bool = True
    language: str = "en"

    def __post_init__(self) -> None:
        for name, least in (("max_predictions", 1), ("duplication", 1), ("shards", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        if self.seq_length < 8:
            raise ValueError(f"seq_length is {self.seq_length}, must be at least 8")
        if self.max_predictions > self.seq_length - 3:
            raise ValueError(
                f"max_predictions is {self.max_predictions}, must be at most "
                f"{self.seq_length - 3}: 3 of {self.seq_length} tokens are special"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, must be between 0 and 1")


@dataclass(frozen=True)
class _Shard:
    """One shard's job, small enough to send to a worker process."""

    path: Path
    articles: Path
    offsets: tuple[int, ...]  # bytes where its articles start
    vocab: Path
    passes: int
    options: BertOptions


def prepare_bert(
    data_dir: Path,
    corpus: Stage,
    vocab: Path | None = None,
    vocab_size: int | None = None,
    options: BertOptions = BertOptions(),
    *,
    workers: int = 1,
    progress: bool = True,
) -> Stage:
    """Stage `bert`: `wiki_training_NNNN.hdf5`, `wiki_heldout.hdf5` and the `vocab.txt` they use.

    The held-out shard is made of whole articles that no training shard has, in one pass.

    Args:
        data_dir: folder of all stages.
        corpus: the text.
        vocab, vocab_size: as for `prepare_wordpiece`.
        options: shape and number of the samples.
        workers: processes, one shard at a time each. The bytes written do not depend on them.
        progress: show a bar over shards.

    Raises:
        ValueError: a wrong vocabulary, or fewer than two usable articles for a shard.
    """
    wordpiece = prepare_wordpiece(
        data_dir, corpus, vocab, vocab_size=vocab_size, lowercase=options.lowercase
    )
    parameters = asdict(options) | {
        "layout": LAYOUT,
        "corpus_sha256": corpus.sha256(ARTICLES),
        "vocab_sha256": wordpiece.sha256(VOCAB),
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "sentencex")},
    }
    articles = corpus.folder / ARTICLES
    names = [f"wiki_training_{index:04d}.hdf5" for index in range(options.shards)]

    def build(folder: Path) -> dict:
        shutil.copyfile(wordpiece.folder / VOCAB, folder / VOCAB)
        held_out, training = deal(articles, options.shards, options.held_out, options.seed, least=2)
        passes = [1] + options.shards * [options.duplication]
        jobs = [
            _Shard(folder / name, articles, tuple(part), folder / VOCAB, times, options)
            for name, part, times in zip([HELD_OUT, *names], [held_out, *training], passes)
        ]
        written = in_order(_write_shard, jobs, min(workers, len(jobs)))
        shown = tqdm(
            written, total=len(jobs), unit="shard", desc="BERT shards", disable=not progress
        )
        counts = {job.path.name: count for job, count in zip(jobs, shown)}
        return {
            "vocab_size": wordpiece.counts["tokens"],
            "training_samples": sum(counts[name]["samples"] for name in names),
            "held_out_samples": counts[HELD_OUT]["samples"],
            "shards": {name: counts[name] for name in sorted(counts)},
        }

    return ensure(
        data_dir,
        f"bert-seq{options.seq_length}",
        parameters,
        build,
        needs_bytes=_estimate(corpus.counts["characters"], options),
    )


def _write_shard(job: _Shard) -> dict:
    options = job.options
    tokenizer = load_wordpiece(job.vocab, lowercase=options.lowercase)
    special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    vocabulary = Vocabulary(
        tokenizer.get_vocab_size(),
        special["[PAD]"],
        special["[CLS]"],
        special["[SEP]"],
        special["[MASK]"],
        frozenset(special.values()),
    )
    documents = _documents(job, tokenizer)
    if len(documents) < 2:
        raise ValueError(
            f"{job.path.name}: only {len(documents)} of its {len(job.offsets)} articles have two "
            "sentences, and a random next sentence needs two such articles: ask for fewer shards"
        )
    rng = random.Random(f"{options.seed} {job.path.name}")
    pairs = []
    for _ in range(job.passes):
        pairs += sentence_pairs(documents, options.seq_length - 3, rng)
    rng.shuffle(pairs)

    n, s, p = len(pairs), options.seq_length, options.max_predictions
    data = {
        "input_ids": np.full((n, s), vocabulary.pad, dtype="<i4"),
        "input_mask": np.zeros((n, s), dtype="<i1"),
        "segment_ids": np.zeros((n, s), dtype="<i1"),
        "masked_lm_positions": np.zeros((n, p), dtype="<i4"),
        "masked_lm_ids": np.zeros((n, p), dtype="<i4"),
        "next_sentence_labels": np.zeros(n, dtype="<i1"),
    }
    for row, (first, second, is_random) in enumerate(pairs):
        ids = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
        positions, labels = mask_tokens(ids, p, vocabulary, rng)
        data["input_ids"][row, : len(ids)] = ids
        data["input_mask"][row, : len(ids)] = 1
        data["segment_ids"][row, len(first) + 2 : len(ids)] = 1
        data["masked_lm_positions"][row, : len(positions)] = positions
        data["masked_lm_ids"][row, : len(labels)] = labels
        data["next_sentence_labels"][row] = is_random
    image = io.BytesIO()  # HDF5 crashes the process when it cannot write to a full disk
    with h5py.File(image, "w") as file:
        for key, values in data.items():
            file.create_dataset(key, data=values, track_times=False)
    job.path.write_bytes(image.getbuffer())
    return {
        "articles": len(documents),
        "samples": n,
        "tokens": int(data["input_mask"].sum(dtype=np.int64)),
        "predictions": int(np.count_nonzero(data["masked_lm_positions"])),
        "random_next": int(data["next_sentence_labels"].sum(dtype=np.int64)),
    }


def _documents(job: _Shard, tokenizer: BertWordPieceTokenizer) -> list[Document]:
    """The shard's articles as sentences of token ids; those with fewer than two are left out."""
    documents = []
    for text in texts_at(job.articles, job.offsets):
        sentences = [s for s in segment(job.options.language, text) if s.strip()]
        encodings = tokenizer.encode_batch(sentences, add_special_tokens=False)
        document = [encoding.ids for encoding in encodings if encoding.ids]
        if len(document) >= 2:
            documents.append(document)
    return documents


def _estimate(characters: int, options: BertOptions) -> int:
    """Bytes of all shards, from above: a token has 4.2 characters, a sample 0.95 S tokens."""
    samples = options.duplication * (characters / 3) / (0.8 * options.seq_length)
    return int(samples * (6 * options.seq_length + 8 * options.max_predictions + 1))
