"""XLA between CPU processes. The rank functions run in the pool of `conftest`, whose xla pools have
called `start()`.
"""

import os
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from tests import test_zero1
from tutorial_lib import backends, xla_cpu
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams

XLA = {"backend": "xla", "timeout": 240}


def _xla():
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tutorial_lib import xla_cpu

    return torch_xla, xm, xla_cpu


def _restart(timeout: float = 60) -> None:
    *_, xla_cpu = _xla()
    xla_cpu.stop()
    xla_cpu.start(timeout)


def _sum(xm, tensor):
    """Over two ranks."""
    return xm.all_reduce("sum", tensor, groups=[[0, 1]], pin_layout=False)


# --- values, views, dtypes ------------------------------------------------------------------------


def collectives_on_ranks():
    torch_xla, xm, _ = _xla()
    rank, pair = backends.dist.get_rank(), [[0, 1]]
    x = (torch.arange(8.0).reshape(2, 4) + 10 * rank).to("xla")
    results = [
        _sum(xm, x),
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
            total, torch.maximum(*inputs), total, torch.cat(inputs, 1), torch.cat(inputs, 0),
            total.chunk(2, 1)[rank] / 2, torch.cat([t.chunk(2, 0)[rank] for t in inputs], 1),
            inputs[1 - rank], *[torch.cat(inputs, 0)] * 2,
            *[summed.chunk(2, 1)[rank] for summed in (total, total + 2)],
            inputs[rank] * (rank + 2), total / 2, inputs[rank],
        ]  # fmt: skip
        for index, (a, b) in enumerate(zip(got[rank], expected)):
            assert torch.equal(a, b), (rank, index, a, b)


@pytest.mark.parametrize("name", xla_cpu.NARROW)
def test_float32_as_bfloat16_is_refused_by_name(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name}=1"):
        xla_cpu.start()


def dtypes_on_ranks():
    torch_xla, xm, _ = _xla()
    rank, floats = backends.dist.get_rank(), (torch.bfloat16, torch.float16, torch.float32)
    shapes = (), (1,), (3, 5), (0, 2)
    dtypes = (*floats, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    numbers = [torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 for shape in shapes]
    tensors = [(number + rank).to(dtype) for number in numbers for dtype in dtypes]
    computed = [t.to("xla").clone() for t in tensors]
    flag = _sum(xm, torch.ones((), device="xla"))
    torch_xla.sync()
    assert flag.item() == 2
    big = torch.tensor([2**53 + 1, -(2**62)]).to("xla") + 1
    torch_xla.sync()
    assert big.tolist() == [2**53 + 2, -(2**62) + 1]
    return all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(computed, tensors))


def views_on_ranks():
    torch_xla, xm, _ = _xla()
    import tutorial_lib.xla_cpu.tensors as tensors

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.to("xla")
    model[1].weight = model[0].weight
    model[0].weight.partition_dim = 1
    x = torch.ones(3, 4).to("xla")
    y = _sum(xm, x)
    row, flat, alias, column = y[1], y.view(-1), y.detach(), y.t()[2]
    held = {"closure": (lambda t: lambda: t)(y * 2), "list": [[(y * 3,)]]}
    only_view = (y * 5)[0].detach()  # nobody can reach what it is a part of
    with torch.no_grad():
        model[0].weight.add_(y[:1])
    version = y._version
    torch_xla.sync()
    assert tensors.count_pending("xla:0") == 0 and y._version == version
    of_held = held["closure"]()[0], held["list"][0][0][0][0]
    before = [t.cpu().tolist() for t in (row, column, alias[0], *of_held, only_view)]
    y.add_(1)
    row.mul_(10)
    only_view.add_(1)
    torch_xla.sync()
    assert y.tolist() == alias.tolist() == [[3.0] * 4, [30.0] * 4, [3.0] * 4]
    assert flat.cpu().tolist() == y.cpu().flatten().tolist() and column.tolist() == [3.0, 30.0, 3.0]
    assert only_view.tolist() == [11.0] * 4
    assert model[1].weight is model[0].weight and model[0].weight.partition_dim == 1
    return before


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


