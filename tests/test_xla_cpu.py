"""XLA between CPU processes. The rank functions run in the pool of `conftest`, whose xla pools have
called `start()`.
"""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tutorial_lib import backends, xla_cpu
from tutorial_lib.xla_cpu.graphs import Collective, find_collectives

XLA = {"backend": "xla", "timeout": 240}
AXES = [[0, 1], [2, 3]], [[0, 2], [1, 3]]  # tensor parallel, data parallel at TP 2 × DP 2


def _xla():
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tutorial_lib import xla_cpu

    return torch_xla, xm, xla_cpu


def _sum(xm, tensor, groups):
    return xm.all_reduce("sum", tensor, groups=groups, pin_layout=False)


# --- values, views, dtypes ------------------------------------------------------------------------


def collectives_on_ranks():
    torch_xla, xm, _ = _xla()
    rank, pair = backends.dist.get_rank(), [[0, 1]]
    x = (torch.arange(8.0).reshape(2, 4) + 10 * rank).to("xla")
    results = [
        _sum(xm, x, pair),
        xm.all_reduce("max", x, groups=pair, pin_layout=False),
        xm.all_reduce("sum", x),  # all ranks, layout pinned: torch-xla's defaults
        xm.all_gather(x, dim=1, groups=pair, pin_layout=False),
        xm.all_gather(x),
        xm.reduce_scatter("sum", x, 0.5, 1, 2, groups=pair, pin_layout=False),
        xm.all_to_all(x, 0, 1, 2, groups=pair, pin_layout=False),
        xm.collective_permute(x, [[0, 1], [1, 0]]),
        *xm.all_gather_bucketized([x, x], groups=pair),
        *xm.reduce_scatter_bucketized("sum", [x, x + 1], 1.0, 1, 2, groups=pair),
        x * (rank + 2),  # a graph that differs between the ranks
    ]
    in_place = x.clone()
    xm.all_reduce("sum", [in_place], scale=0.5, groups=pair)
    torch_xla.sync()
    return [t.cpu() for t in (*results, in_place, x)]


def test_collectives_give_the_values_of_all_ranks_and_leave_their_input(ranks):
    got = ranks(collectives_on_ranks, world_size=2, **XLA)
    inputs = [torch.arange(8.0).reshape(2, 4) + 10 * rank for rank in range(2)]
    total = inputs[0] + inputs[1]
    for rank in range(2):
        expected = [
            total,
            torch.maximum(*inputs),
            total,
            torch.cat(inputs, 1),
            torch.cat(inputs, 0),
            total.chunk(2, 1)[rank] / 2,
            torch.cat([t.chunk(2, 0)[rank] for t in inputs], 1),
            inputs[1 - rank],
            *[torch.cat(inputs, 0)] * 2,
            *[summed.chunk(2, 1)[rank] for summed in (total, total + 2)],
            inputs[rank] * (rank + 2),
            total / 2,
            inputs[rank],
        ]
        for index, (a, b) in enumerate(zip(got[rank], expected)):
            assert torch.equal(a, b), (rank, index, a, b)


@pytest.mark.parametrize("name", xla_cpu.NARROW)
def test_float32_as_bfloat16_is_refused_by_name(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name}=1"):
        xla_cpu.start()


def dtypes_on_ranks():
    torch_xla, xm, _ = _xla()
    rank, tensors = backends.dist.get_rank(), []
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    ):
        for shape in ((), (1,), (3, 5), (0, 2)):
            tensors.append(
                (
                    torch.arange(15)[: max(torch.Size(shape).numel(), 0)].reshape(shape) % 2 + rank
                ).to(dtype)
            )
    moved = [t.to("xla") for t in tensors]
    computed = [t.clone() for t in moved]
    flag = _sum(xm, torch.ones((), device="xla"), [[0, 1]])
    torch_xla.sync()
    assert flag.item() == 2
    big = torch.tensor([2**53 + 1, -(2**62)]).to("xla") + 1
    torch_xla.sync()
    assert big.tolist() == [2**53 + 2, -(2**62) + 1]
    return all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(computed, tensors))


def test_every_dtype_and_shape_keeps_its_bits(ranks):
    assert ranks(dtypes_on_ranks, world_size=2, **XLA) == [True, True]


