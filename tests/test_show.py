"""Tables, predictions, claims, exercises, source, pictures, and the counter of bytes sent."""

import json
import os
import socket
import sys

import numpy as np
import pytest
import torch

from tutorial_lib.lab import show
from tutorial_lib.parallel_layers import comm
from tutorial_lib.parallel_layers.recording import bytes_sent


def test_table_is_text_and_html():
    drawn = show.table(
        [{"rank": 0, "shape": "(2, 3)", "MB": 12345.5}, {"rank": 1, "shape": "<b>", "MB": 1e6}],
        "Shapes",
    )
    assert repr(drawn).splitlines() == [
        "Shapes",
        "rank  shape          MB",
        "────  ──────  ─────────",
        "   0  (2, 3)     12,346",
        "   1  <b>     1,000,000",
    ]
    page = drawn._repr_html_()
    assert '<td align="right" style="text-align: right">12,346</td>' in page and "&lt;b&gt;" in page


def test_by_rank_names_the_rank_that_differs():
    drawn = show.by_rank({"sum": [1.0] * 4, "weight": [3, 3, 7, 3], "slice": [0, 1, 2, 3]})
    assert [row[-1] for row in drawn.rows] == [
        "all 4 ranks agree",
        "rank 2 differs from the others",
        "",
    ]
    assert drawn.marked == {1}
    assert drawn._repr_html_().count("◀") == 1


def test_two_ranks_that_differ_blame_neither():
    assert show.by_rank({"a": [1, 2]}).marked == set()


def test_compare_gives_ratios():
    pairs = {"all_reduce": (6300, 6000), "broadcast": (None, 10), "nothing": (0, 0)}
    assert [row[-1] for row in show.compare(pairs, "bytes").rows] == ["1.0500", "–", "–"]


def test_sizes():
    assert [show.size(n) for n in (0, 1023, 1024, 6 * 2**20, 5 * 2**50)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "6.0 MiB", "5120.0 TiB"
    ]  # fmt: skip


def test_prediction(capsys):
    show.predict("How many?", 8, "MB").reveal(4, "half as many.")
    assert "your guess: 8 MB, 2.00 of it" in capsys.readouterr().out
    show.predict("How many?").reveal(4)
    assert "guess" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="'four' is not a number"):
        show.predict("How many?", "four")


def test_claims_are_in_the_file_and_fatal_where_they_fail(tmp_path):
    claims = show.Claims(tmp_path / "new", {"tp_size": 2, "dtype": torch.float32})
    claims.add("loss", torch.tensor(2.0005), 2.0, tolerance=1e-3)
    claims.add("ranks", [0, 1], [0, 1])
    claims.add("difference", np.float64(1e-6), 1e-4, relation="<=")
    claims.metric("Final loss", 2.0, "nat", Epoch=1)
    with pytest.raises(
        show.ClaimError, match=r"weight: measured 3, expected 2\.5 ± 0\.1, off by 0\.5"
    ):
        claims.add("weight", 3, 2.5, 0.1)
    content = json.loads((tmp_path / "new" / "results.json").read_text())
    assert content["results"]["parameters"] == {"tp_size": 2, "dtype": "torch.float32"}
    assert content["results"]["metrics"][0]["MetricName"] == "Final loss"
    assert [claim["passed"] for claim in content["claims"]] == [True, True, True, False]
    assert set(content["claims"][0]) == {"name", "measured", "expected", "tolerance", "passed"}
    assert claims.table().marked == {3}
    claims.add("weight", 2.5, 2.5)
    assert claims.table().marked == set()


def test_a_claim_that_is_only_compiled_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    claims = show.Claims(tmp_path, {})
    claims.add("loss", 0.0, 2.5)
    assert "only compiled" in claims.table()._repr_html_()
    assert not json.loads((tmp_path / "results.json").read_text())["claims"][0]["passed"]


@pytest.mark.parametrize(
    "measured, expected, options",
    [
        (float("nan"), 1.0, {}),
        (float("nan"), 1.0, {"tolerance": float("inf")}),
        (float("nan"), 1.0, {"relation": "<="}),
        (1e-3, 1e-4, {"relation": "<="}),
        (1.0, 1.0, {"relation": "<"}),
        ([1], [2], {}),
        (torch.ones(2), torch.zeros(2), {}),
    ],
)
def test_claims_that_fail(tmp_path, measured, expected, options):
    with pytest.raises(show.ClaimError):
        show.Claims(tmp_path, {}).add("it", measured, expected, **options)


@pytest.mark.parametrize(
    "value, options",
    [(1, {"relation": "~"}), (1, {"tolerance": 0.1, "relation": "<="}), ([1], {"tolerance": 0.1})],
)
def test_claims_that_make_no_sense(tmp_path, value, options):
    with pytest.raises(ValueError, match="relation"):
        show.Claims(tmp_path, {}).add("it", value, value, **options)


class Base:
    def same(self):
        return 1

    def other(self, x):
        """Doc."""
        y = x + 1  # comment
        return y  # noqa: RET504


# fmt: off
def spread(
    first: str,
):
    """Doc."""
    return (
        first
    )
# fmt: on


def test_source_with_and_without_docstrings():
    assert "Doc." in repr(show.source(Base)) and "# comment" in repr(show.source(Base.other))
    bare = repr(show.source(Base, docstring=False))
    assert "Doc." not in bare and "y = x + 1  # comment" in bare
    layout = repr(show.source(spread, docstring=False))
    assert layout == "def spread(\n    first: str,\n):\n    return (\n        first\n    )"


@pytest.mark.parametrize(
    "picture",
    [
        lambda: show.mesh_grid([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        lambda: show.slices((256, 1024), 4, "rows"),
        lambda: show.slices((1024, 256), 4),
        lambda: show.strips({"first": [(3, 60), (7, 5)], "second": [(7, 65)]}, "samples"),
        lambda: show.stacked({"7B": {"weights": 3e9, "gradients": 2e9}}, 4e9, "A core"),
        lambda: show.growth([1, 2], {"at most": [5, 9]}, {"published": [(1, 4)]}, "n", "s", "x"),
        lambda: show.curves({"dp": [3.0, 2.0], "tp": [3.0, 2.0]}),
        lambda: show.bars({"all_reduce": [6e6] * 4}, {"all_reduce": [6e6] * 4}, "Sent"),
    ],
)
def test_pictures_are_small_and_the_same_each_time(picture):
    png, size = picture()._repr_png_()
    assert png.startswith(b"\x89PNG") and len(png) < 60_000 and 300 < size["width"] < 900
    assert picture()._repr_png_()[0] == png


def send_a_million():
    files, before = len(os.listdir("/proc/self/fd")), bytes_sent()
    comm.all_gather(torch.ones(250_000))
    sent = bytes_sent() - before
    assert len(os.listdir("/proc/self/fd")) == files, "it leaves a file open"
    return sent


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux counts a process's bytes"
)
def test_bytes_sent_counts_what_a_collective_sends(ranks):
    for sent in ranks(send_a_million, world_size=2, tp=2):
        assert 1_000_000 <= sent < 1_005_000


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux counts a process's bytes"
)
def test_bytes_sent_leaves_no_file_open():
    before = len(os.listdir("/proc/self/fd"))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        there, _ = server.accept()
        first = bytes_sent()
        here.sendall(bytes(1000))
        assert bytes_sent() - first == 1000
        here.setblocking(False)  # the peer reads nothing: most of this waits in the system's buffer
        accepted = here.send(bytes(10_000_000))
        assert bytes_sent() - first == 1000 + accepted and accepted > 100_000
        there.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_bytes_sent_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert bytes_sent() is None