# --- reading --------------------------------------------------------------------------------------


def reading_on_ranks():
    torch_xla, xm, _ = _xla()
    x = torch.arange(4.0).to("xla")
    total = _sum(xm, x).sum()
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
    on_device = total.to(torch.float64), total.to("xla"), total.to(x), x.clone().copy_(total)
    assert all(tensor.device == x.device for tensor in on_device)
    assert many[1].shape == () and many[x.long()].shape == (4,)  # and these
    local = (x * 2).sum().item(), x.tolist()  # neither depends on a collective
    spare[x + 1 > 2] = 0.0  # nor does the mask
    assert spare.tolist() == [0.0, 2.0, 0.0, 0.0] and torch.equal(x[x * 2 > 2], x[2:])
    torch_xla.sync()
    return total.item(), *local, (total + 1).item()


def stopped_with_a_collective_pending():
    torch_xla, xm, xla_cpu = _xla()
    x = torch.ones(3).to("xla")
    y = _sum(xm, x)
    xla_cpu.stop()
    with pytest.raises(RuntimeError):
        y.tolist()
    xla_cpu.start()
    with pytest.raises(RuntimeError):
        y.tolist()
    z = _sum(xm, x)
    torch_xla.sync()
    return z.tolist()


def a_graph_that_does_not_compile():
    from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

    torch_xla, xm, _ = _xla()
    x = torch.ones(2).to("xla")

    parts = stablehlo_custom_call((x,), "no_such_target", [[2]], [torch.float32])
    with pytest.raises(Exception, match="custom-call"):
        torch_xla.sync()
    del parts
    total = _sum(xm, x)
    torch_xla.sync()
    return total.tolist()


def collectives_of_torch_distributed():
    dist, (torch_xla, xm, _) = backends.dist, _xla()
    pending = _sum(xm, torch.ones(2).to("xla"))
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


# --- training -------------------------------------------------------------------------------------


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def train(folder):
    """Compiled graphs are kept in `folder`."""
    *_, xla_cpu = _xla()
    with mock.patch.dict(os.environ, TUTORIAL_XLA_CACHE=folder):
        _restart()
    _, weights, norms, _ = test_zero1.train(AdamW_FP32OptimParams, False, 0.5, 5)
    return weights, norms, xla_cpu.compilations(), len(xla_cpu.hlo_texts())


@pytest.mark.slow
def test_the_graphs_of_a_training_are_compiled_once(ranks, tmp_path):
    """That they give the values of the CPU, and are few, is shown in `test_zero1`."""

    def run():
        found = ranks(train, str(tmp_path), world_size=4, tp=2, **XLA)
        results.append([(weights, norms, graphs) for weights, norms, _, graphs in found])
        return sum(compiled for *_, compiled, _ in found)

    results = []
    compiled, graphs = run(), {graphs for *_, graphs in results[0]}
    assert graphs == {compiled} and compiled > 0  # each by one of the ranks that run it
    assert run() == 0
    for entry in tmp_path.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    assert run() == compiled  # broken entries are compiled anew
    torch.testing.assert_close(results[1:], results[:1] * 2, rtol=0, atol=0)


def boundary_before_backward():
    torch_xla, xm, _ = _xla()
    torch.manual_seed(0)
    middle = nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 4))
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


def without_a_graph():
    """What needs no computation, over a step's boundary."""
    from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed

    _restart()
    *_, xla_cpu = _xla()
    before = backends.compilations(), len(xla_cpu.hlo_texts())
    with torch.device("xla"):
        model_parallel_xla_manual_seed(3)
    x = torch.arange(3.0).to("xla")
    copies = [x.clone(), x.clone().detach()]
    backends.mark_step()
    copies[0] += 1
    x.fill_(7)
    after = backends.compilations(), len(xla_cpu.hlo_texts())
    kept = copies[1].tolist()
    backends.mark_step()
    return before == after, kept, copies[0].tolist(), copies[1].tolist()


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


