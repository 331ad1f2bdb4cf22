"""From a Wikipedia dump to a data set, by `python -m data_scripts.prepare` or `prepare()`.

Existing data are verified and kept; what a changed parameter affects is built beside them.
"""

import argparse
import dataclasses
import logging
import os
from pathlib import Path

from data_scripts.bert_shards import BertOptions, prepare_bert
from data_scripts.corpus import prepare_corpus
from data_scripts.megatron import MegatronOptions, prepare_megatron
from data_scripts.processes import available_cores, exit_on_signals
from data_scripts.stages import Stage
from data_scripts.token_blocks import BlockOptions, prepare_blocks

DATA_DIR = Path(__file__).resolve().parents[1] / "build" / "data"

FORMATS = {  # name: (options, function that makes it)
    "bert": (BertOptions, prepare_bert),
    "blocks": (BlockOptions, prepare_blocks),
    "megatron": (MegatronOptions, prepare_megatron),
}


def prepare(
    format: str = "bert",
    *,
    data_dir: Path | str | None = None,
    dump: Path | str | None = None,
    tokenizer: Path | str | None = None,
    vocab_size: int | None = None,
    workers: int | None = None,
    progress: bool | None = None,
    **options,
) -> Stage:
    """Make a data set, or find it complete.

    Args:
        format: `bert`, HDF5 shards for BERT (`BertOptions`); `blocks`, blocks of tokens for
            language models (`BlockOptions`); `megatron`, tokens in Megatron-LM's format
            (`MegatronOptions`).
        data_dir: where all of it goes; default `build/data` in the project.
        dump: `*-pages-articles*.xml.bz2`; default 106 articles of English Wikipedia.
        tokenizer: a given `vocab.txt` (`bert`), `tokenizer.json` (`blocks`) or folder with
            `vocab.json` and `merges.txt` (`megatron`); default one that is trained on the dump.
        vocab_size: exact size of the vocabulary; default 8192 when trained, any when given.
        workers: processes; default one a core. They do not change a byte.
        progress: show bars; by default unless IPP_NONINTERACTIVE=1 says that no reader waits.
        **options: fields of the format's options.

    Returns:
        The data set's folder, its manifest and counts (`vocab_size` among them).

    Raises:
        ValueError: a parameter out of range, a broken dump, a wrong vocabulary.
        OSError: no such file, or not enough space.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    workers = available_cores() if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers is {workers}, must be at least 1")
    options_class, prepare_format = FORMATS[format]
    fields = {field.name for field in dataclasses.fields(options_class)}
    if unknown := sorted(options.keys() - fields):
        raise ValueError(
            f"format {format!r} has no option {', '.join(unknown)}; it takes "
            f"{', '.join(sorted(fields))}"
        )
    settings = options_class(**options)  # checked before the first stage runs
    if progress is None:
        progress = os.environ.get("IPP_NONINTERACTIVE", "") in ("", "0")
    data_dir = DATA_DIR if data_dir is None else Path(data_dir)
    tokenizer = None if tokenizer is None else Path(tokenizer)
    corpus = prepare_corpus(data_dir, dump, workers=workers, progress=progress)
    return prepare_format(
        data_dir, corpus, tokenizer, vocab_size, settings, workers=workers, progress=progress
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data_scripts.prepare", description=__doc__)
    parser.add_argument("--format", choices=FORMATS, default="bert")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--dump", type=Path, help="default: 106 articles of English Wikipedia")
    parser.add_argument("--tokenizer", type=Path, help="default: one trained on the dump")
    parser.add_argument("--vocab-size", type=int, help="default: 8192 when trained")
    parser.add_argument("--workers", type=int, help="processes; default: one a core")
    parser.add_argument("--quiet", action="store_true", help="no bars, print the folder only")
    group = parser.add_argument_group("options of the formats")
    defaults: dict[str, dict[str, object]] = {}
    for name, (settings, _) in FORMATS.items():
        for field in dataclasses.fields(settings):
            defaults.setdefault(field.name, {})[name] = field.default
    for option, by_format in defaults.items():
        default = next(iter(by_format.values()))
        kind = {"type": type(default)}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        listed = ", ".join(f"{value!r} for {name}" for name, value in by_format.items())
        flag = "--" + option.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=f"default: {listed}", **kind)
    return parser


def main() -> None:
    """The command line; prints the folder of the data set last."""
    parser = _parser()
    arguments = vars(parser.parse_args())
    quiet = arguments.pop("quiet")
    exit_on_signals()
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(message)s")
    try:
        stage = prepare(arguments.pop("format"), progress=not quiet, **arguments)
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(1, f"error: {error}\n")
    if not quiet:
        for name, count in stage.counts.items():
            if isinstance(count, int):
                logging.info("%s: %s", name, f"{count:,}")
    print(stage.folder)


if __name__ == "__main__":
    main()
