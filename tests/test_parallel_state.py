"""The mesh of ranks: layouts with known answers, errors with numbers, groups on real ranks."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers import ranks as node_ranks
from tutorial_lib.parallel_layers.parallel_state import layout

from .standin import refused


def test_layout_puts_tensor_parallel_ranks_side_by_side():
    tensor, data = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout(8, 2) == (tensor, data)


@pytest.mark.parametrize(
    "sizes, numbers",
    [
        ((2, 8), "world size 2 .*2 is not divisible by 8"),
        ((8, 3), "8 is not divisible by 3"),
        ((4, 0), "tensor_model_parallel_size is 0"),
        ((4, "2"), "tensor_model_parallel_size is '2'"),
        ((4, 2.0), "tensor_model_parallel_size is 2.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, numbers):
    with pytest.raises(ValueError, match=numbers):
        layout(*sizes)


def coordinates():
    ps = parallel_state
    groups = ps.get_tensor_model_parallel_group, ps.get_data_parallel_group
    return {
        "tp": (ps.get_tensor_model_parallel_size(), ps.get_tensor_model_parallel_rank()),
        "dp": (ps.get_data_parallel_size(), ps.get_data_parallel_rank()),
        "lists": [group(as_list=True) for group in groups],
        "name": ps.rmsg("here"),
        "gathered": ps.gather_python_object(dist.get_rank(), ps.get_data_parallel_group()),
    }


def test_every_rank_knows_its_place(ranks):
    found = ranks(coordinates, world_size=4, tp=2)
    assert [f["tp"] for f in found] == [(2, 0), (2, 1), (2, 0), (2, 1)]
    assert [f["dp"] for f in found] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert all(f["lists"] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]] for f in found)
    assert found[3]["name"] == "[rank_3_tp1_dp1] here"
    assert [f["gathered"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def initialize_twice():
    parallel_state.initialize_model_parallel(2)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(2)
    parallel_state.initialize_kv_group(2)
    with pytest.raises(ValueError, match="kv groups .* exist"):
        parallel_state.initialize_kv_group(1)
    parallel_state.initialize_model_parallel(2)
    with pytest.raises(RuntimeError, match="kv group is not initialised"):
        parallel_state.get_kv_shared_replica_groups()
    return coordinates()["lists"]


def test_destroy_and_initialize_again(ranks):
    expected = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert ranks(initialize_twice, world_size=4, tp=None, timeout=20) == [expected] * 4


def initialize(*sizes):
    parallel_state.initialize_model_parallel(*sizes)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((8,), "world size 2 over tensor_model_parallel_size 8"),
        ((1, 2), "sizes (2, 1, 1) are not supported"),
        ((1, 1, 2), "sizes (1, 2, 1) are not supported"),
        ((1, 1, 1, 2), "sizes (1, 1, 2) are not supported"),
    ],
)
def test_degrees_that_cannot_be_are_refused_on_every_rank(ranks, sizes, words):
    refused(ranks, ValueError, [words], initialize, *sizes, tp=None)


def getters_before_init():
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_size()
    return parallel_state.rmsg("x")


def test_getters_say_what_to_call(ranks):
    assert ranks(getters_before_init, world_size=2, tp=None) == ["[rank_0] x", "[rank_1] x"]


def time_outs():
    groups = parallel_state.get_tensor_model_parallel_group(), dist.group.WORLD
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_a_group_waits_as_long_as_the_world(ranks, backend):
    """Not half an hour, as torch and torch-xla would by themselves: a notebook then hung."""
    for found in ranks(time_outs, world_size=4, tp=2, backend=backend):
        assert found == [timedelta(seconds=30)] * 2


def take_turns():
    """Ranks 0 and 1 are on one node, rank 2 on another."""
    rank = dist.get_rank()
    place = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": str(2 - rank // 2)}
    with mock.patch.dict(os.environ, place):
        return node_ranks.in_turn(lambda: rank, num_workers=1), node_ranks.gather(rank)


def test_nodes_with_different_numbers_of_ranks_stay_in_step(ranks):
    found = ranks(take_turns, world_size=3, tp=1)
    assert found == [(rank, [0, 1, 2]) for rank in range(3)]
