"""From JSON lines to `.bin` and `.idx`: bytes, workers, empty documents, options, bad input."""

import json
import signal
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from data_scripts import json_lines, preprocess_data
from data_scripts.byte_pair import END_OF_DOCUMENT, load_byte_pair, train_byte_pair
from data_scripts.corpus import prepare_corpus
from data_scripts.megatron import PREFIX, prepare_megatron
from data_scripts.preprocess_data import preprocess
from tutorial_lib.data.gpt_dataset import build_gpt_datasets
from tutorial_lib.data.indexed_dataset import IndexedDataset, bin_path, idx_path

WORDS = ["the", "tensor", "of", "a", "rank", "is", "cut", "by", "Größe,", "日本語", "and", "don't"]
WORDS += ["end", "", "", "tabs\tor", "lines\n\nthat"]


def sentences(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, n)) for n in rng.integers(1, 60, count)]


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)))
    return path


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    files = folder / "vocab.json", folder / "merges.txt"
    train_byte_pair(sentences(200), *files, 300)
    return files


@pytest.fixture
def tokenize(tmp_path, tokenizer_files):
    """`tokenize(texts, **options)`: the data set of these texts, and the counts."""

    def run(texts, name="out", **options):
        lines = write_lines(tmp_path / "in.jsonl", texts)
        options = {"progress": False} | options
        counts = preprocess(lines, tmp_path / name, *tokenizer_files, **options)
        return IndexedDataset(tmp_path / f"{name}_text_document"), counts["text"]

    return run


def assert_same_files(prefix, other) -> None:
    for path in (bin_path, idx_path):
        assert path(prefix).read_bytes() == path(other).read_bytes()


