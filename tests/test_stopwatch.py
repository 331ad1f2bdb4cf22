"""Times of collectives by rank, and the picture of them."""

import time

import pytest
import torch
import torch.distributed as dist

from tutorial_lib.lab import show
from tutorial_lib.lab.stopwatch import Call, StepTimes, record_times, segments, shares
from tutorial_lib.parallel_layers import comm

PAIR = (0, 1)


def test_a_rank_waits_for_the_last_of_its_group_and_then_communicates():
    fast = StepTimes(0, 10, [Call("all_reduce", PAIR, 2, 2, 7), Call("all_reduce", PAIR, 8, 8, 9)])
    slow = StepTimes(0, 10, [Call("all_reduce", PAIR, 6, 6, 7), Call("all_reduce", PAIR, 8, 8, 9)])
    found = segments([fast, slow])
    computing, waiting, communicating = "computing", "waiting", "communicating"
    assert found[0] == [
        (computing, 0, 2), (waiting, 2, 6), (communicating, 6, 7), (computing, 7, 8),
        (communicating, 8, 9), (computing, 9, 10),
    ]  # fmt: skip
    assert shares([fast, slow]) == [
        {computing: 4, waiting: 4, communicating: 2},
        {computing: 8, waiting: 0, communicating: 2},
    ]


def test_what_runs_while_a_rank_computes_takes_no_time():
    one = StepTimes(0, 6, [Call("all_reduce", PAIR, 1, 4, 4.5)])
    other = StepTimes(0, 6, [Call("all_reduce", PAIR, 2, 4, 4.5)])
    assert segments([one, other])[0] == [
        ("computing", 0, 4), ("communicating", 4, 4.5), ("computing", 4.5, 6)
    ]  # fmt: skip
    drawn = show.timeline({"overlapped": [one, other]}, "A step")
    data, metadata = drawn._repr_png_()
    assert data.startswith(b"\x89PNG") and "8 % communicating" in metadata["alt"]


def test_a_pipeline_shows_what_each_stage_did():
    done = [("forward", 0, 1.0, 2.0), ("backward", 0, 3.0, 5.0)]
    data, metadata = show.pipeline({"stage 0": done}, "One")._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert metadata["alt"] == "A pipeline by time. stage 0: forward 0, backward 0."


def late_and_overlapped(groups):
    """Rank 0 is late for the first sum, and computes while the second travels."""
    rank = dist.get_rank()
    with record_times() as times:
        time.sleep(0.3 if rank == 0 else 0.0)
        total = comm.all_reduce("sum", torch.ones(4), groups)
        pending = comm.all_reduce_start("sum", torch.ones(4), groups)
        time.sleep(0.1)
        again = pending.wait()
        dist.all_reduce(again)  # a notebook's own call
    assert total.tolist() == [2.0] * 4 and again.tolist() == [4.0] * 4
    return times


def test_ranks_record_their_own_collectives(ranks):
    recorded = ranks(late_and_overlapped, None, world_size=2, tp=2)
    assert [call.kind for call in recorded[1].calls] == ["all_reduce"] * 3
    assert all(call.ranks == PAIR for times in recorded for call in times.calls)
    assert recorded[1].calls[1].waited - recorded[1].calls[1].begun == pytest.approx(0.1, abs=0.05)
    late, punctual = shares(recorded)
    assert punctual["waiting"] > 0.2 > 0.1 > late["waiting"]
    assert dist.all_reduce.__module__.startswith("torch."), "the functions are put back"
