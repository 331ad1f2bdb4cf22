"""`prepare`: the same bytes each time, complete or absent, and a clear word about what is wrong."""

import bz2
import json
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from data_scripts import stages as stage_module
from data_scripts.corpus import extract
from data_scripts.dump import default_dump
from data_scripts.prepare import prepare
from tests.slurm import wait_for
from tests.standin import as_nobody, largest_file


def hashes(folder):
    return {path.name: stage_module.sha256(path) for path in folder.iterdir()}


def stages(data_dir):
    return sorted(path.name for path in Path(data_dir).iterdir() if path.name != ".lock")


def tiny_dump(path, articles=12, end="</mediawiki>\n"):
    """A dump in the real one's shape, with text of our own."""
    pages = []
    for number in range(articles):
        body = " ".join(f"Sentence {k} of article {number} says little." for k in range(30))
        pages.append(
            f"  <page>\n    <title>Article {number}</title>\n    <ns>0</ns>\n"
            f"    <id>{number + 1}</id>\n    <revision>\n      <id>{number + 100}</id>\n"
            f'      <text xml:space="preserve">{body}</text>\n    </revision>\n  </page>\n'
        )
    namespaces = '    <namespace key="10" case="first-letter">Template</namespace>\n'
    head = f"<mediawiki>\n  <siteinfo>\n{namespaces}  </siteinfo>\n"
    text = head + "".join(pages) + end
    path.write_bytes(bz2.compress(text.encode()))
    return path


@pytest.fixture
def tiny(tmp_path):
    """Arguments of a preparation that takes a tenth of a second."""
    dump = tiny_dump(tmp_path / "tiny-pages-articles.xml.bz2")
    options = {"vocab_size": 80, "shards": 2, "workers": 1, "progress": False}
    return {"data_dir": tmp_path / "data", "dump": dump, **options}


def test_same_bytes_from_one_and_four_workers(bert, tmp_path):
    again = prepare("bert", data_dir=tmp_path, workers=4, progress=False)
    assert again.folder.name == bert.folder.name
    assert hashes(again.folder) == hashes(bert.folder)
    # The stages before it, too: a trainer that breaks ties at random would show here.
    assert [hashes(p) for p in sorted(tmp_path.glob("[cw]*"))] == [
        hashes(p) for p in sorted(bert.folder.parent.glob("[cw]*"))
    ]


# Of another shape than what is written.
MANIFESTS = b"[]", b"3", b'{"files": []}', b'{"files": {"vocab.txt": 3}}', 5000 * b"[", b"{}"


def test_second_run_does_nothing(tiny, monkeypatch):
    first = prepare("bert", **tiny)
    times = {p: p.stat().st_mtime_ns for p in tiny["data_dir"].rglob("*")}
    monkeypatch.setattr(stage_module, "_build", None)  # would raise if it were called
    assert prepare("bert", **tiny) == first
    assert {p: p.stat().st_mtime_ns for p in tiny["data_dir"].rglob("*")} == times


@pytest.mark.parametrize(
    "name, damage",
    [
        ("wiki_training_0001.hdf5", lambda content: content[:99] + b"!" + content[100:]),
        ("wiki_training_0001.hdf5", lambda content: content[:99]),
        ("wiki_training_0001.hdf5", None),  # removed
        ("manifest.json", None),
        ("manifest.json", "fifo"),
        ("manifest.json", lambda content: content.replace(b'"seed": 12349', b'"seed": 1')),
        *(("manifest.json", lambda _, text=text: text) for text in MANIFESTS),
    ],
)
def test_damage_is_found_and_mended(tiny, name, damage, caplog):
    first = prepare("bert", **tiny)
    before, path = hashes(first.folder), first.folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage is not None:
        path.write_bytes(damage(content))
    assert prepare("bert", **tiny) == first
    assert hashes(first.folder) == before
    assert "damaged" in caplog.text and str(first.folder) in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("name", ["sub/notes", "fifo"])
