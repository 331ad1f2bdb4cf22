"""A training step of one Llama-shaped model: one process on all cores, PyTorch's tensor
parallelism, and ours.

    python -m tests.benchmarks.tp_step

The contestants take turns within one run, so that whatever else the machine does hits all of them;
medians count. Each is given its best setting of those tried: fused projections where it can cut
them (PyTorch's cannot), fused AdamW for all.
"""

import json
import math
import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from tests.benchmarks.command import parser
from tests.pool import RankPool
from tutorial_lib.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy

HIDDEN, FEED_FORWARD, LAYERS, VOCABULARY, HEAD = 512, 1376, 4, 8192, 64
BATCH, SEQUENCE, TP = 4, 256, 2
# Between the losses of the contestants after up to some dozen steps of AdamW in float32.
TOLERANCE = 1e-4


class Plain:
    """The layers of one process."""

    fused = True
    embedding = nn.Embedding

    @staticmethod
    def column(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=False)

    row = column

    @staticmethod
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Split(Plain):
    """The same with every projection by itself, as PyTorch's tensor parallelism cuts them."""

    fused = False


class Ours(Plain):
    """The sharded layers of this library."""

    @staticmethod
    def embedding(rows: int, columns: int) -> nn.Module:
        return ParallelEmbedding(rows, columns)

    @staticmethod
    def column(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return ColumnParallelLinear(inputs, outputs, bias=False, gather_output=False, stride=stride)

    @staticmethod
    def row(inputs: int, outputs: int) -> nn.Module:
        return RowParallelLinear(inputs, outputs, bias=False, input_is_parallel=True)

    @staticmethod
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(logits, target).mean()


class Projections(nn.Module):
    """`n` projections of one input, in one multiplication or in `n`."""

    def __init__(self, kind, inputs: int, outputs: int, n: int):
        super().__init__()
        self.n, self.fused = n, kind.fused
        if self.fused:
            self.all = kind.column(inputs, n * outputs, n)
        else:
            self.each = nn.ModuleList(kind.column(inputs, outputs) for _ in range(n))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.all(x).chunk(self.n, -1) if self.fused else tuple(part(x) for part in self.each)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Block(nn.Module):
    """Attention with rotary positions, and a gated MLP; both behind a norm, both added to their
    input.
    """

    def __init__(self, kind):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)
        self.qkv, self.o = Projections(kind, HIDDEN, HIDDEN, 3), kind.row(HIDDEN, HIDDEN)
        self.gate_up, self.down = (
            Projections(kind, HIDDEN, FEED_FORWARD, 2),
            kind.row(FEED_FORWARD, HIDDEN),
        )

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(self.attention_norm(x))
        )
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x))
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """`[B, S]` ids to `[B, S, V]` logits (or this rank's part of them)."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = kind.embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, 1e-5)
        self.head = kind.column(HIDDEN, VOCABULARY)
        angles = torch.outer(
            torch.arange(SEQUENCE), 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)
        ).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.head(self.norm(x))


def plain_model(kind) -> Model:
    """The same weights for every contestant, from one seed."""
    torch.manual_seed(0)
    model = Model(kind)
    if kind is not Split:
        return model
    fused = plain_model(Plain).state_dict()
    state = {}
    for name, tensor in fused.items():
        stem, _, _ = name.partition("all.weight")
        parts = tensor.chunk(3 if "qkv" in name else 2) if "all.weight" in name else None
        state |= (
            {name: tensor}
            if parts is None
            else {f"{stem}each.{i}.weight": p for i, p in enumerate(parts)}
        )
    model.load_state_dict(state)
    return model


def pytorchs_model() -> Model:
    """Cut by `parallelize_module`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (TP,))
    plan = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.qkv.each.*": ColwiseParallel(),
        "blocks.*.gate_up.each.*": ColwiseParallel(),
        "blocks.*.o": RowwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(plain_model(Split), mesh, plan)


# In a rank's process: a function of a step's number that trains it and returns the loss.
_contestant = None


def prepare(name: str, threads: int) -> None:
    """Builds a contestant on this rank."""
    global _contestant
    from contextlib import nullcontext

    torch.set_num_threads(threads)
    if name == "PyTorch TP":
        from torch.distributed.tensor.parallel import loss_parallel as around

        model, kind = pytorchs_model(), Split
    else:
        kind, around = (Ours if name == "ours TP" else Plain), nullcontext
        model = plain_model(kind)
    # PyTorch's fused AdamW takes sharded and plain parameters only apart.
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False)
    )
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], 3e-4, fused=True)

    def step(number: int) -> float:
        tokens = torch.randint(
            VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(number)
        )
        with around():
            loss = kind.loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    _contestant = step


def train(first: int, steps: int) -> tuple[float, list[float]]:
    """Seconds a step, and the losses."""
    start = time.perf_counter()
    losses = [_contestant(number) for number in range(first, first + steps)]
    return (time.perf_counter() - start) / steps, losses


def main() -> None:
    options = parser(__doc__, rounds=9, steps=3).parse_args()  # steps of each in a round
    cores = os.cpu_count() or 1
    contestants = {
        "one process": (RankPool(1), None, cores),
        "PyTorch TP": (RankPool(TP), None, 1),
        "ours TP": (RankPool(TP), TP, 1),
    }
    for name, (pool, tp, threads) in contestants.items():
        pool.run(prepare, name, threads, tp=tp, timeout=120)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-1, options.rounds):  # the first round is a warm-up
        losses = {}
        for name, (pool, tp, _) in contestants.items():
            results = pool.run(
                train, (number + 1) * options.steps, options.steps, tp=tp, timeout=600
            )
            losses[name] = results[0][1]
            if number >= 0:
                seconds[name].append(max(elapsed for elapsed, _ in results))
        for name, found in losses.items():
            gap = max(map(lambda a, b: abs(a - b), found, losses["one process"]))
            if not gap <= TOLERANCE:
                raise SystemExit(
                    f"the losses of {name} differ from one process's by {gap:.2e} in round {number}"
                )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{cores} cores; hidden {HIDDEN}, {LAYERS} layers, vocabulary {VOCABULARY}, {BATCH} × "
        f"{SEQUENCE} tokens, AdamW"
    )
    for name, (pool, _, threads) in contestants.items():
        ratios = [t / s for t, s in zip(seconds[name], seconds["one process"])]
        print(
            f"{name:12} {pool.world_size} × {threads} threads  {1e3 * medians[name]:7.1f} ms a "
            f"step  "
            f"{statistics.median(ratios):.3f} × one process"
        )
        pool.stop()
    print(
        f"losses equal within {TOLERANCE}; last {losses['ours TP'][-1]:.5f}, ln V = "
        f"{math.log(VOCABULARY):.5f}"
    )
    print(json.dumps({name: [round(t, 5) for t in times] for name, times in seconds.items()}))


if __name__ == "__main__":
    main()