def views_on_ranks():
    torch_xla, xm, _ = _xla()
    import tutorial_lib.xla_cpu.tensors as tensors

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.to("xla")
    model[1].weight = model[0].weight
    model[0].weight.partition_dim = 1
    x = torch.ones(3, 4).to("xla")
    y = _sum(xm, x, [[0, 1]])
    row, flat, alias, column = y[1], y.view(-1), y.detach(), y.t()[2]
    held = {"closure": (lambda t: lambda: t)(y * 2), "list": [[(y * 3,)]]}
    only_view = (y * 5)[0].detach()  # nobody can reach what it is a part of
    with torch.no_grad():
        model[0].weight.add_(y[:1])
    version = y._version
    torch_xla.sync()
    assert tensors.count_pending("xla:0") == 0 and y._version == version
    before = [
        t.cpu().tolist()
        for t in (row, column, alias[0], held["closure"]()[0], held["list"][0][0][0][0], only_view)
    ]
    y.add_(1)
    row.mul_(10)
    only_view.add_(1)
    torch_xla.sync()
    assert torch.equal(y.cpu(), torch.tensor([[3.0] * 4, [30.0] * 4, [3.0] * 4])) and torch.equal(
        alias.cpu(), y.cpu()
    )
    assert flat.cpu().tolist() == y.cpu().flatten().tolist() and column.tolist() == [3.0, 30.0, 3.0]
    assert only_view.tolist() == [11.0] * 4
    assert model[1].weight is model[0].weight and model[0].weight.partition_dim == 1
    return before


def test_views_aliases_ties_attributes_and_held_tensors_survive_a_step(ranks):
    for rank in ranks(views_on_ranks, world_size=2, **XLA):
        assert rank == [[2.0] * 4, [2.0] * 3, [2.0] * 4, [4.0] * 4, [6.0] * 4, [10.0] * 4]


def views_of_earlier_values():
    torch_xla, _, _ = _xla()
    buffer = torch.zeros(4).to("xla")
    weight, bias = nn.Parameter(buffer[:2]), nn.Parameter(buffer[2:])
    torch_xla.sync()
    square = buffer.view(2, 2)  # of a tensor that has its value
    alone = nn.Parameter(torch.zeros(2, 2).to("xla"))  # a view of a tensor that nobody holds
    flat, row = alone.data.view(-1), alone.detach()[0]
    seen = []
    for _ in range(2):
        torch_xla.sync()
        buffer.add_(1)
        with torch.no_grad():
            weight.mul_(2), alone.add_(1)
        torch_xla.sync()
        square[1].mul_(3), flat.add_(1)
        torch_xla.sync()
        seen += [[t.tolist() for t in (buffer, weight, bias, square.flatten())]]
        seen += [[t.tolist() for t in (flat, row, alone.flatten())]]
    return seen


def test_views_of_what_an_earlier_step_computed_stay_views(ranks):
    expected = [
        [[2.0, 2.0, 3.0, 3.0], [2.0, 2.0], [3.0, 3.0], [2.0, 2.0, 3.0, 3.0]],
        [[2.0] * 4, [2.0] * 2, [2.0] * 4],
    ]
    expected += [
        [[6.0, 6.0, 12.0, 12.0], [6.0, 6.0], [12.0] * 2, [6.0, 6.0, 12.0, 12.0]],
        [[4.0] * 4, [4.0] * 2, [4.0] * 4],
    ]
    assert ranks(views_of_earlier_values, world_size=2, **XLA) == [expected] * 2


# --- reading --------------------------------------------------------------------------------------


