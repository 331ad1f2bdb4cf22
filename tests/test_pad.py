"""Padding of heads and of the vocabulary: a padded model trains exactly like the plain one, and
nothing leaks.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.pad import (
    get_number_of_extra_heads,
    get_padded_vocab_size,
    pad_model,
)
from tutorial_lib.parallel_layers.sharding import partition_of

HEAD, HIDDEN, HEADS = 4, 8, 3


def test_arithmetic():
    assert [get_number_of_extra_heads(n, 8) for n in (1, 8, 12, 25)] == [7, 0, 4, 7]
    assert get_padded_vocab_size(50257, 8) == 50264 and get_padded_vocab_size(65535, 8) == 65536
    assert get_padded_vocab_size(50257, 8, 128) == 51200 and get_padded_vocab_size(8, 8) == 8
    with pytest.raises(ValueError, match="0"):
        get_number_of_extra_heads(0, 2)
    with pytest.raises(ValueError, match="-1"):
        get_padded_vocab_size(8, -1)


def attend(q, k, v):
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        options = dict(gather_output=False, dtype=torch.float64)
        size = HEADS * HEAD
        if fused:
            self.qkv = ColumnParallelLinear(HIDDEN, 3 * size, stride=3, **options)
        else:
            self.q, self.k, self.v = (
                ColumnParallelLinear(HIDDEN, size, pad=True, **options) for _ in range(3)
            )
        self.o = RowParallelLinear(
            size, HIDDEN, input_is_parallel=True, pad=True, dtype=torch.float64
        )
        self.fused, self.heads = fused, HEADS

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        return self.o(attend(q, k, v))


def whole(tensor, marked):
    partition = partition_of(marked)
    return (
        tensor if partition is None else partition.merge(comm.all_gather(tensor[None], 0).unbind(0))
    )


def train(fused):
    tp = parallel_state.get_tensor_model_parallel_size()
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": Attention(fused), "other": ColumnParallelLinear(4, 8)})
    pad_model(model, tp, HEADS, (Attention,), lambda module, heads: setattr(module, "heads", heads))
    model = copy.deepcopy(model)
    assert model["attention"].heads == (HEADS if tp == 1 else 4) and not hasattr(
        model["other"].weight, "pad_size"
    )
    assert model["attention"].o.weight.shape[1] == model["attention"].heads // tp * HEAD
    # Not Adam: it would blow up the rounding errors of the key bias, whose gradient is zero but for
    # them.
    optimizer = torch.optim.SGD(
        model["attention"].parameters(), 0.01, momentum=0.9, weight_decay=0.1
    )
    losses = []
    for step in range(3):
        x = torch.randn(
            5, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        loss = (model["attention"](x) - x).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    kept = {n: whole(p.detach(), p) for n, p in model["attention"].named_parameters()}
    return losses, kept


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_three_heads_on_any_number_of_ranks_train_like_three_heads(ranks, fused, size):
    losses, wanted = ranks(train, fused, world_size=1, tp=1)[0]
    for found, kept in ranks(train, fused, world_size=size, tp=size):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, tensor in wanted.items():
            assert (
                kept[name].shape == tensor.shape and (kept[name] - tensor).abs().max() <= 1e-10
            ), name


def wrong_heads():
    with pytest.raises(ValueError, match="12.*5"):
        pad_model(ColumnParallelLinear(4, 12, gather_output=False), 2, 5)
    with pytest.raises(ValueError, match="2 ranks, not tp_degree 4"):
        pad_model(ColumnParallelLinear(4, 12, gather_output=False), 4, 3)


def test_errors(ranks):
    ranks(wrong_heads, world_size=2, tp=2)


class Tiny(nn.Module):
    """A language model of five words."""

    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(5, 6, pad=True, dtype=torch.float64)
        self.head = ColumnParallelLinear(6, 5, gather_output=False, pad=True, dtype=torch.float64)

    def forward(self, ids, targets):
        return parallel_cross_entropy(self.head(self.embedding(ids)), targets, vocab_size=5).mean()


def train_vocabulary():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        ids = torch.arange(10) * (step + 1) % 5
        loss = model(ids, ids.roll(1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: whole(p.detach(), p) for n, p in model.named_parameters()}


def test_a_vocabulary_that_does_not_divide_trains_the_same_at_every_degree(ranks):
    wanted_losses, wanted = ranks(train_vocabulary, world_size=1, tp=1)[0]
    for size in (2, 4):
        for losses, merged in ranks(train_vocabulary, world_size=size, tp=size):
            assert losses == pytest.approx(wanted_losses, abs=1e-10)
            assert merged["embedding.weight"].shape == merged["head.weight"].shape == (5, 6)
            assert all((merged[n] - wanted[n]).abs().max() <= 1e-10 for n in wanted)
