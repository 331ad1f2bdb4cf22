"""Grouped query, key and value projections: gathered ones, the right gradients, errors."""

import pytest
import torch
from torch import nn

from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.parallel_layers import grads, parallel_state
from tutorial_lib.parallel_layers.sharding import partition_of

from .parity import assert_messages, whole

HIDDEN, HEAD = 16, 4


def gathered(kv_heads):
    copies = max(parallel_state.get_tensor_model_parallel_size() // kv_heads, 1)
    sizes, x = (8 * HEAD, kv_heads * HEAD), torch.randn(3, HIDDEN, dtype=torch.float64)
    torch.manual_seed(3)
    plain = [nn.Linear(HIDDEN, size, dtype=torch.float64) for size in (*sizes, sizes[1])]
    torch.manual_seed(3)
    options = dict(dtype=torch.float64, kv_size_multiplier=copies)
    layer = GQAQKVColumnParallelLinear(HIDDEN, sizes, **options)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = torch.cat(layer(xs[0]), -1), torch.cat([linear(xs[1]) for linear in plain], -1)
    for output in outputs:
        output.pow(3).sum().backward()
    found = [outputs[0], xs[0].grad]
    found += [whole(p.grad, p) for p in (layer.weight_qkv, layer.bias_qkv)]
    wanted = [outputs[1], xs[1].grad]
    wanted += [torch.cat([getattr(p, kind).grad for p in plain]) for kind in ("weight", "bias")]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_gathered_projections_are_those_of_three_plain_layers(ranks, kv_heads, size):
    """Sharded ones are Llama's, whose training is compared in `test_models`."""
    ranks(gathered, kv_heads, world_size=size, tp=size)


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
