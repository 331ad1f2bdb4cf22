"""Collectives and their autograd pairs: values, purity, adjoints, errors."""

from functools import partial

import pytest
import torch

from tests.standin import refused
from tutorial_lib.parallel_layers import comm, mappings, parallel_state

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def shard(tensors, rank, dim):
    return sum(tensors).chunk(len(tensors), dim)[rank]


COLLECTIVES = {  # what the ranks call, and what it gives from the list of all ranks' inputs
    "sum": (partial(comm.all_reduce, "sum"), lambda xs, r: sum(xs)),
    "max": (partial(comm.all_reduce, "max"), lambda xs, r: torch.stack(xs).amax(0)),
    "min": (partial(comm.all_reduce, "min"), lambda xs, r: torch.stack(xs).amin(0)),
    "gather 0": (lambda x: comm.all_gather(x, 0), lambda xs, r: torch.cat(xs, 0)),
    "gather 1": (lambda x: comm.all_gather(x, 1), lambda xs, r: torch.cat(xs, 1)),
    "gather -1": (lambda x: comm.all_gather(x, -1), lambda xs, r: torch.cat(xs, -1)),
    "scatter": (
        lambda x: comm.reduce_scatter("sum", x, scatter_dim=1), lambda xs, r: shard(xs, r, 1)
    ),
    "scatter 0": (
        lambda x: comm.reduce_scatter("sum", x.t(), scatter_dim=0),
        lambda xs, r: shard(xs, r, 1).t(),
    ),
    "scaled": (
        lambda x: comm.reduce_scatter("sum", x, 0.5, -1), lambda xs, r: shard(xs, r, 1) * 0.5
    ),
    "broadcast": (
        lambda x: comm.broadcast(x, parallel_state.get_tensor_model_parallel_size() - 1),
        lambda xs, r: xs[-1],
    ),
}  # fmt: skip


def values(dtype):
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_size()
    inputs = [torch.arange(6.0 * size).reshape(2, 3 * size) + 10 * r for r in range(size)]
    for name, (collective, expected) in COLLECTIVES.items():
        if name == "scaled" and not dtype.is_floating_point:
            continue
        x = inputs[rank].to(dtype)
        found = collective(x)
        assert torch.equal(x, inputs[rank].to(dtype)), f"{name} modified its input"
        assert found.dtype is dtype and torch.equal(found.float(), expected(inputs, rank)), name


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_against_the_formula(ranks, dtype, size):
    ranks(values, dtype, world_size=size, tp=size)


def large():
    """A gather beyond the size from which it takes another way, into memory that is given."""
    x = torch.arange(100_000.0).reshape(400, 250) + parallel_state.get_tensor_model_parallel_rank()
    assert x.nbytes >= comm._LARGE
    before = x.clone()
    gathered = [comm.all_gather(x, dim) for dim in (0, 1)]
    out = torch.zeros(1600, 250)
    assert comm.all_gather_start(x, out=out).wait() is out and torch.equal(out, gathered[0])
    assert torch.equal(x, before), "the collective modified its input"
    return gathered


def test_a_large_gather_takes_the_other_way_to_the_same_values(ranks):
    inputs = [torch.arange(100_000.0).reshape(400, 250) + rank for rank in range(4)]
    for gathered in ranks(large, world_size=4, tp=4):
        assert all(torch.equal(g, torch.cat(inputs, dim)) for dim, g in enumerate(gathered))