def reading_on_ranks():
    torch_xla, xm, _ = _xla()
    x = torch.arange(4.0).to("xla")
    total = _sum(xm, x, [[0, 1]]).sum()
    many, spare = x + total, x * 2
    ways = [
        lambda: complex(total), total.is_nonzero, lambda: many.numpy(force=True), many.nonzero,
        many.unique,
        lambda: torch.nonzero(many), lambda: torch.equal(many, x), lambda: x.allclose(many),
        lambda: x[many > 2],
        lambda: x.masked_select(many > 2), lambda: spare.__setitem__(many > 2, 0.0),
        lambda: torch.zeros(4).__setitem__(0, total),
        total.item, lambda: repr(total), total.cpu, lambda: total.to("cpu"),
        lambda: float(total), lambda: bool(total > 0),
        total.tolist, lambda: torch.zeros(()).copy_(total), lambda: f"{total:.2f}",
        lambda: xm.unlazy([total]),
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(RuntimeError, match="mark_step"):
            way()
    (
        total.to(torch.float64),
        total.to("xla"),
        total.to(x),
        x.clone().copy_(total),
    )  # these stay on the device
    assert many[1].shape == () and many[x.long()].shape == (4,)  # and these
    local = (x * 2).sum().item(), x.tolist()  # neither depends on a collective
    spare[x + 1 > 2] = 0.0  # nor does the mask
    assert spare.tolist() == [0.0, 2.0, 0.0, 0.0] and torch.equal(x[x * 2 > 2], x[2:])
    torch_xla.sync()
    return total.item(), *local, (total + 1).item()


def test_a_value_behind_a_collective_is_refused_before_the_step_and_right_after_it(ranks):
    assert (
        ranks(reading_on_ranks, world_size=2, **XLA)
        == [(12.0, 12.0, [0.0, 1.0, 2.0, 3.0], 13.0)] * 2
    )


def stopped_with_a_collective_pending():
    torch_xla, xm, xla_cpu = _xla()
    x = torch.ones(3).to("xla")
    y = _sum(xm, x, [[0, 1]])
    xla_cpu.stop()
    with pytest.raises(RuntimeError):
        y.tolist()
    xla_cpu.start()
    with pytest.raises(RuntimeError):
        y.tolist()
    z = _sum(xm, x, [[0, 1]])
    torch_xla.sync()
    return z.tolist()


def test_a_collective_that_never_ran_has_no_value(ranks):
    assert ranks(stopped_with_a_collective_pending, world_size=2, **XLA) == [[2.0] * 3] * 2


def a_graph_that_does_not_compile():
    torch_xla, xm, _ = _xla()
    x = torch.ones(2).to("xla")

    def step():
        parts = xm.reduce_scatter(
            "sum", [x, x + 1], 1.0, 0, 2, pin_layout=False
        )  # of a list: XLA has no such thing
        with pytest.raises(Exception, match="reduce_scatter"):
            torch_xla.sync()
        return len(parts)

    step()
    total = _sum(xm, x, [[0, 1]])
    torch_xla.sync()
    return total.tolist()


def test_a_step_that_fails_to_compile_does_not_take_the_next_one_with_it(ranks):
    assert ranks(a_graph_that_does_not_compile, world_size=2, **XLA) == [[2.0] * 2] * 2


def collectives_of_torch_distributed():
    dist, (torch_xla, xm, _) = backends.dist, _xla()
    pending = _sum(xm, torch.ones(2).to("xla"), [[0, 1]])
    for x in (torch.ones(2).to("xla"), torch.ones(2).to("xla") + 1, pending):
        two = torch.zeros(4).to("xla")
        for call in (
            lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, async_op=True),
            lambda: dist.broadcast(x, 0),
            lambda: dist.all_gather([x, two[:2]], x), lambda: dist.all_gather_into_tensor(two, x),
            lambda: dist.reduce_scatter_tensor(x, two), lambda: dist.all_to_all_single(x, x),
            lambda: dist.reduce(x, 0),
            lambda: dist.send(x, 1 - dist.get_rank()), lambda: dist.recv(x, 1 - dist.get_rank()),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="cannot reduce XLA tensors"):
                call()
    torch_xla.sync()
    dist.barrier()
    on_host = pending.cpu()
    dist.all_reduce(on_host)
    return pending.tolist(), on_host.tolist()


def test_torch_distributed_refuses_xla_tensors_and_carries_those_of_the_host(ranks):
    assert (
        ranks(collectives_of_torch_distributed, world_size=2, **XLA) == [([2.0] * 2, [4.0] * 2)] * 2
    )


# --- training -------------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    """forward: identity / backward: all-reduce"""

    @staticmethod
    def forward(ctx, x, reduce):
        ctx.reduce = reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduce(grad), None


class Reduce(torch.autograd.Function):
    """forward: all-reduce / backward: identity"""

    @staticmethod
    def forward(ctx, x, reduce):
        return reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


S, H, N, F = 6, 16, 4, 24
STEPS, MICRO, CLIP, RATE = 6, 2, 0.05, 1e-2


def full_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"qkv": torch.randn(3, N, H // N, H) / 4, "out": torch.randn(H, N, H // N) / 4,
            "up": torch.randn(F, H) / 4, "down": torch.randn(H, F) / 6}  # fmt: skip


