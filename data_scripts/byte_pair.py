"""GPT-2's tokenizer, byte-level BPE: given as `vocab.json` and `merges.txt`, or trained."""

import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_scripts.corpus import ARTICLES
from data_scripts.json_lines import texts
from data_scripts.stages import Stage, ensure, sha256

VOCAB = "vocab.json"
MERGES = "merges.txt"
END_OF_DOCUMENT = "<|endoftext|>"
BYTES = 256  # each byte is a token, so that no text is unknown
TRAINED_SIZE = 8192


def prepare_byte_pair(
    data_dir: Path,
    corpus: Stage,
    tokenizer: Path | None = None,
    *,
    vocab_size: int | None = None,
) -> Stage:
    """Stage `byte_pair`: `vocab.json` and `merges.txt`.

    Args:
        data_dir: folder of all stages.
        corpus: what to train on.
        tokenizer: folder with given `vocab.json` and `merges.txt`, copied after a check.
        vocab_size: exact size; of a given vocabulary it is only checked. Default 8192 when trained.

    Raises:
        ValueError: a given tokenizer is damaged or of another size, or the corpus is too small.
    """
    if tokenizer is not None:
        load_byte_pair(tokenizer / VOCAB, tokenizer / MERGES, vocab_size)
        parameters = {name: sha256(tokenizer / name) for name in (VOCAB, MERGES)}
    else:
        vocab_size = TRAINED_SIZE if vocab_size is None else vocab_size
        parameters = {
            "corpus_sha256": corpus.sha256(ARTICLES),
            "vocab_size": vocab_size,
            "tokenizers": importlib.metadata.version("tokenizers"),
        }

    def build(folder: Path) -> dict:
        if tokenizer is not None:
            for name in (VOCAB, MERGES):
                shutil.copyfile(tokenizer / name, folder / name)
        else:
            articles = texts(corpus.folder / ARTICLES, ("text",))
            train_byte_pair(articles, folder / VOCAB, folder / MERGES, vocab_size)
        loaded = load_byte_pair(folder / VOCAB, folder / MERGES, vocab_size)
        return {"tokens": loaded.get_vocab_size()}

    return ensure(data_dir, "byte_pair", parameters, build, needs_bytes=1 << 21)


def train_byte_pair(texts: Iterable[str], vocab: Path, merges: Path, vocab_size: int) -> None:
    """Train on the texts and write both files; the same for the same texts.

    Raises:
        ValueError: the texts do not yield a vocabulary of exactly `vocab_size`.
    """
    if vocab_size <= BYTES:
        raise ValueError(f"vocab_size is {vocab_size}, must be at least {BYTES + 1}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"the text yields {size:,} tokens only, not vocab_size {vocab_size:,}")
    model = json.loads(tokenizer.to_str())["model"]
    ids = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocab.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    merges.write_text("\n".join(lines), encoding="utf-8")


def load_byte_pair(vocab: Path, merges: Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of the two files. It reads no special token in a text, whatever stands there.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: one is damaged, ids are not 0 to size - 1, there is no `<|endoftext|>`, or the
            vocabulary has another size than `vocab_size`.
    """
    for path in (vocab, merges):
        if not path.is_file():
            raise FileNotFoundError(f"the tokenizer's file {path} does not exist")
    try:
        ids = json.loads(vocab.read_bytes())
        size = len(ids)
        if sorted(ids.values()) != list(range(size)):
            raise ValueError(f"its ids are not 0 to {size - 1}")
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{vocab} is not a vocabulary of token: id in JSON: {error}") from error
    if END_OF_DOCUMENT not in ids:
        raise ValueError(
            f"{vocab} does not have {END_OF_DOCUMENT}, so it is not a vocabulary like GPT-2's"
        )
    if vocab_size not in (None, size):
        raise ValueError(f"{vocab} holds {size:,} tokens, not vocab_size {vocab_size:,}")
    try:
        return _byte_level(models.BPE.from_file(os.fspath(vocab), os.fspath(merges)))
    except Exception as error:  # the library raises no other class
        raise ValueError(f"{merges} does not go with {vocab}: {error}") from error


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
