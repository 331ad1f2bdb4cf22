"""Which checkpoint is the latest: what was saved last, or a question with the names."""

import os
import shutil
import sys

import pytest

from tests.standin import attempt, edit, mark_as_vendor
from tutorial_lib.checkpoint import tags


def save(folder, step: int, kept: int | None = None, tag: str | None = None) -> str:
    tag = tag or f"step_{step}"
    tags.publish(tags.begin(folder, tag), step, {}, {"tp": 1, "pp": 1})
    tags.rotate(folder, kept, tag)
    return tag


def names(folder) -> list[str]:
    return [item.tag for item in tags.complete(folder)]


def vendor(folder, *found: str) -> None:
    for tag in found:
        (folder / tag / "model").mkdir(parents=True)
        mark_as_vendor(folder / tag)


@pytest.mark.parametrize("cut_off_before", [False, True])
def test_a_replacement_may_be_cut_off_at_any_line(tmp_path, cut_off_before):
    def trace(frame, event, _):
        ours = frame.f_code.co_filename == tags.__file__
        lines.pop() if ours and event == "line" else None
        return trace if ours else None

    for number in range(1, 1000):
        folder, lines = tmp_path / str(number), [None] * number
        save(folder, 1)
        if cut_off_before:  # between its files and its marker, as versions before wrote them
            (folder / "step_1").rename(folder / "step_1.replaced")
            tags.begin(folder, "step_1").rename(folder / "step_1")
        sys.settrace(trace)
        kind, _ = attempt(save, folder, 2, 1, "step_1")
        sys.settrace(None)
        assert kind in (None, IndexError) and names(folder) == ["step_1"]
        save(folder, 3, 1, "step_1")
        assert os.listdir(folder) == ["step_1"] and tags.latest(folder).step == 3
        if kind is None:
            break
    assert number > 100


@pytest.mark.parametrize("kept", [None, 1, 2, 3])
@pytest.mark.parametrize(
    "steps",
    [
        [10, 20, 30, 12],  # went back to step 10
        [10, 20, 30, 12, 20],  # and passes a step that is there already
        [8, 4],  # a run with fewer steps
        [100, 200, 1, 2, 3],  # a run that began anew
        [30, 20, 10],
    ],
)
def test_it_is_what_was_saved_last(tmp_path, steps, kept):
    for step in steps:
        tag = save(tmp_path, step, kept)
        assert tags.latest(tmp_path).tag == tag
        os.utime(tmp_path / f"step_{steps[0]}") if (tmp_path / f"step_{steps[0]}").exists() else 0
        assert tags.latest(tmp_path).tag == tag
    saved = list(dict.fromkeys(f"step_{step}" for step in reversed(steps)))
    assert names(tmp_path) == saved[:kept][::-1]


def test_copies_do_not_reorder(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step_10", tmp_path / "step_99")
    shutil.copytree(tmp_path / "step_30", tmp_path / "a_backup")
    os.symlink("step_20", tmp_path / "latest")
    assert names(tmp_path) == ["step_10", "step_20", "step_30"]
    assert tags.latest(tmp_path).tag == "step_30"
    shutil.rmtree(tmp_path / "step_30")
    assert tags.latest(tmp_path).tag == "a_backup", "a copy serves where the original is gone"
    save(tmp_path, 15, kept=1)
    assert sorted(names(tmp_path)) == ["a_backup", "step_15", "step_99"], "copies are not ours"
    assert tags.latest(tmp_path).tag == "step_15"


def test_a_checkpoint_of_another_folder_is_a_question(tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for step in (10, 20):
        save(ours, step)
    for step in (50, 60, 70):
        save(other, step)
    shutil.copytree(other / "step_70", ours / "step_70")
    kind, message = attempt(tags.latest, ours)
    assert kind is ValueError and "step_20, step_70" in message and "step_10" not in message
    assert tags.find(ours, "step_70").step == 70
    save(ours, 71)
    assert tags.latest(ours).tag == "step_71", "a run that goes on answers it"


def test_the_only_one_of_another_folder_is_where_a_run_goes_on(tmp_path):
    save(tmp_path / "other", 70)
    shutil.copytree(tmp_path / "other" / "step_70", tmp_path / "ours" / "start")
    assert tags.latest(tmp_path / "ours").tag == "start"
    save(tmp_path / "ours", 5)
    assert tags.latest(tmp_path / "ours").tag == "step_5"


def test_checkpoints_of_another_library(tmp_path):
    vendor(tmp_path, "step_9", "step_10")
    assert tags.latest(tmp_path).tag == "step_10"
    save(tmp_path, 3)
    assert tags.latest(tmp_path).tag == "step_3"
    vendor(tmp_path, "step_12")  # which of the two libraries went on?
    kind, message = attempt(tags.latest, tmp_path)
    assert kind is ValueError and "step_12, step_3" in message


@pytest.mark.parametrize("found", [("best", "last"), ("epoch_3", "step_100")])
def test_tags_that_cannot_be_compared(tmp_path, found):
    vendor(tmp_path, *found)
    kind, message = attempt(tags.latest, tmp_path)
    assert kind is ValueError and all(tag in message for tag in found)


MARKERS = [{"step": "a"}, {"sequence": 1.5}, {"mesh": {"tp": "x", "pp": 1}}, {"files": [1]}]


@pytest.mark.parametrize("change", [*MARKERS, b"\xff\xfe\x00", b'{"format": 1, "tag": "st'])
def test_a_marker_with_a_wrong_entry_or_none_hides_no_other_checkpoint(tmp_path, change):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_2")
    marker = tmp_path / "step_2" / "done"
    if isinstance(change, bytes):
        marker.write_bytes(change)
    else:
        edit(marker, lambda found: found.update(change))
    (tmp_path / "step_3" / "done").mkdir(parents=True)
    assert names(tmp_path) == ["step_1"] and tags.incomplete(tmp_path) == [tmp_path / "step_2"]