def shard(name: str, weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return weight.chunk(size, {"qkv": 1, "out": 1, "up": 0, "down": 1}[name])[rank].contiguous()


def loss_of(w, x, target, copy, reduce):
    """One transformer block, without norms: attention and MLP, each between a copy and a reduce."""
    q, k, v = torch.einsum("bsh,kndh->kbnsd", copy(x), w["qkv"])
    attended = nn.functional.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
    x = x + reduce(torch.einsum("bnsd,hnd->bsh", attended, w["out"]))
    x = x + reduce(nn.functional.gelu(copy(x) @ w["up"].t()) @ w["down"].t())
    return (x - target).pow(2).mean()


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(STEPS, MICRO, 2, 2, S, H, generator=generator) for _ in range(2))


def train(device, tp, dp, reduce_tp, reduce_dp, mark_step):
    """Returns losses, the last clipped gradients and weights of rank (tp[0], dp[0]) of (tp[1],
    dp[1]).
    """
    w = {n: nn.Parameter(shard(n, t, *tp).to(device)) for n, t in full_weights().items()}
    rate = torch.tensor(RATE).to(device)
    optimizer = torch.optim.AdamW(w.values(), lr=rate, capturable=device != "cpu", foreach=False)
    losses = []
    x, y = batches()
    for step in range(STEPS):
        # What changes from step to step is data, sent to the device. A Python number would be a
        # part of the graph, and torch's schedulers would read the old rate back.
        optimizer.param_groups[0]["lr"] = torch.tensor(RATE / (1 + step)).to(device)
        total = torch.zeros((), device=device)
        for micro in range(MICRO):
            inputs = [t[step, micro].chunk(dp[1])[dp[0]].flatten(0, 1).to(device) for t in (x, y)]
            loss = loss_of(
                w, *inputs, lambda t: Copy.apply(t, reduce_tp), lambda t: Reduce.apply(t, reduce_tp)
            )
            (loss / MICRO).backward()
            total += loss.detach() / MICRO
        for p in w.values():
            p.grad = reduce_dp(p.grad) / dp[1]
        norm = reduce_tp(sum(p.grad.pow(2).sum() for p in w.values())).sqrt()
        for p in w.values():
            p.grad.mul_(torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        optimizer.step()
        loss = reduce_dp(total) / dp[1]
        grads = {n: p.grad for n, p in w.items()}
        optimizer.zero_grad()
        mark_step()
        losses.append(loss.item())
    return (
        losses,
        {n: g.cpu() for n, g in grads.items()},
        {n: p.detach().cpu() for n, p in w.items()},
    )


def train_on_ranks():
    torch_xla, xm, xla_cpu = _xla()
    rank = backends.dist.get_rank()
    before = xla_cpu.compilations(), xla_cpu.graphs()
    result = train(
        "xla", (rank % 2, 2), (rank // 2, 2),
        lambda t: _sum(xm, t, AXES[0]), lambda t: _sum(xm, t, AXES[1]), torch_xla.sync,
    )  # fmt: skip
    counts = xla_cpu.compilations() - before[0], xla_cpu.graphs() - before[1]
    return *result, counts, xla_cpu.collectives(-1)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def test_training_equals_one_process_in_two_compilations_with_the_expected_collectives(ranks):
    losses, grads, weights = train("cpu", (0, 1), (0, 1), lambda t: t, lambda t: t, lambda: None)
    assert losses[-1] < losses[0]
    trained = ranks(train_on_ranks, world_size=4, **XLA)
    for rank, (found_losses, g, w, counts, found) in enumerate(trained):
        assert close(torch.tensor(found_losses), torch.tensor(losses))
        for name in weights:
            assert close(g[name], shard(name, grads[name], rank % 2, 2)), name
            assert close(w[name], shard(name, weights[name], rank % 2, 2)), name
        assert counts[1] == 2
        tp, dp = (tuple(map(tuple, axis)) for axis in AXES)
        hidden = Collective("all_reduce", "add", tp, (2, S, H), "f32")
        assert sorted(found) == sorted(
            [
                # Per micro-batch two reduces in forward and one copy in backward: the inputs need
                # no gradient.
                hidden._replace(count=3 * MICRO),
                *(Collective("all_reduce", "add", dp, tuple(t.shape), "f32") for t in w.values()),
                Collective("all_reduce", "add", tp, (), "f32"),  # the norm
                Collective("all_reduce", "add", dp, (), "f32"),  # the loss
            ]
        )


def train_with_cache(folder: str):
    """Trains after a stop and a start in the same process, with compiled graphs kept in
    `folder`.
    """
    _, _, xla_cpu = _xla()
    xla_cpu.stop()
    os.environ["TUTORIAL_XLA_CACHE"] = folder
    try:
        xla_cpu.start(timeout=60)
    finally:
        del os.environ["TUTORIAL_XLA_CACHE"]
    losses, *_, (compiled, graphs), _ = train_on_ranks()
    return losses, compiled, graphs


def test_a_graph_is_compiled_once_for_all_ranks_and_runs_and_a_broken_entry_is_compiled_anew(
    ranks, tmp_path
):
    def run():
        return ranks(train_with_cache, str(tmp_path), world_size=4, **XLA)

    first = run()
    assert sum(compiled for _, compiled, _ in first) == 2
    assert run() == [(losses, 0, 2) for losses, *_ in first]
    for entry in tmp_path.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    again = run()
    assert sum(compiled for _, compiled, _ in again) == 2
    assert [losses for losses, *_ in again] == [losses for losses, *_ in first]


def restarted(function, *args):
    """Runs `function` after a stop and a start in the same process."""
    _, _, xla_cpu = _xla()
    xla_cpu.stop()
    xla_cpu.start(timeout=60)
    return function(*args)


def boundary_before_backward():
    torch_xla, xm, _ = _xla()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 4)
    )
    x, grads = torch.arange(12.0).reshape(3, 4), []
    for device in ("cpu", "xla"):
        model.to(device).zero_grad()
        loss = model(x.to(device)).pow(2).mean()
        if device == "xla":
            torch_xla.sync()
        loss.backward()
        if device == "xla":
            torch_xla.sync()
        grads.append([p.grad.cpu() for p in model.parameters()])
    return all(close(b, a) for a, b in zip(*grads))


