"""From a Wikipedia dump to JSON lines, one article a line, with WikiExtractor."""

import bz2
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tqdm import tqdm
from wikiextractor.extract import Extractor

from data_scripts.dump import default_dump
from data_scripts.markup import drop_unclosed_tags
from data_scripts.processes import in_order
from data_scripts.stages import Stage, ensure, sha256

ARTICLES = "articles.jsonl"
PAGES_AT_A_TIME = 20  # sent to a worker


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
    """Write the dump's articles as JSON lines and return their counts."""
    kept = empty = characters = 0
    with open(articles, "wb") as out, open(dump, "rb") as raw:
        pages = _read_pages(dump, raw, progress)
        jobs = iter(lambda: list(islice(pages, PAGES_AT_A_TIME)), [])
        for lines in in_order(_extract_pages, jobs, workers):
            for line, length in lines:
                if length == 0:
                    empty += 1
                    continue
                out.write(line)
                kept += 1
                characters += length
    if kept == 0:
        raise ValueError(f"{dump} holds no article with text ({empty} pages without)")
    return {"articles": kept, "pages_without_text": empty, "characters": characters}


@dataclass(frozen=True)
class _Page:
    """An article as it stands in the dump, and what its markup depends on."""

    id: str
    revision: str
    title: str
    text: str
    site: str
    namespaces: frozenset[str]
    template_prefix: str


def _read_pages(dump: Path, raw: BinaryIO, progress: bool) -> Iterator[_Page]:
    """The articles of a dump; ValueError if it is not whole."""
    bar = tqdm(
        total=dump.stat().st_size, unit="B", unit_scale=True, desc="dump", disable=not progress
    )
    site, namespaces, templates, last = "", {"Template"}, "Template", None
    try:
        with bar, bz2.open(raw) as xml:
            for event, element in ElementTree.iterparse(xml, ("start", "end")):
                name = element.tag.rpartition("}")[2]
                if name == "mediawiki" and event == "start":
                    root = element
                elif event == "start":
                    continue
                elif name == "base":
                    site = element.text.rpartition("/")[0]
                elif name == "namespace" and element.text:
                    namespaces.add(element.text)
                    if element.get("key") == "10":
                        templates = element.text
                elif name == "page":
                    page = _page(element, site, frozenset(namespaces), templates)
                    if page is not None and page.id != last:
                        yield page
                        last = page.id
                    root.clear()
                    bar.update(raw.tell() - bar.n)
    except EOFError as error:
        raise ValueError(f"{dump} is cut short: {error}") from error
    except OSError as error:
        raise ValueError(f"{dump} is not a bz2 file, or damaged: {error}") from error
    except ElementTree.ParseError as error:
        raise ValueError(
            f"{dump} is cut short or not a dump, from <mediawiki> to </mediawiki> in UTF-8: {error}"
        ) from error


def _page(
    element: ElementTree.Element, site: str, namespaces: frozenset[str], templates: str
) -> _Page | None:
    """The article of a page; None for a redirect or a page of another namespace."""
    title = element.findtext("{*}title") or ""
    if element.findtext("{*}ns") != "0" or element.find("{*}redirect") is not None:
        return None
    if title.startswith(templates):
        return None
    ids = [found.text or "" for found in element.iter() if found.tag.rpartition("}")[2] == "id"]
    text = element.findtext("{*}revision/{*}text") or ""
    return _Page(ids[0], ids[-1], title, text, site, namespaces, f"{templates}:")


def _extract_pages(pages: list[_Page]) -> list[tuple[bytes, int]]:
    """For each page a JSON line, and the characters of its text; 0 where that is white space."""
    return [_extract_page(page) for page in pages]


def _extract_page(page: _Page) -> tuple[bytes, int]:
    extractor = Extractor(
        page.id,
        page.revision,
        page.site,
        page.title,
        [],
        templatePrefix=page.template_prefix,
        knownNamespaces=page.namespaces,
    )
    markup = escape(drop_unclosed_tags(page.text), {'"': "&quot;"})  # as it stands in a dump
    text = "\n".join(extractor.clean_text(markup, html_safe=False))
    entry = {
        "id": page.id,
        "revid": page.revision,
        "url": extractor.url,
        "title": page.title,
        "text": text,
    }
    return json.dumps(entry).encode() + b"\n", len(text) if text.strip() else 0
