"""Blocks for language models: every token of the text in order, the same bytes each time."""

import json

import datasets
import pytest
from tokenizers import Tokenizer

from data_scripts.articles import deal
from data_scripts.corpus import ARTICLES, prepare_corpus
from data_scripts.prepare import prepare

BLOCK = 256


@pytest.fixture(scope="module")
def blocks(data_dir):
    return prepare("blocks", data_dir=data_dir, block_size=BLOCK, workers=1, progress=False)


def test_the_blocks_are_the_text(blocks, data_dir):
    """Decoded and joined they give the articles back, each followed by the separator."""
    articles = prepare_corpus(data_dir, progress=False).folder / ARTICLES
    held_out, (training,) = deal(articles, 1, 0.05, 12349)
    tokenizer = Tokenizer.from_file(str(blocks.folder / "tokenizer.json"))
    content = articles.read_bytes()
    for split, offsets in (("train", training), ("heldout", held_out)):
        rows = datasets.load_from_disk(blocks.folder / split)
        assert rows.column_names == ["input_ids", "attention_mask", "labels"]
        tokens = [token for row in rows["input_ids"] for token in row]
        assert len(tokens) == len(rows) * BLOCK
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        whole = "".join(
            json.loads(content[offset : content.index(b"\n", offset)])["text"] + "<|endoftext|>"
            for offset in offsets
        )
        end = len(text.rstrip("\ufffd"))  # a character of several bytes may be cut at the end
        assert whole.startswith(text[:end])
        assert len(tokenizer.encode(whole[end:], add_special_tokens=False)) < BLOCK + 5
    assert blocks.counts["training_blocks"] > 2000
    assert blocks.counts["vocab_size"] == tokenizer.get_vocab_size() == 8192


def test_a_given_tokenizer(blocks, data_dir, tmp_path):
    given = blocks.folder / "tokenizer.json"
    options = {"tokenizer": given, "vocab_size": 8192, "block_size": BLOCK, "progress": False}
    same = prepare("blocks", data_dir=data_dir, **options)
    assert same.manifest["files"] == blocks.manifest["files"]
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text("{}")
    for options, error, message in [
        ({"tokenizer": wrong}, ValueError, "is not a tokenizer.json"),
        ({"tokenizer": tmp_path / "none"}, FileNotFoundError, "no tokenizer at"),
        ({"tokenizer": given, "vocab_size": 50432}, ValueError, "8,192 tokens, not .* 50,432"),
        ({"tokenizer": given, "separator": "</s>"}, ValueError, "no token '</s>'"),
        ({"vocab_size": 200}, ValueError, "vocab_size is 200, must be at least 257"),
        ({"block_size": 1}, ValueError, "block_size is 1"),
        ({"block_size": 10_000_000}, ValueError, "do not fill a block of 10,000,000"),
    ]:
        with pytest.raises(error, match=message):
            prepare("blocks", data_dir=data_dir, progress=False, **options)
