"""A training step of one Llama: one process on all cores, PyTorch's tensor parallelism, and ours.

    python -m tests.benchmarks.tp_step

The contestants take turns within one run, so that whatever else the machine does hits all of them;
medians count. Each is given its best setting of those tried: the library's model, whose projections
are fused, for the one process too; PyTorch's cannot shard fused ones, so there it is Hugging Face's
model. Fused attention and fused AdamW for all.
"""

import json
import math
import os
import statistics
import time
from contextlib import nullcontext

import torch
import transformers

from tests.benchmarks.command import parser
from tests.parity import hugging_face_loss
from tests.pool import RankPool
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.models.llama2 import LlamaForCausalLM

CONFIG = transformers.LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
    vocab_size=8192, use_cache=False,
)  # fmt: skip
BATCH, SEQUENCE, TP = 4, 256, 2
# Between the losses of the contestants after up to some dozen steps of AdamW in float32.
TOLERANCE = 1e-4


def pytorchs_model() -> transformers.LlamaForCausalLM:
    """Hugging Face's, cut by `parallelize_module`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    layer = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    plan = {f"model.layers.*.{name}": style for name, style in layer.items()} | {
        "model.embed_tokens": ColwiseParallel(output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = hugging_face_reference(transformers.LlamaForCausalLM, CONFIG)
    return parallelize_module(model, init_device_mesh("cpu", (TP,)), plan)


# In a rank's process: a function of a step's number that trains it and returns the loss.
_contestant = None


def prepare(name: str, threads: int) -> None:
    """Builds a contestant on this rank, with the weights that all have."""
    global _contestant
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "PyTorch TP":
        from torch.distributed.tensor.parallel import loss_parallel as around

        model, loss_of = pytorchs_model(), hugging_face_loss
    else:
        model, around = LlamaForCausalLM(CONFIG, use_flash_attention=True), nullcontext

        def loss_of(model, batch):
            return model(**batch).loss

    # PyTorch's fused AdamW takes sharded and plain parameters only apart.
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False)
    )
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], 3e-4, fused=True)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        with around():
            ids = torch.randint(CONFIG.vocab_size, (BATCH, SEQUENCE), generator=generator)
            loss = loss_of(model, {"input_ids": ids, "labels": ids})
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
        "one process": (RankPool(1), 1, cores),
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
            gap = max(abs(a - b) for a, b in zip(found, losses["one process"]))
            if not gap <= TOLERANCE:
                raise SystemExit(
                    f"the losses of {name} differ from one process's by {gap:.2e} in round {number}"
                )
    print(
        f"{cores} cores; hidden {CONFIG.hidden_size}, {CONFIG.num_hidden_layers} layers, "
        f"vocabulary {CONFIG.vocab_size}, {BATCH} × {SEQUENCE} tokens, AdamW"
    )
    for name, (pool, _, threads) in contestants.items():
        ratio = statistics.median(t / s for t, s in zip(seconds[name], seconds["one process"]))
        milliseconds = 1e3 * statistics.median(seconds[name])
        print(
            f"{name:12} {pool.world_size} × {threads} threads  {milliseconds:7.1f} ms a step  "
            f"{ratio:.3f} × one process"
        )
        pool.stop()
    print(
        f"losses equal within {TOLERANCE}; last {losses['ours TP'][-1]:.5f}, ln V = "
        f"{math.log(CONFIG.vocab_size):.5f}"
    )
    print(json.dumps({name: [round(t, 5) for t in times] for name, times in seconds.items()}))


if __name__ == "__main__":
    main()
