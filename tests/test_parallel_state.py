"""The mesh of ranks: layouts with known answers, errors with numbers, groups on real ranks."""

import pytest
import torch.distributed as dist

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.rank_layout import arrange_kv_groups, layout, same_weight_groups


def test_layout_puts_tensor_parallel_ranks_side_by_side():
    groups = layout(8, 2)
    assert groups.tp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups.dp_groups == [[0, 2, 4, 6], [1, 3, 5, 7]]
    groups = layout(8, 2, 2)
    assert groups.dp_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.pp_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_context_parallel_lies_between_tensor_and_data():
    groups = layout(8, 2, 1, 2)
    assert groups.cp_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.dp_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert same_weight_groups(groups) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_expert_view():
    groups = layout(8, 2, 1, 1, 2)
    assert groups.ep_model_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.ep_data_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_trn1_ring_is_by_choice():
    assert layout(8, 4).tp_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    ring = layout(8, 4, trn1_tp4_ring=8)
    assert ring.tp_groups == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ring.dp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout(8, 4, trn1_tp4_ring=4).tp_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "sizes, numbers",
    [
        ((2, 8), "world size 2"),
        ((8, 3), "8.*tensor 3"),
        ((4, 0), "tensor 0"),
        ((4, "2"), "tensor '2'"),
        ((4, 2.0), "tensor 2.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, numbers):
    with pytest.raises(ValueError, match=numbers):
        layout(*sizes)


def test_kv_groups():
    assert arrange_kv_groups([[0, 1, 2, 3]], 2) == [[0, 2], [1, 3]]
    assert arrange_kv_groups([[0, 1, 2, 3]], 2, sequential_ranks_in_group=True) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="3 does not divide the tensor parallel size 4"):
        arrange_kv_groups([[0, 1, 2, 3]], 3)


def coordinates():
    ps = parallel_state
    return {
        "tp": (ps.get_tensor_model_parallel_size(), ps.get_tensor_model_parallel_rank()),
        "dp": (ps.get_data_parallel_size(), ps.get_data_parallel_rank()),
        "src": (ps.get_tensor_model_parallel_src_rank(), ps.get_data_parallel_src_rank()),
        "lists": (
            ps.get_tensor_model_parallel_group(as_list=True),
            ps.get_data_parallel_group(as_list=True),
        ),
        "name": ps.rmsg("here"),
        "gathered": ps.gather_python_object(dist.get_rank(), ps.get_data_parallel_group()),
    }


def test_every_rank_knows_its_place(ranks):
    found = ranks(coordinates, world_size=4, tp=2)
    assert [f["tp"] for f in found] == [(2, 0), (2, 1), (2, 0), (2, 1)]
    assert [f["dp"] for f in found] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert [f["src"] for f in found] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert all(f["lists"] == ([[0, 1], [2, 3]], [[0, 2], [1, 3]]) for f in found)
    assert found[3]["name"] == "[rank_3_pp0_tp1_dp1_cp0] here"
    assert [f["gathered"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_source_ranks_at_tensor_parallel_4(ranks):
    assert [f["src"] for f in ranks(coordinates, world_size=4, tp=4)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
    ]


def initialize_twice():
    parallel_state.initialize_model_parallel(2)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(2)
    parallel_state.initialize_kv_group(2)
    parallel_state.initialize_model_parallel(2)
    with pytest.raises(RuntimeError, match="kv group is not initialised"):
        parallel_state.get_kv_shared_group()
    return coordinates()["lists"]


def test_destroy_and_initialize_again(ranks):
    assert ranks(initialize_twice, world_size=4, tp=None, timeout=20)[0] == (
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
    )


def too_large():
    parallel_state.initialize_model_parallel(8)


def test_a_degree_larger_than_the_world_is_refused_on_every_rank(ranks):
    errors = ranks(too_large, world_size=2, tp=None, return_exceptions=True)
    assert all(
        isinstance(e, ValueError) and "world size 2 is not divisible by tensor 8" in str(e)
        for e in errors
    )


def getters_before_init():
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_size()
    return parallel_state.rmsg("x")


def test_getters_say_what_to_call(ranks):
    assert ranks(getters_before_init, world_size=2, tp=None) == ["[rank_0] x", "[rank_1] x"]
