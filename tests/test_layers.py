"""Sharded layers against plain `torch.nn` with the same seed: outputs, every gradient, initial
weights, marks, errors.
"""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.parallel_layers import comm, mappings, parallel_state
from tutorial_lib.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.marks import TENSOR_PARALLEL_ATTRIBUTES
from tutorial_lib.parallel_layers.sharded_module import materialize
from tutorial_lib.parallel_layers.sharding import partition_of
from tutorial_lib.parallel_layers.utils import padding_of

from .parity import assert_messages

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SIZES = [1, 2, 4]


def noise(*shape, seed=1, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def whole(tensor, marked=None):
    """The full tensor of all ranks' parts."""
    partition = partition_of(tensor if marked is None else marked)
    if partition is None:
        return tensor
    return partition.merge(comm.all_gather(tensor[None], 0).unbind(0))


def compare(layer, plain, x, run, dtype):
    """Output, input gradient and parameter gradients of `run(layer, x)` against the plain layer;
    largest difference each.

    `run` returns the output and the cotangent's part that belongs to it, from the full cotangent.
    """
    torch.manual_seed(0)
    reference_x = x.clone().requires_grad_()
    reference = plain(reference_x)
    cotangent = noise(*reference.shape, seed=2, dtype=dtype)
    reference.backward(cotangent)
    found_x = x.clone().requires_grad_()
    output, grad_x = run(layer, found_x, reference.detach(), cotangent)
    differences = {"output": output, "input": (grad_x - reference_x.grad).abs().max().item()}
    for name, parameter in plain.named_parameters():
        ours = getattr(layer, name)
        assert torch.equal(whole(ours.data, ours), parameter.data), f"{name} starts elsewhere"
        grad = ours.grad
        if getattr(ours, "sequence_parallel_enabled", False):
            grad = comm.all_reduce("sum", grad)
        differences[name] = (whole(grad, ours) - parameter.grad).abs().max().item()
    assert all(d <= TOLERANCE[dtype] for d in differences.values()), differences
    return differences


def part(full, dim, partition=None):
    rank = parallel_state.get_tensor_model_parallel_rank()
    if partition is not None:
        return replace(partition, dim=dim).shard(full, rank)
    return full.chunk(parallel_state.get_tensor_model_parallel_size(), dim)[rank]


def gap(found, wanted):
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return (found.detach() - wanted).abs().max().item()


def column(leading, gather, sp, bias, dtype, stride=1, pad=False, sizes=(12, 24)):
    torch.manual_seed(3)
    layer = ColumnParallelLinear(
        *sizes, bias, gather, dtype, stride=stride, sequence_parallel_enabled=sp, pad=pad
    )
    torch.manual_seed(3)
    plain = nn.Linear(*sizes, bias=bias, dtype=dtype)

    def run(layer, x, wanted, cotangent):
        before = x.detach().clone()
        shard = part(x.detach(), 0).clone().requires_grad_() if sp else x
        output = layer(shard)
        if not gather:
            rows = partition_of(layer.weight)
            wanted, cotangent = (part(t, -1, rows) for t in (wanted, cotangent))
        kept = cotangent.clone()
        output.backward(cotangent)
        assert torch.equal(x.detach(), before) and torch.equal(cotangent, kept), (
            "an argument was modified"
        )
        return gap(output, wanted), comm.all_gather(shard.grad, 0) if sp else shard.grad

    compare(layer, plain, noise(*leading, sizes[0], dtype=dtype), run, dtype)


def row(leading, parallel, sp, bias, dtype):
    torch.manual_seed(3)
    layer = RowParallelLinear(24, 12, bias, parallel, dtype, sequence_parallel_enabled=sp)
    torch.manual_seed(3)
    plain = nn.Linear(24, 12, bias=bias, dtype=dtype)

    def run(layer, x, wanted, cotangent):
        shard = part(x.detach(), -1).clone().requires_grad_() if parallel else x
        output = layer(shard)
        if sp:
            wanted, cotangent = part(wanted, 0), part(cotangent, 0)
        output.backward(cotangent)
        grad = comm.all_gather(shard.grad, -1) if parallel else shard.grad
        return gap(output, wanted), grad

    compare(layer, plain, noise(*leading, 24, dtype=dtype), run, dtype)


LEADING = [(4,), (4, 3), (4, 2, 3)]


def column_grid(dtype):
    for leading in LEADING:
        for bias in (True, False):
            for gather, sp in ((True, False), (False, False), (False, True)):
                column(leading, gather, sp, bias, dtype)
    for gather in (True, False):
        for stride in (2, 3):
            column((4, 3), gather, False, True, dtype, stride=stride)
        for sizes in ((12, 21), (12, 5), (12, 1)):
            column((4, 3), gather, False, True, dtype, pad=True, sizes=sizes)


def row_grid(dtype):
    for leading in LEADING:
        for bias in (True, False):
            for parallel, sp in ((True, False), (False, False), (True, True)):
                row(leading, parallel, sp, bias, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("grid", [column_grid, row_grid])
def test_linear_layers_equal_plain_ones(ranks, grid, dtype, size):
    ranks(grid, dtype, world_size=size, tp=size)


def embedding(dtype, sp=False, padding_idx=None, num=24, pad=False):
    torch.manual_seed(3)
    layer = ParallelEmbedding(
        num, 8, padding_idx, dtype=dtype, pad=pad, sequence_parallel_enabled=sp
    )
    torch.manual_seed(3)
    exact = torch.promote_types(dtype, torch.float32)
    plain = nn.Embedding(num, 8, padding_idx, dtype=exact).to(dtype)
    ids = torch.randint(num, (4, 8), generator=torch.Generator().manual_seed(5))
    wanted = plain(ids)
    cotangent = noise(*wanted.shape, dtype=dtype)
    wanted.backward(cotangent)
    found = layer(ids)
    if sp:
        wanted, cotangent = (part(t.transpose(0, 1), 0) for t in (wanted, cotangent))
    found.backward(cotangent)
    assert found.dtype is dtype and torch.equal(found, wanted)
    assert torch.equal(whole(layer.weight.data, layer.weight), plain.weight.data)
    difference = gap(whole(layer.weight.grad, layer.weight), plain.weight.grad)
    assert difference <= TOLERANCE.get(dtype, 0.1)


def embedding_grid(dtype):
    embedding(dtype)
    embedding(dtype, sp=True)
    for padding_idx in (5, -24):
        embedding(dtype, padding_idx=padding_idx)
    for num in (5, 21, 1):
        embedding(dtype, num=num, pad=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_embedding_equals_a_plain_one_in_its_own_dtype(ranks, dtype, size):
    ranks(embedding_grid, dtype, world_size=size, tp=size)


def padding_rows(padding_idx):
    layer = ParallelEmbedding(8, 4, padding_idx=padding_idx)
    layer(torch.arange(8)).sum().backward()
    return layer.weight.grad[:, 0].tolist(), layer.weight[padding_idx % 4].abs().max().item()


def test_padding_idx_is_a_global_id(ranks):
    five, one = (ranks(padding_rows, index, world_size=2, tp=2) for index in (5, 1))
    assert [grads for grads, _ in five] == [[1, 1, 1, 1], [1, 0, 1, 1]]
    assert [grads for grads, _ in one] == [[1, 0, 1, 1], [1, 1, 1, 1]]
    assert five[1][1] == 0 and one[0][1] == 0 and five[0][1] > 0


# --- faults of others -----------------------------------------------------------------------------


def row_bias(parallel, sp):
    layer = RowParallelLinear(4, 3, input_is_parallel=parallel, sequence_parallel_enabled=sp)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.copy_(torch.tensor([100.0, 200.0, 300.0]))
    x = torch.ones(4 if sp else 1, 2 if parallel else 4)
    y = layer(x)
    y.sum().backward()
    grad = (
        comm.all_reduce("sum", layer.bias.grad)
        if layer.bias.sequence_parallel_enabled
        else layer.bias.grad
    )
    return y[0].tolist(), grad.tolist()


@pytest.mark.parametrize("parallel", [True, False])
def test_row_bias_once_forward_and_whole_backward(ranks, parallel):
    assert (
        ranks(row_bias, parallel, False, world_size=2, tp=2) == [([104, 204, 304], [1, 1, 1])] * 2
    )


def test_row_bias_under_sequence_parallel_is_marked_and_sums_to_the_whole(ranks):
    assert ranks(row_bias, True, True, world_size=2, tp=2) == [([104, 204, 304], [4, 4, 4])] * 2


def initial_weights():
    torch.manual_seed(0)
    layers = {
        "column": ColumnParallelLinear(16, 32, gather_output=False),
        "row": RowParallelLinear(16, 8),
    }
    layers["embedding"] = ParallelEmbedding(32, 16)
    tensors = {f"{k}.{n}": p for k, layer in layers.items() for n, p in layer.named_parameters()}
    mine = {k: p.detach().clone() for k, p in tensors.items()}
    return mine, {k: whole(p.detach(), p) for k, p in tensors.items()}, torch.rand(1)


def test_the_same_seed_gives_the_same_weights_at_every_degree(ranks):
    runs = {
        (w, tp): ranks(initial_weights, world_size=w, tp=tp)
        for w, tp in ((1, 1), (2, 2), (4, 4), (4, 2), (2, 1))
    }
    torch.manual_seed(0)
    plain = {
        "column": nn.Linear(16, 32),
        "row": nn.Linear(16, 8),
        "embedding": nn.Embedding(32, 16),
    }
    wanted = {f"{k}.{n}": p.detach() for k, m in plain.items() for n, p in m.named_parameters()}
    after = torch.rand(1)
    for (_, tp), results in runs.items():
        for _, full, draw in results:
            assert full.keys() == wanted.keys() and torch.equal(draw, after)
            assert all(torch.equal(full[k], wanted[k]) for k in wanted)
        if tp > 1:
            first, second = results[0][0], results[1][0]
            assert not any(torch.equal(first[k], second[k]) for k in wanted if k != "row.bias")
    assert wanted["row.weight"].abs().max() <= 1 / 16**0.5
    replicas = runs[4, 2]
    assert all(torch.equal(replicas[0][0][k], replicas[2][0][k]) for k in wanted)


def fused_rows():
    layer = ColumnParallelLinear(
        1, 8, bias=False, gather_output=False, stride=2,
        init_method=lambda w: w.copy_(torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])[:, None]),
    )  # fmt: skip
    return layer.weight[:, 0].tolist(), whole(layer.weight.detach(), layer.weight)[:, 0].tolist()


def test_fused_gate_and_up_stay_paired(ranks):
    full = [0, 1, 2, 3, 10, 11, 12, 13]
    assert ranks(fused_rows, world_size=2, tp=2) == [([0, 1, 10, 11], full), ([2, 3, 12, 13], full)]
    assert [r[0] for r in ranks(fused_rows, world_size=4, tp=4)] == [
        [0, 10],
        [1, 11],
        [2, 12],
        [3, 13],
    ]


def swiglu():
    torch.manual_seed(0)
    up = ColumnParallelLinear(8, 32, bias=False, gather_output=False, stride=2, dtype=torch.float64)
    down = RowParallelLinear(16, 8, bias=False, input_is_parallel=True, dtype=torch.float64)
    gate, value = up(noise(5, 8)).chunk(2, -1)
    return down(F.silu(gate) * value)


def test_a_fused_mlp_equals_the_plain_one(ranks):
    wanted = ranks(swiglu, world_size=1, tp=1)[0]
    for size in (2, 4):
        for found in ranks(swiglu, world_size=size, tp=size):
            assert gap(found, wanted.detach()) <= 1e-10


def bf16_input_gradient(sp):
    layer = ColumnParallelLinear(64, 64, False, False, torch.bfloat16, sequence_parallel_enabled=sp)
    x = noise(32, 64, dtype=torch.bfloat16)
    x = (part(x, 0) if sp else x).requires_grad_()
    cotangent = noise(32, 64, seed=2, dtype=torch.bfloat16)
    with comm.record() as log:
        layer(x).backward(part(cotangent, -1))
    wanted = cotangent.float() @ whole(layer.weight.detach(), layer.weight).float()
    kinds = {c.dtype for c in log if c.kind in ("all_reduce", "reduce_scatter")}
    return x.grad.float(), part(wanted, 0) if sp else wanted, kinds


@pytest.mark.parametrize("sp", [False, True])
def test_bf16_input_gradient_is_summed_in_float32(ranks, sp):
    for found, wanted, kinds in ranks(bf16_input_gradient, sp, world_size=2, tp=2):
        assert kinds == {torch.float32}
        assert gap(found, wanted) <= 0.02 * wanted.abs().max()


def collectives(sp):
    up = ColumnParallelLinear(8, 32, gather_output=False, sequence_parallel_enabled=sp)
    down = RowParallelLinear(32, 8, input_is_parallel=True, sequence_parallel_enabled=sp)
    saved = []
    x = torch.randn(4 // (2 if sp else 1), 3, 8, requires_grad=True)
    with comm.record() as log:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
        ):
            y = down(up(x))
        forward = comm.count(log)
        y.sum().backward()
    return dict(forward), dict(comm.count(log) - forward), saved


def test_collectives_of_a_pair_and_nothing_saved_gathered(ranks):
    forward, backward, _ = ranks(collectives, False, world_size=2, tp=2)[0]
    assert forward == {("all_reduce", 2): 1} and backward == {("all_reduce", 2): 1}
    forward, backward, saved = ranks(collectives, True, world_size=2, tp=2)[0]
    assert forward == {("all_gather", 2): 1, ("reduce_scatter", 2): 1}
    assert backward == {("all_gather", 2): 2, ("reduce_scatter", 2): 1}
    assert (2, 3, 8) in saved and (4, 3, 8) not in saved


def autocast():
    torch.manual_seed(0)
    up = ColumnParallelLinear(8, 16, gather_output=False)
    down = RowParallelLinear(16, 8, input_is_parallel=True)
    x = noise(4, 8, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = down(up(x))
    y.float().sum().backward()
    return y.dtype, y.detach().float(), x.grad, up.weight.grad.dtype


def test_autocast_computes_in_bf16_and_gives_gradients_in_the_weights_dtype(ranks):
    (_, wanted, grad, _), *_ = ranks(autocast, world_size=1, tp=1)
    for dtype, found, found_grad, weight_dtype in ranks(autocast, world_size=2, tp=2):
        assert dtype is torch.bfloat16 and weight_dtype is torch.float32
        assert gap(found, wanted) <= 0.02 and gap(found_grad, grad) <= 0.05


# --- marks, copies, meta --------------------------------------------------------------------------


def marks_of(module):
    names = (*TENSOR_PARALLEL_ATTRIBUTES, "sequence_parallel_enabled", "pad_size")
    return {n: {k: getattr(p, k, None) for k in names} for n, p in module.named_parameters()}


def survivors():
    model = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(4, 6, gather_output=False, pad=True),
            "row": RowParallelLinear(8, 4, input_is_parallel=True, sequence_parallel_enabled=True),
            "fused": ColumnParallelLinear(4, 8, gather_output=False, stride=2),
            "embedding": ParallelEmbedding(8, 4),
        }
    )
    marks = marks_of(model)
    copies = {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    copies["assign"] = copy.deepcopy(model)
    copies["assign"].load_state_dict(
        {k: v.clone() for k, v in model.state_dict().items()}, assign=True
    )
    copies["empty"] = copy.deepcopy(model).to_empty(device="meta")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        copies["bf16"] = copy.deepcopy(model).to(torch.bfloat16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert copies["bf16"]["row"].bias.dtype is torch.bfloat16
    return marks, {k: marks_of(m) for k, m in copies.items()}


def test_marks_follow_the_parameters(ranks):
    for marks, copies in ranks(survivors, world_size=4, tp=4):
        assert all(found == marks for found in copies.values()), copies
        column = dict(
            tensor_model_parallel=True, partition_dim=0, partition_stride=1, num_partitions=4
        )
        assert marks["column.weight"] == marks["column.bias"]
        assert marks["column.bias"] == {
            **column,
            "sequence_parallel_enabled": None,
            "pad_size": 2,
        }
        assert (
            marks["fused.weight"]["partition_stride"] == 2
            and marks["row.weight"]["partition_dim"] == 1
        )
        assert (
            not marks["row.bias"]["tensor_model_parallel"]
            and marks["row.bias"]["sequence_parallel_enabled"]
        )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(8, 4)
        self.row = RowParallelLinear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = ColumnParallelLinear(4, 8, bias=False, gather_output=False)
        self.head.weight = self.embedding.weight


def on_meta():
    torch.manual_seed(7)
    wanted = Tied()
    with torch.device("meta"):
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(7)
    materialize(model, "cpu")
    assert model.head.weight is model.embedding.weight
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True)
    )
    assert marks_of(model) == marks_of(wanted)


