"""Gradients between backward and step: norms counted once, averages over the right group, drift
found by name.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tutorial_lib.parallel_layers import buckets, comm, consistency, grads, parallel_state
from tutorial_lib.parallel_layers.marks import set_tensor_model_parallel_attributes

TP, DP = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank


def parameter(grad, sharded=False, dtype=torch.float32, **marks):
    p = nn.Parameter(torch.zeros(len(grad), dtype=dtype))
    p.grad = torch.tensor(grad, dtype=dtype)
    if sharded:
        set_tensor_model_parallel_attributes(p, True, 0, 1)
    vars(p).update(marks)
    return p


# --- the norm -------------------------------------------------------------------------------------


def clip_sharded_and_replicated():
    sharded, replicated = parameter([3.0 + TP()], sharded=True), parameter([12.0])
    unused = nn.Parameter(torch.zeros(2))
    norm = grads.clip_grad_norm((p for p in (sharded, unused, replicated)), 1.0)
    return norm, sharded.grad, replicated.grad, unused.grad


def test_a_replicated_parameter_counts_once(ranks):
    found = ranks(clip_sharded_and_replicated, world_size=2, tp=2)
    for rank, (norm, sharded, replicated, unused) in enumerate(found):
        assert norm.item() == 13.0 and norm.shape == ()
        assert sharded.item() == pytest.approx((3 + rank) / 13, abs=1e-6)
        assert replicated.item() == pytest.approx(0.923077, abs=1e-6)
        assert unused is None


def clip_averaged():
    p = parameter([0.8])
    before = p.grad.clone()
    return grads.clip_grad_norm(p, 1.0).item(), torch.equal(p.grad, before)


def test_data_parallel_replicas_do_not_add_up_and_a_small_norm_changes_nothing(ranks):
    assert ranks(clip_averaged, world_size=2) == [(pytest.approx(0.8), True)] * 2


def clip_tied():
    a, b = parameter([3.0]), parameter([4.0])
    return grads.clip_grad_norm([a, b, a], 1.0).item(), a.grad.item()


def test_a_tied_parameter_counts_once_and_is_scaled_once(ranks):
    assert ranks(clip_tied, world_size=2) == [(5.0, pytest.approx(0.6, abs=1e-6))] * 2


def norm_of(values, dtype):
    parameters = [parameter(values[TP()], True, dtype), parameter([5.0], dtype=dtype)]
    return grads.get_grad_norm(parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_that_of_the_whole_vector(ranks, dtype):
    first, second = ranks(norm_of, [[1.0, -2.0], [3.0, -4.0]], dtype, world_size=2, tp=2)
    assert torch.equal(first, second), "the ranks disagree"
    assert first.dtype == torch.promote_types(dtype, torch.float32)
    assert first.item() == pytest.approx(55**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_any_rank_is_the_norm_on_all(ranks, bad):
    values = [[1.0, torch.nan if rank == bad else 5.0] for rank in range(2)]
    found = ranks(norm_of, values, torch.float32, world_size=2, tp=2)
    assert all(norm.isnan() for norm in found)


def no_gradients():
    return grads.clip_grad_norm(iter([nn.Parameter(torch.ones(2))]), 1.0).item()


def test_no_gradient_at_all_is_a_norm_of_zero(ranks):
    assert ranks(no_gradients, world_size=2, tp=2) == [0.0, 0.0]


def wrong_arguments():
    with pytest.raises(ValueError, match="max_norm -1.0"):
        grads.clip_grad_norm(parameter([1.0]), -1.0)
    elsewhere = parameter([1.0])
    set_tensor_model_parallel_attributes(elsewhere, True, 0, 1, num_partitions=4)
    with pytest.raises(ValueError, match="sharded over 4 ranks.*over the 2 of"):
        grads.get_grad_norm(elsewhere)


def test_bad_arguments_are_named_on_every_rank(ranks):
    ranks(wrong_arguments, world_size=2, tp=2)


# --- reductions -----------------------------------------------------------------------------------


def average_many(cap_mb):
    torch.manual_seed(DP())
    tensors = [
        torch.randn(n).to(dtype)
        for n in (3, 1000, 7, 500)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    tensors += [torch.randn(()), torch.randn(4, 5).t()]
    before = [t.clone() for t in tensors]
    with mock.patch.object(buckets, "HOST_BUCKET_CAP_MB", cap_mb), comm.record() as log:
        grads.bucket_allreduce_gradients(iter(tensors))
    return before, tensors, len(log)


@pytest.mark.parametrize("cap_mb, collectives", [(1, 2), (0.0041, 3), (0, 10)])
def test_buckets_by_dtype_and_cap_give_the_same_average(ranks, cap_mb, collectives):
    found = ranks(average_many, cap_mb, world_size=2)
    for *before, after in zip(*(f[0] for f in found), found[1][1]):
        assert torch.equal(after, (before[0] + before[1]) / 2)
    assert found[0][2] == collectives


def sequence_parallel_sum():
    w = nn.Parameter(torch.ones(()))
    w.sequence_parallel_enabled = True
    plain = nn.Parameter(torch.ones(()))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).chunk(2)[TP()]
    (w * x + plain * x).sum().backward()
    optimizer = torch.optim.SGD([{"params": [plain]}, {"params": [w]}], lr=1.0)
    with comm.record() as log:
        grads.allreduce_sequence_parallel_gradients(optimizer)
    return w.grad.item(), plain.grad.item(), len(log)


def test_sequence_parallel_gradients_are_summed(ranks):
    assert ranks(sequence_parallel_sum, world_size=2, tp=2) == [(10.0, 3.0, 1), (10.0, 7.0, 1)]


def one_rank_lacks_a_share():
    both, lacking = (parameter(g, sequence_parallel_enabled=True) for g in ([2.0], [4.0, 6.0]))
    wide = parameter([8.0], dtype=torch.bfloat16, sequence_parallel_enabled=True)
    grads.accumulate_widely(wide)
    wide.grad = wide.grad.float() + 2**-10
    if TP() == 1:
        lacking.grad = wide.grad = None
    grads.allreduce_sequence_parallel_gradients(torch.optim.SGD([lacking, wide, both], lr=1.0))
    assert wide.grad.dtype == torch.float32
    return [p.grad.tolist() for p in (both, lacking, wide)]


def test_a_gradient_that_one_rank_of_the_group_lacks_counts_as_zero(ranks):
    expected = [[4.0], [4.0, 6.0], [8 + 2**-10]]
    assert ranks(one_rank_lacks_a_share, world_size=2, tp=2) == [expected] * 2


# --- replicated stays replicated ------------------------------------------------------------------


def drift(where):
    model = nn.ModuleDict({"norm": nn.LayerNorm(3), "dense": nn.Linear(3, 3, bias=False)})
    with torch.no_grad():
        model["dense"].weight.fill_(1.0 + TP())
        set_tensor_model_parallel_attributes(model["dense"].weight, True, 0, 1)
        if dist.get_rank() == 3 and where:
            model[where].weight[-1] *= 1 + 2**-20
    return consistency.find_drift(model)


@pytest.mark.parametrize(
    "where, groups",
    [
        (None, []),
        ("norm", ["rank 1 of the same data", "rank 2 of the same tensor"]),
        ("dense", ["rank 1 of the same data"]),
    ],
)
def test_a_drifted_parameter_is_named_with_its_rank_on_all(ranks, where, groups):
    found = ranks(drift, where, world_size=4, tp=2)
    named = f"parameter '{where}.weight' on rank 3 differs from "
    assert found == [[f"{named}{group}-parallel group" for group in groups]] * 4


def kv_drift():
    parallel_state.initialize_kv_group(2)
    qkv = parameter([0.0, 0.0], sharded=True, kv_shared_numel=1)
    with torch.no_grad():
        qkv[0], qkv[1] = TP(), TP() // 2
        before = consistency.find_drift([("qkv", qkv)])
        if TP() == 1:
            qkv[1] = 7
    return before, consistency.find_drift([("qkv", qkv)])


def test_drift_within_a_kv_group_is_found(ranks):
    before, after = ranks(kv_drift, world_size=4, tp=4)[1]
    assert before == [] and after == [
        "parameter 'qkv' on rank 1 differs from rank 0 of the same kv-parallel group"
    ]
