"""Markup of articles that WikiExtractor leaves in the text."""

import re
from collections import defaultdict

from wikiextractor.extract import discardElements, placeholder_tags

# Elements that WikiExtractor drops or replaces as pairs, and others that MediaWiki knows.
NAMES = (
    *discardElements,
    *placeholder_tags,
    *("ce", "chem", "data", "del", "dfn", "graph", "indicator", "ins", "maplink", "mapframe"),
    *("mark", "onlyinclude", "q", "rb", "rp", "rt", "ruby", "samp", "score", "syntaxhighlight"),
    *("templatedata", "templatestyles", "time", "wbr"),
)
ATTRIBUTES = r"""(?:\s+[\w:-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s<>"']+))*"""
MARKUP = re.compile(
    # What is shown as it stands, as a whole.
    r"<!--.*?-->|<(nowiki|pre|source|syntaxhighlight)\b[^<>]*(?<!/)>.*?</\1\s*>"
    rf"|<!--|<\s*(?P<closing>/?)\s*(?P<name>{'|'.join(NAMES)})\b(?:(?P<rest>[^<>]*)>|{ATTRIBUTES})",
    re.DOTALL | re.IGNORECASE,
)


def drop_unclosed_tags(markup: str) -> str:
    """An article without tags that stand alone: opened and never closed, or closed only.

    WikiExtractor would leave them, or drop all the text up to the end of another element.
    Self-closing tags and pairs, for it to drop, stay. So does what the article shows as it stands
    (`<nowiki>`, `<pre>`).
    """
    alone: list[re.Match] = []
    opened: dict[str, list[re.Match]] = defaultdict(list)
    for tag in MARKUP.finditer(markup):
        if tag["name"] is None:
            if tag[0] == "<!--":
                alone.append(tag)
            continue
        same = opened[tag["name"].lower()]
        if tag["rest"] is None or tag["closing"] and tag["rest"].strip():  # broken
            alone.append(tag)
        elif not tag["closing"]:
            if not tag["rest"].endswith("/"):
                same.append(tag)
        elif same:
            same.pop()
        else:
            alone.append(tag)
    kept, end = [], 0
    for tag in sorted(sum(opened.values(), alone), key=re.Match.start):
        kept.append(markup[end : tag.start()])
        end = tag.end()
    return "".join([*kept, markup[end:]])
