"""WordPiece, BERT's tokenizer: trained on the corpus or given."""

import importlib.metadata
import os
import shutil
from collections import Counter
from pathlib import Path

from tokenizers.implementations import BertWordPieceTokenizer

from data_scripts.corpus import ARTICLES
from data_scripts.json_lines import texts
from data_scripts.stages import Stage, ensure, sha256

VOCAB = "vocab.txt"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_ALPHABET = 1000  # characters beyond the most frequent thousand become [UNK]


def prepare_wordpiece(
    data_dir: Path,
    corpus: Stage,
    vocab: Path | None = None,
    *,
    vocab_size: int | None = None,
    lowercase: bool = True,
) -> Stage:
    """Stage `wordpiece`: `vocab.txt`, one token a line in the order of ids.

    Args:
        data_dir: folder of all stages.
        corpus: what to train on.
        vocab: a given `vocab.txt`, copied after a check, instead of training.
        vocab_size: exact size; of a given vocabulary it is only checked. Default 8192 when trained.
        lowercase: lower-case and strip accents, as BERT uncased does.

    Raises:
        ValueError: special tokens missing, duplicates, another size than `vocab_size`, or a corpus
            too small to yield that many tokens.
    """
    if vocab is not None:
        check_vocab(vocab, vocab_size)
        parameters = {"vocab_sha256": sha256(vocab)}
    else:
        vocab_size = 8192 if vocab_size is None else vocab_size
        if vocab_size <= len(SPECIAL_TOKENS):
            raise ValueError(
                f"vocab_size is {vocab_size}, must be at least {len(SPECIAL_TOKENS) + 1}"
            )
        parameters = {
            "corpus_sha256": corpus.sha256(ARTICLES),
            "vocab_size": vocab_size,
            "lowercase": lowercase,
            "tokenizers": importlib.metadata.version("tokenizers"),
        }

    def build(folder: Path) -> dict:
        if vocab is not None:
            shutil.copyfile(vocab, folder / VOCAB)
        else:
            train_wordpiece(corpus.folder / ARTICLES, folder, vocab_size, lowercase=lowercase)
        tokens = len(check_vocab(folder / VOCAB))
        if vocab_size is not None and tokens != vocab_size:
            raise ValueError(f"the text yields {tokens:,} tokens, not vocab_size {vocab_size:,}")
        return {"tokens": tokens}

    return ensure(data_dir, "wordpiece", parameters, build, needs_bytes=1 << 20)


def train_wordpiece(
    articles: Path, folder: Path, vocab_size: int, *, lowercase: bool = True
) -> None:
    """Train on the articles and write `vocab.txt` into `folder`, deterministically.

    The trainer numbers characters in the order of a hash map and breaks ties between pairs by these
    numbers, so the same text gives a different vocabulary each time. Handed all characters as
    special tokens, sorted, it has nothing left to number.
    """
    tokenizer = BertWordPieceTokenizer(lowercase=lowercase)
    characters, inner = Counter(), set()  # inner: those that go on a word, written with ##
    for text in texts(articles, ("text",)):
        normal = tokenizer.normalizer.normalize_str(text)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal):
            characters.update(word)
            inner.update(word[1:])
    by_frequency = sorted(characters, key=lambda c: (-characters[c], c))
    alphabet = sorted(by_frequency[:MAX_ALPHABET])
    tokenizer.train_from_iterator(
        texts(articles, ("text",)),
        vocab_size=vocab_size,
        min_frequency=1,
        limit_alphabet=0,
        special_tokens=[*SPECIAL_TOKENS, *alphabet, *(f"##{c}" for c in alphabet if c in inner)],
        show_progress=False,
    )
    tokenizer.save_model(os.fspath(folder))


def check_vocab(path: Path, size: int | None = None) -> list[str]:
    """The tokens of a `vocab.txt`, in the order of ids.

    Raises:
        ValueError: a special token is missing, a token comes twice, or there are not `size`.
    """
    with open(path, encoding="utf-8", newline="\n") as lines:
        tokens = [line.rstrip("\r\n") for line in lines]
    if missing := [token for token in SPECIAL_TOKENS if token not in tokens]:
        raise ValueError(
            f"{path} does not have {', '.join(missing)}, so it is not a vocabulary of BERT"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"{path} holds {twice!r} twice")
    if size is not None and len(tokens) != size:
        raise ValueError(f"{path.name} holds {len(tokens):,} tokens, not vocab_size {size:,}")
    return tokens


def load_wordpiece(path: Path, *, lowercase: bool = True) -> BertWordPieceTokenizer:
    """The tokenizer of a `vocab.txt`."""
    return BertWordPieceTokenizer(os.fspath(path), lowercase=lowercase)