def test_a_file_that_does_not_belong_is_named_and_stays(tiny, name, damaged):
    folder = prepare("bert", **tiny).folder
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if name == "fifo" else path.write_text("mine")
    if damaged:
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{folder} holds {name}, not of this data set"):
        prepare("bert", **tiny)
    assert path.exists()
    path.unlink()
    prepare("bert", **tiny)


def test_a_folder_without_permission_is_named_with_the_option(tiny):
    """In a checkout of somebody else, say. What is complete there can be used."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        dump = Path(shutil.copy(tiny["dump"], folder))
        for target in (folder / "build" / "data", folder, dump):
            with as_nobody(), pytest.raises(OSError, match="data_dir or --data-dir") as caught:
                prepare("bert", **tiny | {"data_dir": target, "dump": dump})
            assert str(target) in str(caught.value)
        there = tiny | {"data_dir": folder / "data", "dump": dump}
        prepared = prepare("bert", **there)
        with as_nobody():
            assert prepare("bert", **there) == prepared


def test_wrong_dumps(tmp_path):
    data_dir = tmp_path / "data"
    whole = default_dump().read_bytes()
    cases = {
        "broken": (os.urandom(5000), "not a bz2 file"),
        "empty": (b"", "cut short"),
        "cut": (whole[:900_000], "cut short"),  # WikiExtractor itself hangs on this one
        "other": (bz2.compress(b"hello\n"), "</mediawiki>"),
        "no title": (bz2.compress(b"<mediawiki><page><id/></page></mediawiki>"), "no article"),
    }
    text = bz2.decompress(tiny_dump(tmp_path / "tiny").read_bytes())
    cases["latin-1"] = (bz2.compress(text.replace(b"says", b"s\xe4gt", 1)), "UTF-8: .*line 11")
    for name, (content, _) in cases.items():
        (tmp_path / name).write_bytes(content)
    tiny_dump(tmp_path / "no_end", end="")
    tiny_dump(tmp_path / "no_articles", articles=0)
    tiny_dump(tmp_path / "few", articles=5)
    messages = {name: message for name, (_, message) in cases.items()}
    messages |= {"no_end": "</mediawiki>", "no_articles": "no article"}
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message) as caught:
            prepare(data_dir=data_dir, dump=tmp_path / name, progress=False)
        assert str(tmp_path / name) in str(caught.value)
        assert stages(data_dir) == []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        prepare(data_dir=data_dir, dump=tmp_path / "nowhere", progress=False)
    with pytest.raises(ValueError, match="5 articles are too few for 8 shards"):
        prepare(data_dir=data_dir, dump=tmp_path / "few", vocab_size=70, progress=False)
    assert [name.split("-")[0] for name in stages(data_dir)] == ["corpus", "wordpiece"]


def test_wrong_vocabularies(tiny, tmp_path):
    vocab = tmp_path / "vocab.txt"
    good = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sentence", "article", "says", "."]
    del tiny["vocab_size"]
    for special in good[:5]:
        vocab.write_text("\n".join(token for token in good if token != special) + "\n")
        with pytest.raises(ValueError, match=rf"does not have \{special}"):
            prepare(**tiny, tokenizer=vocab)
    vocab.write_text("\n".join([*good, "says"]) + "\n")
    with pytest.raises(ValueError, match="'says' twice"):
        prepare(**tiny, tokenizer=vocab)
    vocab.write_text("\n".join(good) + "\n")
    with pytest.raises(ValueError, match="9 tokens, not vocab_size 30,522"):
        prepare(**tiny, tokenizer=vocab, vocab_size=30522)
    with pytest.raises(ValueError, match="text yields 89 tokens, not vocab_size 30,522"):
        prepare(**tiny, vocab_size=30522)
    assert [name.split("-")[0] for name in stages(tiny["data_dir"])] == ["corpus"]
    given = prepare(**tiny, tokenizer=vocab)
    assert (given.folder / "vocab.txt").read_text() == vocab.read_text()
    assert given.counts["vocab_size"] == 9


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "gpt"}, "'gpt' is none of bert, blocks, megatron"),
        ({"seq_len": 128}, "no option seq_len"),
        ({"workers": 0}, "workers is 0"),
        ({"shards": 0}, "shards is 0"),
        ({"seq_length": 16, "max_predictions": 20}, "20, must be at most 13: 3 of 16"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"vocab_size": 5}, "vocab_size is 5, must be at least 6"),
    ],
)
def test_wrong_parameters(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(**tiny | options)


@pytest.mark.parametrize("limit, there", [(4000, []), (20_000, ["corpus", "wordpiece"])])
def test_a_write_that_fails_halfway_leaves_nothing(tiny, limit, there):
    """The kernel refuses to let a file grow past the limit, in the text or in a shard."""
    with largest_file(limit), pytest.raises(OSError):
        prepare("bert", **tiny)
    assert [name.split("-")[0] for name in stages(tiny["data_dir"])] == there
    prepare(**tiny)  # and the next run is none the worse for it


def slow_stage(data_dir):
    def build(folder):
        with open(data_dir / "builders", "a") as log:
            log.write(f"{os.getpid()}\n")
        (folder / "part").write_bytes(b"1")
        wait_for((data_dir / "go").exists, 20, pause=0.02)
        (folder / "whole").write_bytes(b"2")
        return {}

    stage_module.ensure(data_dir, "stage", {"a": 1}, build, needs_bytes=0)


def test_a_run_that_is_killed_leaves_its_lock_and_no_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    builders = tmp_path / "builders"
    processes = [context.Process(target=slow_stage, args=(tmp_path,)) for _ in range(2)]
    try:
        for process in processes:
            process.start()
        wait_for(lambda: builders.exists() and builders.read_text(), 20, pause=0.02)
        first = int(builders.read_text())  # one waits, or has not come yet: one line
        (holder,) = (process for process in processes if process.pid == first)
        (waiter,) = (process for process in processes if process.pid != first)
        holder.kill()
        holder.join()
        (tmp_path / "go").touch()
        waiter.join(20)
        assert waiter.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert builders.read_text().split() == [str(holder.pid), str(waiter.pid)]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())  # no partial one
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "part", "whole"]


@pytest.mark.parametrize(
    "markup, expected",
    [
        ("It <small>is.\n\nA <ref>source.\n\nEnd.", "It is.\nA source.\nEnd."),
        ('A <ref name="a/b">one. B <ref>two</ref> C.', "A one. B C."),
        ("A <REF\ngroup=n>one", "A one"),
        ("A <ref name=x one", "A one"),
        ("x <math>a and <code>b", "x a and b"),
        ("a <!-- never closed", "a never closed"),
        ("w</small> v", "w v"),
        ("<table><tr><td>cell", "cell"),
        ("a<wbr>b <gallery> c", "ab c"),
        # what is closed, shown as it stands, or no tag
        ("a <small>dropped</small> <!-- this too --> b", "a b"),
        ("<nowiki><ref></nowiki> shown, &lt;small&gt; too", "<ref> shown, <small> too"),
        ("a < b and c > d, <unknown>", "a < b and c > d, <unknown>"),
        ("A <ref>one</ref name=x> two</ref> B.", "A B."),
    ],
)
def test_tags_that_stand_alone_do_not_stay_in_the_text(tmp_path, markup, expected):
    dump = tiny_dump(tmp_path / "dump.bz2", articles=1)
    text = bz2.decompress(dump.read_bytes()).decode()
    start, end = text.index("Sentence"), text.index("</text>")
    dump.write_bytes(bz2.compress((text[:start] + escape(markup) + text[end:]).encode()))
    extract(dump, tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out").read_text())["text"] == expected
