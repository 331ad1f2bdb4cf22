"""From JSON lines to `.bin` and `.idx`: bytes, workers, empty documents, options, bad input."""

import json
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest

from data_scripts import json_lines, preprocess_data, processes
from data_scripts.byte_pair import END_OF_DOCUMENT, load_byte_pair, train_byte_pair
from data_scripts.corpus import prepare_corpus
from data_scripts.megatron import PREFIX, prepare_megatron
from data_scripts.preprocess_data import preprocess
from tutorial_lib.data.gpt_dataset import build_gpt_datasets
from tutorial_lib.data.indexed_dataset import IndexedDataset, bin_path, idx_path

WORDS = [
    "the",
    "tensor",
    "of",
    "a",
    "rank",
    "is",
    "cut",
    "by",
    "Größe,",
    "日本語",
    "and",
    "don't",
    "",
    "",
    "tabs\tor",
    "lines\n\nthat",
    "end",
]


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


def run_script(module, *arguments):
    command = [sys.executable, "-m", f"data_scripts.{module}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_documents_are_the_tokenizers(tokenize, tokenizer_files):
    texts = sentences(50)
    tokenizer = load_byte_pair(*tokenizer_files)
    data, counts = tokenize(texts)
    assert [data[i].tolist() for i in range(50)] == [tokenizer.encode(text).ids for text in texts]
    assert [tokenizer.decode(data[i]) for i in range(50)] == texts
    assert counts["documents"] == 50 and counts["tokens"] == data.num_tokens
    assert counts["vocab_size"] == 300 and data.dtype == np.uint16


def test_the_tokenizer_is_gpt2s(tokenizer_files):
    from transformers import GPT2TokenizerFast

    vocab, merges = map(str, tokenizer_files)
    reference = GPT2TokenizerFast(vocab=vocab, merges=merges)
    ours = load_byte_pair(*tokenizer_files)
    for text in sentences(50):
        assert ours.encode(text).ids == reference(text)["input_ids"]
    assert ours.token_to_id(END_OF_DOCUMENT) == reference.eos_token_id


def test_end_of_document_is_counted(tokenize):
    texts = sentences(5)
    plain, _ = tokenize(texts, "plain")
    ended, counts = tokenize(texts, "ended", append_eod=True)
    assert ended.sequence_lengths.tolist() == (plain.sequence_lengths + 1).tolist()
    assert all(ended[i].tolist() == [*plain[i], counts["eod"]] for i in range(5))
    assert bin_path(ended.prefix).stat().st_size == 2 * counts["tokens"]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("empties", [{0}, {1}, {2}, {0, 2}])
def test_empty_documents_are_left_out(tokenize, empties, append_eod):
    texts = sentences(3)
    kept = [text for i, text in enumerate(texts) if i not in empties]
    expected, _ = tokenize(kept, "kept", append_eod=append_eod)
    texts = ["" if i in empties else text for i, text in enumerate(texts)]
    found, counts = tokenize(texts, "found", append_eod=append_eod)
    assert counts["empty_documents"] == len(empties) and counts["documents"] == len(kept)
    for path in (bin_path, idx_path):
        assert path(found.prefix).read_bytes() == path(expected.prefix).read_bytes()


def test_nothing_but_empty_documents(tokenize, tmp_path):
    with pytest.raises(ValueError, match=r"in\.jsonl: none of its 2 documents has text"):
        tokenize(["", ""], append_eod=True)
    with pytest.raises(ValueError, match="none of its 0 documents"):
        tokenize([])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_end_token_in_a_text_ends_nothing(tokenize):
    data, counts = tokenize([f"before {END_OF_DOCUMENT} after", END_OF_DOCUMENT])
    assert all(counts["eod"] not in data[i] for i in range(2))


def test_same_bytes_from_any_number_of_workers_and_blocks(tokenize, monkeypatch):
    texts = sentences(400)
    texts[7], texts[100] = "long " * 9000, ""  # a line of several blocks
    expected, _ = tokenize(texts, "whole", append_eod=True)
    monkeypatch.setattr(json_lines, "BLOCK", 9000)
    for workers in (1, 2):
        data, _ = tokenize(texts, str(workers), append_eod=True, workers=workers)
        for path in (bin_path, idx_path):
            assert path(data.prefix).read_bytes() == path(expected.prefix).read_bytes()


@pytest.mark.parametrize("block", [1, 10, 37, 1000])
def test_every_line_is_in_one_block(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_lines, "BLOCK", block)
    lines = [json.dumps({"text": text}) for text in sentences(30)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines[:10]) + "\n\n  \r\n" + "\r\n".join(lines[10:]))  # no last end
    read = [json_lines.read_block(path, ("text",), *part)[0] for part in json_lines.blocks(path)]
    assert sum(read, []) == sentences(30)


def test_results_do_not_pile_up(tokenize, monkeypatch):
    """A slow disk must not leave the tokens of the whole file in memory."""
    taken = 0
    monkeypatch.setattr(json_lines, "BLOCK", 100)
    pool = processes.ProcessPoolExecutor
    ahead = []

    class Watched(pool):
        def submit(self, *args):
            nonlocal taken
            taken += 1
            ahead.append(taken - written)
            return super().submit(*args)

    written = 0
    add = preprocess_data.IndexedDatasetBuilder.add_documents

    def count(self, *args):
        nonlocal written
        written += 1
        add(self, *args)

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Watched)
    monkeypatch.setattr(preprocess_data.IndexedDatasetBuilder, "add_documents", count)
    tokenize(sentences(60), workers=2)
    assert taken > 50 and max(ahead) == 2 * processes.AHEAD


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