GATHERED = [0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0]


def rank_dependent_graphs():
    torch_xla, xm, _ = _xla()
    rank = backends.dist.get_rank()
    x = torch.arange(8.0).to("xla")
    part = x[rank * 4 : rank * 4 + 4]
    for _ in range(rank * 3):  # more operations on one rank than on the other
        part = part + 1
    gathered = xm.all_gather(part, groups=[[0, 1]], pin_layout=False)
    again = xm.all_gather(gathered.sum().reshape(1) * (rank + 1), groups=[[0, 1]], pin_layout=False)
    total = _sum(xm, again)
    torch_xla.sync()
    return gathered.tolist(), again.tolist(), total.tolist()


# --- failure --------------------------------------------------------------------------------------


def one_rank_misses_the_step():
    torch_xla, xm, _ = _xla()
    _restart(timeout=3)
    errors = []
    y = _sum(xm, torch.ones(3).to("xla"))
    for _ in range(2 if backends.dist.get_rank() == 0 else 0):
        begin = time.monotonic()
        try:
            torch_xla.sync()
        except RuntimeError as error:
            errors.append((str(error), time.monotonic() - begin))
    backends.dist.barrier()
    _restart()
    z = _sum(xm, torch.ones(3).to("xla"))
    del y
    torch_xla.sync()
    return errors, z.tolist()


@pytest.mark.slow
def test_ranks_that_wait_in_vain_get_an_error_in_time_and_can_start_anew(ranks):
    (errors, after), (none, other_after) = ranks(one_rank_misses_the_step, world_size=2, **XLA)
    assert none == [] and after == other_after == [2.0] * 3
    assert "rank 0 of 2 could not finish its step" in errors[0][0] and "3 s" in errors[0][0]
    assert 2.9 < errors[0][1] < 10
    assert "restart them" in errors[1][0] and errors[1][1] < 2


def interrupted_in_a_step():
    torch_xla, xm, _ = _xla()
    rank = backends.dist.get_rank()
    _restart(timeout=20)
    x = torch.ones(3).to("xla")
    first = _sum(xm, x)
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
    _restart()
    total = _sum(xm, x * (rank + 1))
    torch_xla.sync()
    return total.tolist()


EARLIER = [
    [[2.0, 2.0, 3.0, 3.0], [2.0, 2.0], [3.0, 3.0], [2.0, 2.0, 3.0, 3.0]],
    [[2.0] * 4, [2.0] * 2, [2.0] * 4],
    [[6.0, 6.0, 12.0, 12.0], [6.0, 6.0], [12.0] * 2, [6.0, 6.0, 12.0, 12.0]],
    [[4.0] * 4, [4.0] * 2, [4.0] * 4],
]
ON_EACH_OF_TWO_RANKS = [
    (dtypes_on_ranks, True),
    (views_on_ranks, [[2.0] * 4, [2.0] * 3, [2.0] * 4, [4.0] * 4, [6.0] * 4, [10.0] * 4]),
    (views_of_earlier_values, EARLIER),
    (reading_on_ranks, (12.0, 12.0, [0.0, 1.0, 2.0, 3.0], 13.0)),
    (stopped_with_a_collective_pending, [2.0] * 3),
    (a_graph_that_does_not_compile, [2.0] * 2),
    (collectives_of_torch_distributed, ([2.0] * 2, [4.0] * 2)),
    (boundary_before_backward, True),
    (without_a_graph, (True, [0, 1, 2], [1, 2, 3], [0, 1, 2])),
    (rank_dependent_graphs, (GATHERED, [40.0, 80.0], [80.0, 160.0])),
    (interrupted_in_a_step, [3.0] * 3),
]