def test_meta_then_materialise_equals_building_at_once(ranks):
    ranks(on_meta, world_size=2, tp=2)


def mesh_built_anew():
    features, ids = torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.long)
    built = [
        (ColumnParallelLinear(4, 4), features),
        (RowParallelLinear(4, 4), features),
        (ParallelEmbedding(4, 4), ids),
        (GQAQKVColumnParallelLinear(4, (4, 4)), features),
    ]
    parallel_state.initialize_model_parallel(1)
    for layer, x in built:
        with pytest.raises(ValueError, match="was sharded over 2 ranks, and there are 1 now"):
            layer(x)


def test_a_layer_of_another_mesh_says_so(ranks):
    ranks(mesh_built_anew, world_size=2, tp=2)


class Tiny(nn.Module):
    """A language model of five words."""

    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(5, 6, pad=True, dtype=torch.float64)
        self.head = ColumnParallelLinear(6, 5, gather_output=False, pad=True, dtype=torch.float64)

    def forward(self, ids, targets):
        return parallel_cross_entropy(self.head(self.embedding(ids)), targets).mean()


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


def test_a_vocabulary_that_is_not_divisible_trains_the_same_at_every_degree(ranks):
    wanted_losses, wanted = ranks(train_vocabulary, world_size=1, tp=1)[0]
    for size in (2, 4):
        for losses, merged in ranks(train_vocabulary, world_size=size, tp=size):
            assert losses == pytest.approx(wanted_losses, abs=1e-10)
            assert merged["embedding.weight"].shape == merged["head.weight"].shape == (5, 6)
            assert all((merged[n] - wanted[n]).abs().max() <= 1e-10 for n in wanted)