def test_large_vocabularies_take_four_bytes(tmp_path, tokenizer_files):
    vocab = json.loads(tokenizer_files[0].read_text())
    vocab |= {f"filler{i}": i for i in range(len(vocab), 65500)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    lines = write_lines(tmp_path / "in.jsonl", sentences(3))
    preprocess(lines, tmp_path / "a", tmp_path / "vocab.json", tokenizer_files[1], progress=False)
    assert IndexedDataset(tmp_path / "a_text_document").dtype == np.int32


def test_wrong_parameters(tokenize, tmp_path, tokenizer_files):
    tokenize(["a"])
    for name in ("workers", "log_interval"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            tokenize(["a"], **{name: 0})
    with pytest.raises(ValueError, match="keys is 0"):
        tokenize(["a"], keys=())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="keys are text, text: one comes twice"):
        tokenize(["a"], keys=("text", "text"))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(FileNotFoundError, match="nothing.jsonl"):
        preprocess(tmp_path / "nothing.jsonl", tmp_path / "out", *tokenizer_files)


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


def test_training_the_tokenizer(tmp_path, tokenizer_files):
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    code = (
        "import sys; from pathlib import Path; from data_scripts.byte_pair import train_byte_pair;"
        "from tests.test_preprocess_data import sentences;"
        "train_byte_pair(sentences(200), Path(sys.argv[1]), Path(sys.argv[2]), 300)"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, files)], check=True, timeout=60)
    for ours, theirs in zip(files, tokenizer_files):
        assert ours.read_bytes() == theirs.read_bytes()
    with pytest.raises(ValueError, match="tokens only, not vocab_size 9,000"):
        train_byte_pair(sentences(200), *files, 9000)
    with pytest.raises(ValueError, match="vocab_size 256"):
        train_byte_pair(sentences(200), *files, 256)


def test_the_tutorials_command(tmp_path, tokenizer_files, tokenize):
    expected, counts = tokenize(sentences(20), append_eod=True)
    result = run_script(
        *("preprocess_data", "--input", tmp_path / "in.jsonl"),
        *("--output-prefix", tmp_path / "my-gpt2", "--vocab", tokenizer_files[0]),
        *("--dataset-impl", "mmap"),
        *("--tokenizer-type", "GPT2BPETokenizer", "--merge-file", tokenizer_files[1]),
        *("--append-eod", "--workers", 2),
    )
    assert result.returncode == 0, result.stderr
    assert f"20 documents, {counts['tokens']:,} tokens" in result.stderr
    for path in (bin_path, idx_path):
        found = path(tmp_path / "my-gpt2_text_document")
        assert found.read_bytes() == path(expected.prefix).read_bytes()


def test_the_command_trains_a_tokenizer_where_none_is_given(tmp_path):
    lines = write_lines(tmp_path / "in.jsonl", sentences(200))
    common = "preprocess_data", "--input", lines, "--output-prefix", tmp_path / "my"
    result = run_script(*common, "--vocab-size", 300)
    assert result.returncode == 0, result.stderr
    tokenizer = load_byte_pair(tmp_path / "my-vocab.json", tmp_path / "my-merges.txt", 300)
    data = IndexedDataset(tmp_path / "my_text_document")
    assert tokenizer.decode(data[0]) == sentences(200)[0]
    expected = ["in.jsonl", "my-merges.txt", "my-vocab.json"]
    expected += ["my_text_document.bin", "my_text_document.idx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


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


def test_a_run_that_is_ended_leaves_nothing(tmp_path, tokenizer_files):
    lines = write_lines(tmp_path / "in.jsonl", sentences(100_000))
    command = [sys.executable, "-m", "data_scripts.preprocess_data", "--input", str(lines)]
    command += ["--output-prefix", str(tmp_path / "my"), "--vocab-file", str(tokenizer_files[0])]
    process = subprocess.Popen([*command, "--merge-file", str(tokenizer_files[1])])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("my*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_errors_of_the_command(tmp_path, tokenizer_files):
    lines = write_lines(tmp_path / "in.jsonl", sentences(3))
    common = "preprocess_data", "--output-prefix", tmp_path / "my"
    for arguments, message in [
        (("--input", lines, "--vocab", tokenizer_files[0]), "go together"),
        (("--input", tmp_path / "nothing.jsonl"), "nothing.jsonl"),
        (("--input", lines, "--vocab-size", 999), "not vocab_size 999"),
    ]:
        result = run_script(*common, *arguments)
        assert result.returncode == 1 and result.stderr.startswith("error: ")
        assert message in result.stderr


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
    for path in (bin_path, idx_path):
        assert path(given.folder / PREFIX).read_bytes() == path(prefix).read_bytes()
    with pytest.raises(ValueError, match="1,000 tokens, not vocab_size 999"):
        prepare_megatron(tmp_path, corpus, stage.folder, 999)