@pytest.mark.parametrize("function, expected", ON_EACH_OF_TWO_RANKS)
def test_on_each_of_two_ranks(ranks, function, expected):
    assert ranks(function, world_size=2, **XLA) == [expected] * 2


# --- without ranks --------------------------------------------------------------------------------


def test_xla_without_torch_xla_is_a_clear_error(monkeypatch):
    find_spec = backends.importlib.util.find_spec
    missing = {"torch_xla", "libneuronxla"}
    without = lambda name: None if name in missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr(backends.importlib.util, "find_spec", without)
    with pytest.raises(ValueError, match="backend 'xla' needs torch_xla"):
        backends.check_backend("xla")
    backends.check_backend("cpu")


def environment(backend):
    return backends.rank_environment(
        backend, 5, 8, master_addr="10.0.0.1", master_port=1234, local_rank=1, local_world_size=4
    )


@pytest.mark.parametrize("trainium", [True, False])
def test_environment_of_each_backend(monkeypatch, trainium):
    monkeypatch.setattr(backends, "on_trainium", lambda backend: trainium)
    common = {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234",
    }  # fmt: skip
    on_chip = {
        "PJRT_DEVICE": "NEURON", "TORCHELASTIC_RUN_ID": "tutorial",
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62182",
    }  # fmt: skip
    on_cpu = {"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1"}
    for backend in backends.BACKENDS:
        got = environment(backend)
        assert common.items() <= got.items()
        signs = ("XLA", "PJRT", "NEURON", "TORCHELASTIC")
        extra = {k: v for k, v in got.items() if any(sign in k for sign in signs)}
        assert extra == ({} if backend != "xla" else on_chip if trainium else on_cpu)


def test_what_torch_xla_makes_of_the_trainium_environment(monkeypatch):
    """Its own function, run on what `rank_environment` sets: each rank gets one core, its place and
    the world's size.
    """
    neuron = pytest.importorskip("torch_xla._internal.neuron")
    monkeypatch.setattr(backends, "on_trainium", lambda backend: True)
    for name in [n for n in os.environ if n.startswith("NEURON")]:
        monkeypatch.delenv(name)
    expected = {
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62182", "NEURON_PJRT_WORLD_SIZE": "8",
        "NEURON_PJRT_PROCESS_INDEX": "5", "NEURON_RT_VISIBLE_CORES": "1",
        "PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "4",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name in expected:
            patch.setenv(name, "")  # so that it is taken back afterwards
            del os.environ[name]
        for name, value in environment("xla").items():
            patch.setenv(name, value)
        neuron.configure_pjrt_environment()
        assert {name: os.environ[name] for name in expected} == expected


def test_a_graph_that_cannot_be_kept_leaves_no_file(tmp_path):
    pytest.importorskip("torch_xla"), pytest.importorskip("jaxlib")
    from tutorial_lib.xla_cpu.compiler import Compiler

    compiler, entry = object.__new__(Compiler), tmp_path / "entry"
    compiler._client = SimpleNamespace(serialize_executable=lambda executable: b"machine code")
    entry.mkdir()  # where the file should be
    with pytest.warns(UserWarning, match="cannot be kept"):
        compiler._save(entry, None)
    assert list(tmp_path.iterdir()) == [entry]


def many_short_runs(seconds):
    from tutorial_lib import parallel_layers
    from tutorial_lib import xla_model as xm
    from tutorial_lib.parallel_layers.grads import clip_grad_norm

    groups = parallel_layers.parallel_state.get_data_parallel_group(as_list=True)
    began, rounds, over = time.monotonic(), 0, torch.zeros(1)
    while not over:
        layer = parallel_layers.ColumnParallelLinear(16, 32)
        parallel_layers.move_model_to_device(layer, xm.xla_device())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            loss = layer(torch.ones(4, 16, device=xm.xla_device())).pow(2).mean()
            loss.backward()
            clip_grad_norm(layer.parameters(), 1.0)
            xm.optimizer_step(optimizer, groups=groups)
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