def test_padded_sizes():
    assert [n + padding_of(n, 8) for n in (50257, 65535, 8)] == [50264, 65536, 8]
    assert 50257 + padding_of(50257, 8, 128) == 51200


# --- errors ---------------------------------------------------------------------------------------


BAD = {
    "output of 5": (lambda: ColumnParallelLinear(4, 5), ("5", "2")),
    "input of 5": (lambda: RowParallelLinear(5, 4), ("5", "2")),
    "vocabulary of 5": (lambda: ParallelEmbedding(5, 4), ("5", "2")),
    "stride": (lambda: ColumnParallelLinear(4, 8, stride=3), ("8", "3")),
    "gather and SP": (
        lambda: ColumnParallelLinear(4, 4, sequence_parallel_enabled=True),
        ("gather_output",),
    ),
    "SP and whole input": (
        lambda: RowParallelLinear(4, 4, sequence_parallel_enabled=True),
        ("input_is_parallel",),
    ),
    "features": (lambda: ColumnParallelLinear(4, 4)(torch.ones(2, 3)), ("(2, 3)", "4")),
    "parallel features": (
        lambda: RowParallelLinear(4, 4, input_is_parallel=True)(torch.ones(2, 4)),
        ("(2, 4)", "2"),
    ),
    "sequence": (
        lambda: RowParallelLinear(4, 4, input_is_parallel=True, sequence_parallel_enabled=True)(
            torch.ones(5, 1, 2)
        ),
        ("5", "2"),
    ),
    "sequence of ids": (
        lambda: ParallelEmbedding(4, 4, sequence_parallel_enabled=True)(torch.ones(1, 5).long()),
        ("5", "2"),
    ),
    "padding id": (lambda: ParallelEmbedding(4, 4, padding_idx=4), ("4",)),
}
# Sizes that fit by chance: only their origin tells that the features are not what the layer takes.
BY_CHANCE = {
    "a shard as the whole": (
        lambda: ColumnParallelLinear(4, 4)(
            ColumnParallelLinear(4, 8, gather_output=False)(torch.ones(2, 4)).relu()
        ),
        ("features of all ranks", "one rank's shard"),
    ),
    "a shard, scattered, as the whole": (
        lambda: RowParallelLinear(2, 4)(
            mappings.scatter_to_tensor_model_parallel_region(torch.ones(2, 4))
        ),
        ("features of all ranks", "one rank's shard"),
    ),
    "the whole as a shard": (
        lambda: RowParallelLinear(8, 4, input_is_parallel=True)(
            ColumnParallelLinear(4, 4)(torch.ones(2, 4)).tanh()
        ),
        ("this rank's shard", "those of all ranks"),
    ),
    "a shard for q, k and v": (
        lambda: GQAQKVColumnParallelLinear(4, (4, 4))(
            ColumnParallelLinear(4, 8, gather_output=False)(torch.ones(2, 4))
        ),
        ("features of all ranks", "one rank's shard"),
    ),
}
ANYWHERE = {
    "id too large": (lambda: ParallelEmbedding(8, 4)(torch.tensor([0, 8])), ("8",)),
    "negative id": (lambda: ParallelEmbedding(8, 4)(torch.tensor([0, -1])), ("-1", "8")),
    "half a feature": (lambda: ColumnParallelLinear(4, 4.0), ("output_size", "4.0")),
    "a flag for a size": (lambda: RowParallelLinear(True, 4), ("input_size", "True")),
    "no stride": (lambda: ColumnParallelLinear(4, 4, stride=0), ("stride", "0")),
    "no vocabulary": (lambda: ParallelEmbedding(0, 4), ("num_embeddings", "0")),
    "words for a width": (lambda: ParallelEmbedding(8, "4"), ("embedding_dim", "'4'")),
    "negative padding": (
        lambda: ColumnParallelLinear(4, 5, pad=True, pad_alignment_size_per_rank=-3),
        ("pad_alignment_size_per_rank", "-3"),
    ),
    "no sequence among ids": (
        lambda: ParallelEmbedding(4, 4, sequence_parallel_enabled=True)(torch.ones(4).long()),
        ("[B, S]", "(4,)"),
    ),
    "float ids": (lambda: ParallelEmbedding(8, 4)(torch.ones(2)), ("float32",)),
}


@pytest.mark.parametrize("size", [1, 2])
def test_errors_name_the_numbers_on_all_ranks(ranks, size):
    tables = ("BAD", "BY_CHANCE", "ANYWHERE") if size == 2 else ("ANYWHERE",)
    assert_messages(ranks, __name__, *tables, size=size)


def test_a_layer_without_a_world_falls_back_to_one_rank():
    if torch.distributed.is_initialized():  # by a test before this one, in this very process
        torch.distributed.destroy_process_group()
    with pytest.warns(UserWarning, match="falling back"):
        layer = ColumnParallelLinear(4, 5)
    try:
        assert layer(torch.ones(2, 4)).shape == (2, 5)
    finally:
        torch.distributed.destroy_process_group()


def accelerated_ids():
    layer = ParallelEmbedding(8, 4, device="meta")
    return layer(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape


def test_ids_off_the_host_are_not_looked_at(ranks):
    assert ranks(accelerated_ids, world_size=2, tp=2) == [(2, 3, 4)] * 2
