"""Grouped query, key and value projections against three plain layers, at every degree and number
of copies.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.parallel_layers import comm, grads, mappings, parallel_state
from tutorial_lib.parallel_layers.layers import RowParallelLinear
from tutorial_lib.parallel_layers.sharding import partition_of

from .parity import assert_messages

HIDDEN, HEAD = 16, 4


def whole(tensor, marked):
    partition = partition_of(marked)
    return partition.merge(comm.all_gather(tensor[None], 0).unbind(0))


class Plain(nn.Module):
    def __init__(self, heads, kv_heads, bias):
        super().__init__()
        self.kv_heads = kv_heads
        self.q, self.k, self.v = (
            nn.Linear(HIDDEN, n * HEAD, bias, dtype=torch.float64)
            for n in (heads, kv_heads, kv_heads)
        )
        self.o = nn.Linear(heads * HEAD, HIDDEN, bias, dtype=torch.float64)

    def forward(self, x):
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class Parallel(nn.Module):
    def __init__(self, heads, kv_heads, bias, **options):
        super().__init__()
        multiplier = max(parallel_state.get_tensor_model_parallel_size() // kv_heads, 1)
        sizes, common = [heads * HEAD, kv_heads * HEAD], dict(dtype=torch.float64)
        common["sequence_parallel_enabled"] = options.pop("sequence_parallel_enabled", False)
        options |= dict(kv_size_multiplier=multiplier)
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, sizes, bias, **options, **common)
        parallel = not self.qkv.gather_output
        self.o = RowParallelLinear(sizes[0], HIDDEN, bias, parallel, **common)

    def forward(self, x):
        return self.o(attend(*self.qkv(x)))


def attend(q, k, v):
    """`[S, B, features]`, each query head with the key/value head of its group."""
    q, k, v = (t.unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(-2)


def full_tensors(model, pick):
    """The q, k, v and o of a parallel model under the plain model's names."""
    found = {}
    query, key = model.qkv.output_sizes
    for kind in ("weight", "bias"):
        parameter = getattr(model.qkv, f"{kind}_qkv")
        if parameter is not None:
            parts = whole(pick(parameter), parameter).split([query, key, key])
            found |= {f"{p}.{kind}": t for p, t in zip("qkv", parts)}
    found["o.weight"] = whole(pick(model.o.weight), model.o.weight)
    if model.o.bias is not None:
        found["o.bias"] = pick(model.o.bias)
    return found


def train(heads, kv_heads, bias, **options):
    tp = parallel_state.get_tensor_model_parallel_size()
    torch.manual_seed(3)
    plain = Plain(heads, kv_heads, bias)
    torch.manual_seed(3)
    model = Parallel(heads, kv_heads, bias, **options)
    sp = model.qkv.sequence_parallel_enabled
    wanted = dict(plain.named_parameters())
    assert {k: t.tolist() for k, t in full_tensors(model, lambda p: p.detach()).items()} == {
        k: t.tolist() for k, t in wanted.items()
    }, "initial weights differ"
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (plain, model)]
    for step in range(3):
        x, cotangent = (
            torch.randn(
                8,
                2,
                HIDDEN,
                generator=torch.Generator().manual_seed(10 * step + i),
                dtype=torch.float64,
            )
            for i in range(2)
        )
        inputs = [x.clone().requires_grad_(), x.clone()]
        if sp:
            inputs[1] = mappings.scatter_to_sequence_parallel_region(inputs[1])
        inputs[1].requires_grad_()
        out, reference = model(inputs[1]), plain(inputs[0])
        reference.backward(cotangent)
        out.backward(mappings.scatter_to_sequence_parallel_region(cotangent) if sp else cotangent)
        grad = inputs[1].grad
        if sp:
            out, grad = comm.all_gather(out.detach(), 0), comm.all_gather(grad, 0)
            grads.allreduce_sequence_parallel_gradients(optimizers[1])
        assert (out - reference).abs().max() <= 1e-10 and (
            grad - inputs[0].grad
        ).abs().max() <= 1e-10
        for name, found in full_tensors(model, lambda p: p.grad).items():
            assert (found - wanted[name].grad).abs().max() <= 1e-10, name
        norms = [grads.clip_grad_norm(m.parameters(), 1e9) for m in (model,)]
        assert (
            abs(norms[0] - torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
            <= 1e-10
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, found in full_tensors(model, lambda p: p.detach()).items():
        assert (found - wanted[name]).abs().max() <= 1e-10, name
    if kv_heads < tp:
        for parameter in model.qkv.parameters():
            shared = getattr(parameter, "kv_shared_numel", 0)
            assert shared > 0
            last = parameter.detach().flatten()[parameter.numel() - shared :]
            group = parallel_state.get_kv_shared_replica_groups()
            assert torch.equal(
                comm.all_reduce("max", last, group), comm.all_reduce("min", last, group)
            )
    clone = copy.deepcopy(model)
    assert all(vars(a) == vars(b) for a, b in zip(clone.parameters(), model.parameters()))


def grid(heads, kv_heads):
    train(heads, kv_heads, True, gather_output=False)
    train(heads, kv_heads, False, gather_output=True)
    train(heads, kv_heads, True, gather_output=False, sequence_parallel_enabled=True)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_trains_like_the_plain_one(ranks, kv_heads, size):
    ranks(grid, 8, kv_heads, world_size=size, tp=size, timeout=120)


def toy():
    """Σ_h q_h · k_{h//2} with q = 1, 2, 3, 4: the key gradients are 1 + 2 and 3 + 4."""
    layer = GQAQKVColumnParallelLinear(1, [4, 2], False, gather_output=False, kv_size_multiplier=2)
    with torch.no_grad():
        layer.weight_qkv.copy_(
            partition_of(layer.weight_qkv).shard(
                torch.tensor([[1.0], [2], [3], [4], [0], [0], [0], [0]]), layer._rank
            )
        )
    q, k, _ = layer(torch.ones(1, 1))
    (q.detach() * k).sum().backward()
    found = layer.weight_qkv.grad[1].item()
    norm = grads.get_grad_norm(layer.parameters()).item()
    return q.item(), found, norm


def test_key_gradients_sum_over_the_query_heads_of_all_copies(ranks):
    norm = (9 + 49) ** 0.5
    assert ranks(toy, world_size=4, tp=4) == [
        (q, dk, pytest.approx(norm)) for q, dk in ((1, 3), (2, 3), (3, 7), (4, 7))
    ]


BAD = {
    "heads": (lambda: GQAQKVColumnParallelLinear(4, [9, 4]), ("9", "2")),
    "kv heads": (lambda: GQAQKVColumnParallelLinear(4, [8, 3]), ("3", "2")),
    "multiplier": (lambda: GQAQKVColumnParallelLinear(4, [8, 2], kv_size_multiplier=3), ("2", "3")),
    "gather and SP": (
        lambda: GQAQKVColumnParallelLinear(4, [8, 4], sequence_parallel_enabled=True),
        ("gather_output",),
    ),
    "three parameters": (
        lambda: GQAQKVColumnParallelLinear(4, [8, 4], fuse_qkv=False),
        ("fuse_qkv",),
    ),
    "features": (lambda: GQAQKVColumnParallelLinear(4, [8, 4])(torch.ones(2, 3)), ("(2, 3)", "4")),
}


def test_errors_name_the_numbers_on_all_ranks(ranks):
    assert_messages(ranks, __name__, "BAD", size=2)
