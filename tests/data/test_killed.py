"""A preparation that is killed or ended leaves no process and no partial file."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.data.test_prepare import tiny_dump
from tests.slurm import wait_for
from tests.test_preprocess_data import sentences, write_lines

STAGES = [("corpus", signal.SIGKILL), ("bert", signal.SIGTERM), ("bert", signal.SIGKILL)]


@pytest.mark.parametrize("stage, number", [*STAGES, ("preprocess", signal.SIGKILL)])
def test_nothing_is_left(tmp_path, stage, number):
    data = tmp_path / "data"
    data.mkdir()
    if stage == "preprocess":
        lines = tmp_path / "in.jsonl"
        write_lines(lines, 60 * sentences(1000))
        words = ["preprocess_data", "--input", lines, "--output-prefix", data / "out"]
        words += ["--vocab-size", "300"]
    else:
        dump = tiny_dump(tmp_path / "dump.bz2", articles=6000 if stage == "corpus" else 600)
        words = ["prepare", "--data-dir", data, "--dump", dump, "--vocab-size", "80"]
        words += ["--shards", "2", "--duplication", "60"]
    command = [sys.executable, "-m", "data_scripts." + words[0], *map(str, words[1:])]
    process = subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.DEVNULL)
    pattern = "out_*.partial*" if stage == "preprocess" else f".{stage}-*.partial"
    wait_for(lambda: list(data.glob(pattern)), 60, pause=0.02)
    parent = psutil.Process(process.pid)
    children = wait_for(lambda: (c := parent.children(True)) and len(c) > 2 and c, 60, pause=0.02)
    assert process.poll() is None, "it ended before it was killed"
    process.send_signal(number)
    process.wait(30)
    gone, alive = psutil.wait_procs(children, timeout=8)
    assert not alive
    assert not list(data.rglob("*partial*"))
    assert os.listdir(data) if stage == "bert" else True
