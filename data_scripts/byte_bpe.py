"""Byte-level BPE, the tokenizer of GPT-NeoX and its kin: trained on the corpus or given."""

import importlib.metadata
import os
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer

from data_scripts.articles import texts
from data_scripts.corpus import ARTICLES
from data_scripts.files import Stage, ensure, sha256

TOKENIZER = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # all bytes and the end of text


def prepare_byte_bpe(
    data_dir: Path, corpus: Stage, tokenizer: Path | None = None, *, vocab_size: int | None = None
) -> Stage:
    """Stage `byte-bpe`: `tokenizer.json`, as `transformers` and `tokenizers` load it.

    Args:
        data_dir: folder of all stages.
        corpus: what to train on.
        tokenizer: a given `tokenizer.json` of any kind, copied after a check, instead of training.
        vocab_size: exact size; of a given tokenizer it is only checked. Default 8192 when trained.

    Raises:
        ValueError: no tokenizer in the file, or another size than `vocab_size`.
    """
    if tokenizer is not None:
        size = load_tokenizer(tokenizer).get_vocab_size()
        if vocab_size is not None and size != vocab_size:
            raise ValueError(f"{tokenizer} holds {size:,} tokens, not vocab_size {vocab_size:,}")
        parameters = {"tokenizer_sha256": sha256(tokenizer)}
    else:
        vocab_size = 8192 if vocab_size is None else vocab_size
        if vocab_size < SMALLEST:
            raise ValueError(f"vocab_size {vocab_size}: {SMALLEST} hold no more than single bytes")
        parameters = {
            "corpus_sha256": corpus.sha256(ARTICLES),
            "vocab_size": vocab_size,
            "tokenizers": importlib.metadata.version("tokenizers"),
        }

    def build(folder: Path) -> dict:
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        else:
            trained = ByteLevelBPETokenizer()
            trained.train_from_iterator(
                texts(corpus.folder / ARTICLES),
                vocab_size=vocab_size,
                min_frequency=1,
                special_tokens=[END_OF_TEXT],
                show_progress=False,
            )
            trained.save(os.fspath(folder / TOKENIZER))
        tokens = load_tokenizer(folder / TOKENIZER).get_vocab_size()
        if vocab_size is not None and tokens != vocab_size:
            raise ValueError(f"the text yields {tokens:,} tokens, not vocab_size {vocab_size:,}")
        return {"tokens": tokens}

    return ensure(data_dir, "byte-bpe", parameters, build, needs_bytes=1 << 23)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`; ValueError if the file is none."""
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # `tokenizers` raises no narrower class
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error
