"""The corpus as Megatron-LM's data set: tokens in `.bin`, their index in `.idx`."""

import importlib.metadata
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from data_scripts.byte_pair import MERGES, VOCAB, prepare_byte_pair
from data_scripts.corpus import ARTICLES
from data_scripts.preprocess_data import preprocess
from data_scripts.stages import Stage, ensure

PREFIX = "wiki_text_document"  # of the .bin and .idx files in the stage's folder
LAYOUT = 1  # counted up when the code below writes other bytes for the same parameters


@dataclass(frozen=True)
class MegatronOptions:
    """What the tokens depend on beside text and tokenizer."""

    append_eod: bool = True


def prepare_megatron(
    data_dir: Path,
    corpus: Stage,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    options: MegatronOptions = MegatronOptions(),
    *,
    workers: int = 1,
    progress: bool = True,
) -> Stage:
    """Stage `megatron`: `wiki_text_document.bin` and `.idx`, `vocab.json` and `merges.txt`.

    Args:
        data_dir: folder of all stages.
        corpus: the text.
        tokenizer, vocab_size: as for `prepare_byte_pair`.
        options: whether documents end with `<|endoftext|>`.
        workers: processes. The bytes written do not depend on them.
        progress: show a bar over the text's bytes.

    Raises:
        ValueError: a wrong tokenizer.
    """
    bpe = prepare_byte_pair(data_dir, corpus, tokenizer, vocab_size=vocab_size)
    parameters = asdict(options) | {
        "layout": LAYOUT,
        "corpus_sha256": corpus.sha256(ARTICLES),
        "vocab_sha256": bpe.sha256(VOCAB),
        "merges_sha256": bpe.sha256(MERGES),
        "tokenizers": importlib.metadata.version("tokenizers"),
    }

    def build(folder: Path) -> dict:
        for name in (VOCAB, MERGES):
            shutil.copyfile(bpe.folder / name, folder / name)
        counts = preprocess(
            corpus.folder / ARTICLES,
            folder / PREFIX.removesuffix("_text_document"),
            folder / VOCAB,
            folder / MERGES,
            append_eod=options.append_eod,
            workers=workers,
            progress=progress,
        )
        return counts["text"]

    # An upper bound: a token has 4.2 characters and takes 2 bytes, or 4 in a large vocabulary.
    needs_bytes = corpus.counts["characters"] // 3 * 4 + 20 * corpus.counts["articles"]
    return ensure(data_dir, "megatron", parameters, build, needs_bytes=needs_bytes)
