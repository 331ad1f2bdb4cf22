"""From a Wikipedia dump to JSON lines, one article a line, with WikiExtractor."""

import bz2
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from data_scripts.dump import default_dump
from data_scripts.files import Stage, ensure, sha256

ARTICLES = "articles.jsonl"


def prepare_corpus(
    data_dir: Path, dump: Path | None = None, *, workers: int = 1, progress: bool = True
) -> Stage:
    """Stage `corpus`: `articles.jsonl`, objects with `id`, `title`, `text` and more, in dump order.

    Args:
        data_dir: folder of all stages.
        dump: `*-pages-articles*.xml.bz2`; default `default_dump()`.
        workers: extraction processes. The bytes written do not depend on them.
        progress: show a bar over the dump's compressed bytes.

    Raises:
        FileNotFoundError: no such dump.
        ValueError: the dump is damaged, cut short, or holds no article with text.
    """
    dump = default_dump() if dump is None else Path(dump)
    if not dump.is_file():
        raise FileNotFoundError(f"no dump at {dump}")
    parameters = {
        "dump": dump.name,
        "dump_sha256": sha256(dump),
        "wikiextractor": importlib.metadata.version("wikiextractor"),
    }
    return ensure(
        data_dir,
        "corpus",
        parameters,
        lambda folder: extract(dump, folder / ARTICLES, workers=workers, progress=progress),
        needs_bytes=2 * dump.stat().st_size,  # 1.6 for the default dump, less for a whole one
    )


def extract(dump: Path, articles: Path, *, workers: int = 1, progress: bool = True) -> dict:
    """Write the dump's articles as JSON lines and return their counts.

    The dump is decompressed here and piped through WikiExtractor: given a file that is cut short
    it would wait for ever, so the end of the dump is checked on this side of the pipe.
    """
    command = [sys.executable, "-m", "wikiextractor.WikiExtractor", "--json", "--no-templates"]
    command += ["--html-safe=", "--quiet", "--processes", str(workers), "--output=-", "/dev/stdin"]
    kept = empty = characters = 0
    with tempfile.TemporaryFile() as stderr, open(articles, "wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        with process, ThreadPoolExecutor(1) as pool:
            feeding = pool.submit(_feed, dump, process.stdin, progress)
            try:
                for line in process.stdout:
                    text = json.loads(line)["text"]
                    if not text.strip():
                        empty += 1
                        continue
                    out.write(line)
                    kept += 1
                    characters += len(text)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers
                raise
            failure = feeding.exception()
        if isinstance(failure, ValueError):
            raise failure
        if failure is not None or process.returncode != 0:
            stderr.seek(0)
            message = stderr.read().decode(errors="replace")[-2000:]
            raise RuntimeError(
                f"WikiExtractor ended with status {process.returncode} on {dump}:\n{message}"
            ) from failure
    if kept == 0:
        raise ValueError(f"{dump} holds no article with text ({empty} pages without)")
    return {"articles": kept, "pages_without_text": empty, "characters": characters}


def _feed(dump: Path, sink: BinaryIO, progress: bool) -> None:
    """Decompress the dump into `sink` and close it; ValueError if the dump is not whole."""
    end = b""
    size = dump.stat().st_size
    with sink, open(dump, "rb") as raw, bz2.open(raw) as xml:
        with tqdm(total=size, unit="B", unit_scale=True, desc="dump", disable=not progress) as bar:
            while block := _decompress(xml, dump):
                sink.write(block)
                end = (end + block)[-100:]
                bar.update(raw.tell() - bar.n)
    if not end.rstrip().endswith(b"</mediawiki>"):
        raise ValueError(f"{dump} is cut short or no dump: it does not end with </mediawiki>")


def _decompress(xml: bz2.BZ2File, dump: Path) -> bytes:
    try:
        return xml.read(1 << 20)
    except EOFError as error:
        raise ValueError(f"{dump} is cut short: {error}") from error
    except OSError as error:
        raise ValueError(f"{dump} is not a bz2 file, or damaged: {error}") from error