def several_at_once():
    """Reduce-scatters that are under way together, finished in another order."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    inputs = [torch.arange(8.0 * n) * (n + rank) for n in range(1, 6)]
    started = [comm.reduce_scatter_start("sum", x, 0.5) for x in inputs]
    found = [pending.wait() for pending in started[::-1]][::-1]
    whole = [sum(torch.arange(8.0 * n) * (n + r) for r in range(4)) / 2 for n in range(1, 6)]
    assert all(torch.equal(f, w.chunk(4)[rank]) for f, w in zip(found, whole, strict=True))


def test_collectives_that_overlap_do_not_mix(ranks):
    ranks(several_at_once, world_size=4, tp=4)


def chunk(tensors, rank, dim):
    return tensors[rank].chunk(len(tensors), dim)[rank]


PAIRS = {  # the mapping, what it gives forward and what backward, from the lists of all ranks
    "copy": (
        mappings.copy_to_tensor_model_parallel_region, lambda xs, r: xs[r], lambda gs, r: sum(gs)
    ),
    "reduce": (
        mappings.reduce_from_tensor_model_parallel_region,
        lambda xs, r: sum(xs), lambda gs, r: gs[r],
    ),
    "scatter": (
        mappings.scatter_to_tensor_model_parallel_region,
        lambda xs, r: chunk(xs, r, -1), lambda gs, r: torch.cat(gs, -1),
    ),
    "gather": (
        mappings.gather_from_tensor_model_parallel_region,
        lambda xs, r: torch.cat(xs, -1), lambda gs, r: chunk(gs, r, -1),
    ),
    "sp_scatter": (
        mappings.scatter_to_sequence_parallel_region,
        lambda xs, r: chunk(xs, r, 0), lambda gs, r: torch.cat(gs, 0),
    ),
    "sp_scatter_1": (
        lambda x: mappings.scatter_to_sequence_parallel_region(x, 1),
        lambda xs, r: chunk(xs, r, 1), lambda gs, r: torch.cat(gs, 1),
    ),
    "sp_gather": (
        mappings.gather_from_sequence_parallel_region,
        lambda xs, r: torch.cat(xs, 0), lambda gs, r: shard(gs, r, 0),
    ),
    "sp_gather_replicated": (
        lambda x: mappings.gather_from_sequence_parallel_region(x, 1, False),
        lambda xs, r: torch.cat(xs, 1), lambda gs, r: chunk(gs, r, 1),
    ),
    "sp_reduce_scatter": (
        mappings.reduce_scatter_to_sequence_parallel_region,
        lambda xs, r: shard(xs, r, 0), lambda gs, r: torch.cat(gs, 0),
    ),
}  # fmt: skip


def forward_and_backward(name):
    rank = parallel_state.get_tensor_model_parallel_rank()
    x = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    before = x.detach().clone()
    y = PAIRS[name][0](x)
    generator = torch.Generator().manual_seed(10 + rank)
    seed = torch.randn(y.shape, generator=generator, requires_grad=True)
    kept = seed.detach().clone()
    (grad,) = torch.autograd.grad(y, x, seed, create_graph=True)
    (again,) = torch.autograd.grad(grad, seed, before)
    assert torch.equal(again, y), "the backward's own backward is not the forward"
    assert torch.equal(x, before) and torch.equal(seed, kept), "it modified its input or gradient"
    return before, y.detach(), kept, grad.detach()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_forward_and_backward(ranks, name, size):
    found = ranks(forward_and_backward, name, world_size=size, tp=size)
    xs, gs = [f[0] for f in found], [f[2] for f in found]
    _, forward, backward = PAIRS[name]
    for rank, (_, y, _, grad) in enumerate(found):
        torch.testing.assert_close(y, forward(xs, rank), rtol=0, atol=1e-6)
        torch.testing.assert_close(grad, backward(gs, rank), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["sp_scatter", "sp_reduce_scatter"])
def test_a_sequence_that_does_not_divide_is_named_on_all_ranks(ranks, name):
    refused(ranks, ValueError, ["5", "2"], partial(PAIRS[name][0], torch.ones(5, 2)))


def dimensions_that_are_not_there():
    for call in (
        lambda: comm.all_gather(torch.ones(4, 2), 2),
        lambda: comm.reduce_scatter("sum", torch.ones(4, 2), 1.0, -3),
    ):
        with pytest.raises(ValueError, match=r"shape \(4, 2\) has no dimension (2|-3)"):
            call()


@pytest.mark.parametrize("size", [1, 2])
def test_a_dimension_that_is_not_there_is_named(ranks, size):
    ranks(dimensions_that_are_not_there, world_size=size, tp=size)


def fail_on_rank_one(plain):
    error = None
    if parallel_state.get_tensor_model_parallel_rank() == 1:
        with pytest.raises(ValueError) as caught:
            int("x") if plain else b"\xff".decode()  # an error that takes more than a message
        error = caught.value
    comm.raise_on_all(error)


@pytest.mark.parametrize("plain", [True, False])
def test_an_error_of_one_rank_reaches_all(ranks, plain):
    errors = ranks(fail_on_rank_one, plain, world_size=2, tp=2, return_exceptions=True)
    kinds = [ValueError, ValueError] if plain else [RuntimeError, UnicodeDecodeError]
    assert [type(e) for e in errors] == kinds
    assert str(errors[0]) == f"rank 1: {errors[1]}"


def bytes_of_collectives():
    with comm.record() as log:
        with comm.record() as inner:
            comm.all_reduce("sum", torch.ones(1024))
        comm.all_gather(torch.ones(256))
        comm.reduce_scatter("sum", torch.ones(1024))
    assert inner == log[:1]
    return [(c.kind, c.nbytes, c.bytes_sent) for c in log]


def test_ring_bytes(ranks):
    assert ranks(bytes_of_collectives, world_size=4, tp=4)[0] == [
        ("all_reduce", 4096, 6144.0), ("all_gather", 1024, 3072), ("reduce_scatter", 4096, 3072.0)
    ]  # fmt: skip


def foreign_group():
    import torch.distributed as dist

    comm.all_reduce("sum", torch.ones(1), dist.new_group([0, 1]))


def test_a_group_of_ones_own_is_refused(ranks):
    with pytest.raises(ValueError, match="not a group of parallel_state"):
        ranks(foreign_group, world_size=2, tp=2)