def run_script(module, *arguments):
    command = [sys.executable, "-m", f"data_scripts.{module}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_are_the_tokenizers(tokenize, tokenizer_files, append_eod):
    """A token that ends documents ends nothing where it occurs in a text."""
    texts = [*sentences(50), f"before {END_OF_DOCUMENT} after", END_OF_DOCUMENT]
    tokenizer = load_byte_pair(*tokenizer_files)
    data, counts = tokenize(texts, append_eod=append_eod)
    end = [counts["eod"]] * append_eod
    assert [data[i].tolist() for i in range(52)] == [tokenizer.encode(t).ids + end for t in texts]
    assert [tokenizer.decode(data[i][: len(data[i]) - len(end)]) for i in range(52)] == texts
    assert counts["documents"] == 52 and counts["tokens"] == data.num_tokens
    assert counts["vocab_size"] == 300 and data.dtype == np.uint16


def test_the_tokenizer_is_gpt2s(tokenizer_files):
    from transformers import GPT2TokenizerFast

    vocab, merges = map(str, tokenizer_files)
    reference = GPT2TokenizerFast(vocab=vocab, merges=merges)
    ours = load_byte_pair(*tokenizer_files)
    for text in sentences(50):
        assert ours.encode(text).ids == reference(text)["input_ids"]
    assert ours.token_to_id(END_OF_DOCUMENT) == reference.eos_token_id


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("empties", [{0}, {1}, {2}, {0, 2}])
def test_empty_documents_are_left_out(tokenize, empties, append_eod):
    texts = sentences(3)
    kept = [text for i, text in enumerate(texts) if i not in empties]
    expected, _ = tokenize(kept, "kept", append_eod=append_eod)
    texts = ["" if i in empties else text for i, text in enumerate(texts)]
    found, counts = tokenize(texts, "found", append_eod=append_eod)
    assert counts["empty_documents"] == len(empties) and counts["documents"] == len(kept)
    assert_same_files(found.prefix, expected.prefix)


def test_nothing_but_empty_documents(tokenize, tmp_path):
    with pytest.raises(ValueError, match=r"in\.jsonl: none of its 2 documents has text"):
        tokenize(["", ""], append_eod=True)
    with pytest.raises(ValueError, match="none of its 0 documents"):
        tokenize([])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_same_bytes_from_any_number_of_workers_and_blocks(tokenize, monkeypatch):
    texts = sentences(400)
    texts[7], texts[100] = "long " * 9000, ""  # a line of several blocks
    expected, _ = tokenize(texts, "whole", append_eod=True)
    monkeypatch.setattr(json_lines, "BLOCK", 9000)
    for workers in (1, 2):
        data, _ = tokenize(texts, str(workers), append_eod=True, workers=workers)
        assert_same_files(data.prefix, expected.prefix)


@pytest.mark.parametrize(
    "workers, bad, message",
    [
        (1, "{", "line 5: Expecting"),
        (2, "{", "line 5: Expecting"),
        (1, "[]", "line 5: not an object with a text in 'text'"),
        (1, '{"title": "a"}', "line 5: not an object with a text in 'text'"),
        (1, '{"text": 3}', "line 5: not an object with a text in 'text'"),
        (1, '{"text": "half \\ud83d"}', "line 5: .* surrogates not allowed"),
        (1, '{"text": "a", "deep": ' + 200_000 * "[" + 200_000 * "]" + "}", "line 5: .* recursion"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer_files, monkeypatch, workers, bad, message):
    monkeypatch.setattr(json_lines, "BLOCK", 100)
    path = write_lines(tmp_path / "in.jsonl", sentences(9))
    lines = path.read_text().splitlines()
    lines[4] = bad
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"in\.jsonl, {message}"):
        preprocess(path, tmp_path / "out", *tokenizer_files, workers=workers, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_several_keys(tmp_path, tokenizer_files):
    path = tmp_path / "in.jsonl"
    path.write_text('{"title": "a", "text": "b b"}\n{"title": "", "text": "c"}\n')
    keys = ("title", "text")
    counts = preprocess(path, tmp_path / "out", *tokenizer_files, keys=keys, progress=False)
    titles, texts = (IndexedDataset(tmp_path / f"out_{key}_document") for key in keys)
    tokenizer = load_byte_pair(*tokenizer_files)
    assert [titles[i].tolist() for i in range(len(titles))] == [tokenizer.encode("a").ids]
    assert len(texts) == 2 and counts["title"]["empty_documents"] == 1


def test_wrong_tokenizer_files(tmp_path, tokenizer_files):
    vocab, merges = tokenizer_files
    with pytest.raises(FileNotFoundError, match="nothing.json"):
        load_byte_pair(tmp_path / "nothing.json", merges)
    with pytest.raises(ValueError, match="300 tokens, not vocab_size 301"):
        load_byte_pair(vocab, merges, 301)
    ids = json.loads(vocab.read_text())
    changed = tmp_path / "vocab.json"
    for content, message in [
        ("{", "vocab.json is not a vocabulary"),
        ("[1]", "vocab.json is not a vocabulary"),
        (json.dumps(ids | {"gap": 400}), "ids are not 0 to 300"),
        (json.dumps({str(i): i for i in range(9)}), "does not have <|endoftext|>"),
        (json.dumps({END_OF_DOCUMENT: 0, "a": 1}), "merges.txt does not go with"),
    ]:
        changed.write_text(content)
        with pytest.raises(ValueError, match=message.replace("|", r"\|")):
            load_byte_pair(changed, merges)


def test_the_tutorials_command(tmp_path, tokenizer_files, tokenize):
    expected, counts = tokenize(sentences(20), append_eod=True)
    common = "preprocess_data", "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "my"
    result = run_script(
        *(*common, "--vocab", tokenizer_files[0], "--merge-file", tokenizer_files[1]),
        *("--dataset-impl", "mmap", "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"),
    )
    assert result.returncode == 0, result.stderr
    assert f"20 documents, {counts['tokens']:,} tokens" in result.stderr
    assert_same_files(tmp_path / "my_text_document", expected.prefix)
    result = run_script(*common, "--vocab", tokenizer_files[0])
    assert result.returncode == 1 and "error: " in result.stderr and "go together" in result.stderr


def test_a_run_that_fails_leaves_the_earlier_tokenizer(tmp_path, monkeypatch):
    """The tokens beside it were made with it."""
    lines = write_lines(tmp_path / "in.jsonl", sentences(200))
    command = ["preprocess_data", "--input", lines, "--output-prefix", tmp_path / "my"]

    def run(size):
        words = [*command, "--vocab-size", size]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        monkeypatch.setattr(signal, "signal", Mock())  # not for the process of the tests
        preprocess_data.main()

    run(300)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(preprocess_data, "preprocess", Mock(side_effect=OSError("disk full")))
    with pytest.raises(SystemExit):
        run(310)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_from_the_dump_to_samples(tmp_path):
    """The whole way that a notebook goes, with the real text."""
    corpus = prepare_corpus(tmp_path, workers=2, progress=False)
    stage = prepare_megatron(tmp_path, corpus, vocab_size=1000, progress=False)
    assert stage.counts["vocab_size"] == 1000 and stage.counts["empty_documents"] == 0
    prefix = stage.folder / PREFIX
    tokenizer = load_byte_pair(stage.folder / "vocab.json", stage.folder / "merges.txt", 1000)
    indexed = IndexedDataset(prefix)
    texts = list(json_lines.texts(corpus.folder / "articles.jsonl", ("text",)))
    assert len(indexed) == len(texts) == stage.counts["documents"] > 100
    for i in (0, 50, len(texts) - 1):
        assert indexed[i][-1] == stage.counts["eod"]
        assert tokenizer.decode(indexed[i][:-1]) == texts[i]

    train, valid, _ = build_gpt_datasets(prefix, "95,5,0", (500, 20, 0), 64, 1234, vocab_size=1000)
    assert len(train) >= 500 and train[0]["text"].shape == (65,)
    documents = [{i for row in range(len(d)) for i, *_ in d.parts(row)} for d in (train, valid)]
    assert not documents[0] & documents[1]

    before = bin_path(prefix).stat().st_mtime_ns
    again = prepare_megatron(tmp_path, corpus, vocab_size=1000, progress=False)
    assert again.folder == stage.folder and bin_path(prefix).stat().st_mtime_ns == before
    given = prepare_megatron(tmp_path, corpus, stage.folder, workers=2, progress=False)
    assert_same_files(given.folder / PREFIX, prefix)
    with pytest.raises(ValueError, match="1,000 tokens, not vocab_size 999"):
        prepare_megatron(tmp_path, corpus, stage.folder, 999)