def test_a_step_boundary_between_forward_and_backward(ranks):
    assert ranks(boundary_before_backward, world_size=2, **XLA) == [True, True]


def without_a_graph():
    """What needs no computation, over a step's boundary."""
    from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed

    _, _, xla_cpu = _xla()
    before = backends.compilations(), xla_cpu.graphs()
    with torch.device("xla"):
        model_parallel_xla_manual_seed(3)
    x = torch.arange(3.0).to("xla")
    copies = [x.clone(), x.clone().detach()]
    backends.mark_step()
    copies[0] += 1
    x.fill_(7)
    after = backends.compilations(), xla_cpu.graphs()
    kept = copies[1].tolist()
    backends.mark_step()
    return before == after, kept, copies[0].tolist(), copies[1].tolist()


def test_copies_and_seeds_compile_nothing(ranks):
    expected = (True, [0, 1, 2], [1, 2, 3], [0, 1, 2])
    assert ranks(restarted, without_a_graph, world_size=2, **XLA) == [expected] * 2


def torch_xla_ways():
    torch_xla, xm, xla_cpu = _xla()
    import torch_xla.distributed.parallel_loader as parallel_loader
    import torch_xla.runtime as xr

    rank = backends.dist.get_rank()
    weight = nn.Parameter(torch.zeros(2).to("xla"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    batches = [(torch.full((2,), float(rank + i)), torch.tensor([i])) for i in range(3)]
    seen = []
    for x, index in parallel_loader.MpDeviceLoader(batches, torch_xla.device()):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        xm.optimizer_step(optimizer)  # averages over all ranks
        seen.append(index)
    closed = []
    xm.add_step_closure(lambda t: closed.append(t.tolist()), args=(weight.detach() * 1,))
    backends.mark_step()
    return xr.world_size(), xr.global_ordinal(), weight.tolist(), [i.item() for i in seen], closed


def test_the_calls_of_torch_xla_end_a_step_and_know_the_world(ranks):
    got = ranks(torch_xla_ways, world_size=2, **XLA)
    expected = [-sum((0 + i + 1 + i) / 2 for i in range(3))] * 2
    assert got == [(2, rank, expected, [0, 1, 2], [expected]) for rank in range(2)]


def dropout_on_ranks():
    torch_xla, xm, _ = _xla()

    def draw():
        mask = nn.functional.dropout(torch.ones(64, device="xla"), 0.5)
        _sum(xm, mask, [[0, 1]])
        torch_xla.sync()
        return mask.tolist()

    xm.set_rng_state(7)
    first, second = draw(), draw()
    state = xm.get_rng_state()
    third = draw()
    xm.set_rng_state(state)
    resumed = draw()
    xm.set_rng_state(7)
    again = draw()
    return (
        first == again,
        third == resumed,
        first != second,
        second != third,
        10 < first.count(0.0) < 54,
    )


def test_dropout_follows_the_seed_and_resumes(ranks):
    assert ranks(dropout_on_ranks, world_size=2, **XLA) == [(True,) * 5] * 2


def rank_dependent_graphs():
    torch_xla, xm, _ = _xla()
    rank = backends.dist.get_rank()
    x = torch.arange(8.0).to("xla")
    part = x[rank * 4 : rank * 4 + 4]
    for _ in range(rank * 3):  # more operations on one rank than on the other
        part = part + 1
    gathered = xm.all_gather(part, groups=[[0, 1]], pin_layout=False)
    again = xm.all_gather(gathered.sum().reshape(1) * (rank + 1), groups=[[0, 1]], pin_layout=False)
    total = _sum(xm, again, [[0, 1]])
    torch_xla.sync()
    return gathered.tolist(), again.tolist(), total.tolist()


def test_ranks_may_run_different_graphs(ranks):
    gathered = [0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0]
    again = [sum(gathered), 2 * sum(gathered)]
    expected = (gathered, again, [2 * a for a in again])
    assert ranks(rank_dependent_graphs, world_size=2, **XLA) == [expected] * 2


# --- failure --------------------------------------------------------------------------------------


def one_rank_misses_the_step():
    torch_xla, xm, xla_cpu = _xla()
    xla_cpu.stop()
    xla_cpu.start(timeout=3)
    errors = []
    y = _sum(xm, torch.ones(3).to("xla"), [[0, 1]])
    for _ in range(2 if backends.dist.get_rank() == 0 else 0):
        begin = time.monotonic()
        try:
            torch_xla.sync()
        except RuntimeError as error:
            errors.append((str(error), time.monotonic() - begin))
    backends.dist.barrier()
    xla_cpu.stop()
    xla_cpu.start()
    z = _sum(xm, torch.ones(3).to("xla"), [[0, 1]])
    del y
    torch_xla.sync()
    return errors, z.tolist()


@pytest.mark.slow
def test_ranks_that_wait_in_vain_get_an_error_in_time_and_can_start_anew(ranks):
    (errors, after), (none, other_after) = ranks(one_rank_misses_the_step, world_size=2, **XLA)
    assert none == [] and after == other_after == [2.0] * 3
    assert (
        "rank 0 of 2 could not finish its step" in errors[0][0]
        and "3 s" in errors[0][0]
        and 2.9 < errors[0][1] < 10
    )
    assert "start them anew" in errors[1][0] and errors[1][1] < 2


def interrupted_in_a_step():
    torch_xla, xm, xla_cpu = _xla()
    rank = backends.dist.get_rank()
    xla_cpu.stop()
    xla_cpu.start(timeout=20)
    x = torch.ones(3).to("xla")
    first = _sum(xm, x, [[0, 1]])
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            torch_xla.sync()
    backends.dist.barrier()
    if rank == 1:
        torch_xla.sync()  # what the interrupted rank had begun
    else:
        second = first * 10
        with pytest.raises(RuntimeError, match="interrupted"):
            torch_xla.sync()
        del second
    backends.dist.barrier()
    xla_cpu.stop()
    xla_cpu.start()
    total = _sum(xm, x * (rank + 1), [[0, 1]])
    torch_xla.sync()
    return total.tolist()


def test_a_rank_interrupted_in_a_step_runs_none_before_it_is_started_anew(ranks):
    assert ranks(interrupted_in_a_step, world_size=2, **XLA) == [[3.0] * 3] * 2


# --- without ranks --------------------------------------------------------------------------------


def test_xla_without_torch_xla_is_a_clear_error(monkeypatch):
    find_spec = backends.importlib.util.find_spec
    missing = {"torch_xla", "libneuronxla"}
    monkeypatch.setattr(
        backends.importlib.util,
        "find_spec",
        lambda name: None if name in missing else find_spec(name),
    )
    with pytest.raises(ValueError, match="backend 'xla' needs torch_xla"):
        backends.check_backend("xla")
    backends.check_backend("cpu")


@pytest.mark.parametrize("trainium", [True, False])
def test_environment_of_each_backend(monkeypatch, trainium):
    monkeypatch.setattr(backends, "on_trainium", lambda: trainium)
    common = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
              "GROUP_RANK": "1",
              "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}  # fmt: skip
    for backend in backends.BACKENDS:
        got = backends.rank_environment(
            backend,
            5,
            8,
            master_addr="10.0.0.1",
            master_port=1234,
            local_rank=1,
            local_world_size=4,
        )
        assert common.items() <= got.items()
        extra = {
            k: v
            for k, v in got.items()
            if "XLA" in k or "PJRT" in k or "NEURON" in k or "TORCHELASTIC" in k
        }
        on_chip = {
            "PJRT_DEVICE": "NEURON",
            "TORCHELASTIC_RUN_ID": "tutorial",
            "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62182",
        }
        on_cpu = {"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1"}
        assert extra == ({} if backend != "xla" else on_chip if trainium else on_cpu)


def test_what_torch_xla_makes_of_the_trainium_environment(monkeypatch):
    """Its own function, run on what `rank_environment` sets: each rank gets one core, its place and
    the world's size.
    """
    neuron = pytest.importorskip("torch_xla._internal.neuron")
    monkeypatch.setattr(backends, "on_trainium", lambda: True)
    for name in [n for n in os.environ if n.startswith("NEURON")]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        env = backends.rank_environment(
            "xla", 5, 8, master_addr="10.0.0.1", master_port=1234, local_rank=1, local_world_size=4
        )
        for name in ("NEURON_RT_ROOT_COMM_ID", "NEURON_PJRT_WORLD_SIZE", "PJRT_LOCAL_PROCESS_COUNT",
                     "NEURON_RT_VISIBLE_CORES", "NEURON_PJRT_PROCESS_INDEX",
                     "PJRT_LOCAL_PROCESS_RANK"):  # fmt: skip
            patch.delenv(name, raising=False)
            patch.setenv(name, "")  # so that it is taken back afterwards
            del os.environ[name]
        for name, value in env.items():
            patch.setenv(name, value)
        neuron.configure_pjrt_environment()
        assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:62182"
        assert (
            os.environ["NEURON_PJRT_WORLD_SIZE"] == "8"
            and os.environ["NEURON_PJRT_PROCESS_INDEX"] == "5"
        )
        assert (
            os.environ["NEURON_RT_VISIBLE_CORES"] == "1"
            and os.environ["PJRT_LOCAL_PROCESS_RANK"] == "1"
        )
        assert os.environ["PJRT_LOCAL_PROCESS_COUNT"] == "4"


def test_a_graph_that_cannot_be_kept_leaves_no_file(tmp_path):
    pytest.importorskip("torch_xla"), pytest.importorskip("jaxlib")
    from tutorial_lib.xla_cpu.compiler import Compiler

    compiler, entry = object.__new__(Compiler), tmp_path / "entry"
    compiler._client = SimpleNamespace(serialize_executable=lambda executable: b"machine code")
    entry.mkdir()  # where the file should be
    with pytest.warns(UserWarning, match="cannot be kept"):
        compiler._save(entry, None)
    assert list(tmp_path.iterdir()) == [entry]


def test_mark_step_is_nothing_without_xla():
    assert backends.mark_step() is None


def test_collectives_are_read_from_hlo_text():
    text = """
AddComputation.4 {
  x.5 = f32[] parameter(0)
  y.6 = f32[] parameter(1)
  ROOT add.7 = f32[] add(x.5, y.6)
}

ENTRY IrToHlo.42 {
  p1.2 = bf16[3,4]{1,0} parameter(1)
  p0.1 = bf16[] parameter(0)
  all-reduce.10 = (bf16[3,4]{1,0}, bf16[]) all-reduce(p1.2, p0.1), replica_groups={{0,1},{2,3}}, to_apply=AddComputation.4
  get-tuple-element.11 = bf16[3,4]{1,0} get-tuple-element(all-reduce.10), index=0
  all-gather.22 = bf16[6,4]{1,0} all-gather(get-tuple-element.11), replica_groups={{0,2},{1,3}}, dimensions={0}
  all-gather.23 = bf16[6,4]{1,0} all-gather(get-tuple-element.11), replica_groups={{0,2},{1,3}}, dimensions={0}
  collective-permute.1 = bf16[6,4]{1,0} collective-permute(all-gather.23), source_target_pairs={{0,1},{1,0}}
  ROOT tuple.41 = (bf16[6,4]{1,0}) tuple(all-gather.22)
}
"""  # noqa: E501
    tp, dp = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    found = find_collectives([text])
    assert found == [
        Collective("all_reduce", "add", tp, (3, 4), "bf16", 1),
        Collective("all_gather", None, dp, (3, 4), "bf16", 2),
        Collective("collective_permute", None, ((0, 1), (1, 0)), (6, 4), "bf16", 1),
    ]
    assert [c.nbytes for c in found] == [24, 24, 48]


# --- the library on both backends -----------------------------------------------------------------


def train_library(backend):
    """Layers, gradients and optimizer of the library, with a Python number as the rate: the
    optimizer makes it data.
    """
    from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
    from tutorial_lib.parallel_layers import consistency, grads, layers, parallel_state
    from tutorial_lib.parallel_layers.marks import move_model_to_device

    torch.manual_seed(0)
    model = nn.Sequential(
        layers.ColumnParallelLinear(16, 32, gather_output=False), nn.GELU(),
        layers.RowParallelLinear(32, 16, input_is_parallel=True),
    )  # fmt: skip
    device = backends.get_device(backend)
    move_model_to_device(model, device)
    optimizer = AdamW_FP32OptimParams(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    losses, began = [], 0.0
    for step in range(8):
        if step == 3:
            began = time.perf_counter()
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for _ in range(2):
            x = torch.randn(4, 16, generator=generator).to(device)
            loss = (model(x) - 1).pow(2).mean()
            (loss / 2).backward()
        grads.bucket_allreduce_gradients([p.grad for p in model.parameters()])
        norm = grads.clip_grad_norm(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        backends.mark_step()
        losses.append([loss.item(), norm.item()])
    seconds = (time.perf_counter() - began) / 5
    compiled = None
    if backend == "xla":
        _, _, xla_cpu = _xla()
        compiled, before = xla_cpu.graphs(), backends.compilations()
        assert consistency.find_drift(model) == []
        assert backends.compilations() == before  # to look at weights needs no graph
    return torch.tensor(losses), [p.detach().cpu() for p in model.parameters()], compiled, seconds


def test_the_library_trains_alike_on_xla_and_cpu(ranks):
    expected = ranks(train_library, "cpu", world_size=4, tp=2)
    got = ranks(restarted, train_library, "xla", world_size=4, tp=2, **XLA)
    for (losses, weights, _, cpu), (xla_losses, xla_weights, compiled, xla) in zip(expected, got):
        assert close(xla_losses, losses) and all(close(a, b) for a, b in zip(xla_weights, weights))
        assert compiled == 2
        print(f"seconds per step: cpu {cpu:.4f}, xla {xla:.4f}")


def many_short_runs(seconds):
    from tutorial_lib import xla_model as xm
    from tutorial_lib.parallel_layers import (
        ColumnParallelLinear,
        move_model_to_device,
        parallel_state,
    )
    from tutorial_lib.parallel_layers.grads import clip_grad_norm

    began, rounds, over = time.monotonic(), 0, torch.zeros(1)
    while not over:
        layer = move_model_to_device(ColumnParallelLinear(16, 32), xm.xla_device())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            loss = layer(torch.ones(4, 16, device=xm.xla_device())).pow(2).mean()
            loss.backward()
            clip_grad_norm(layer.parameters(), 1.0)
            xm.optimizer_step(
                optimizer, groups=parallel_state.get_data_parallel_group(as_list=True)
            )
            optimizer.zero_grad()
        rounds += 1
        over[0] = time.monotonic() - began > seconds
        backends.dist.broadcast(over, 0)
    return rounds, loss.item()


@pytest.mark.grid
def test_many_short_runs_do_not_touch_what_autograd_is_about_to_free(ranks):
    """The boundary once took tensors from the collector in the moment in which autograd's thread
    let them go: a rank died within a minute.
    """
    for rounds, loss in ranks(many_short_runs, 90, world_size=4, tp=2, **XLA):
        assert rounds > 100 and loss > 0
