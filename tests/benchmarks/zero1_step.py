"""Times a ZeRO-1 step against PyTorch's ZeroRedundancyOptimizer around the same AdamW, on two
data-parallel ranks.

    python -m tests.benchmarks.zero1_step [--hidden 512] [--layers 4] [--steps 30]

In one run, interleaved, medians over the steps of the slower rank. PyTorch's optimizer expects
averaged gradients, which DistributedDataParallel gives it by all-reduces; ours reduces them itself.
So the rows to compare are "ours" and "torch, gradients averaged"; "torch, step alone" is what is
left if that average cost nothing. Prints JSON.
"""

import json
import statistics
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.benchmarks.command import parser
from tests.pool import RankPool
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import buckets
from tutorial_lib.parallel_layers.grads import bucket_allreduce_gradients, clip_grad_norm

DDP_BUCKET_MB = 25 * 2**20 / 1e6  # DistributedDataParallel's default


def transformer_parameters(hidden: int, layers: int) -> list[nn.Parameter]:
    """The shapes of a decoder: per layer two norms, fused qkv, output, and the two matrices of the
    MLP, with biases.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(8192, hidden)]
    for _ in range(layers):
        shapes += [(hidden,)] * 4 + [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden)]
        shapes += [(hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    parameters = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    return parameters


def measure(hidden: int, layers: int, steps: int) -> dict:
    """Seconds of each way, per step."""
    options = {"lr": 1e-3, "weight_decay": 0.01}
    ours, ours_clipped, theirs = (transformer_parameters(hidden, layers) for _ in range(3))
    zero = NeuronZero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, **options)
    zero_clipped = NeuronZero1Optimizer(ours_clipped, torch.optim.AdamW, **options)
    torch_zero = ZeroRedundancyOptimizer(
        theirs, torch.optim.AdamW, parameters_as_bucket_view=False, **options
    )

    def average():
        with mock.patch.object(buckets, "HOST_BUCKET_CAP_MB", DDP_BUCKET_MB):
            bucket_allreduce_gradients([p.grad for p in theirs])

    def clip():
        clip_grad_norm(theirs, 1.0)

    ways = {
        "ours": [zero.step],
        "torch, gradients averaged": [average, torch_zero.step],
        "torch, step alone": [torch_zero.step],
        "ours, clipped": [zero_clipped.step],
        "torch, gradients averaged and clipped": [average, clip, torch_zero.step],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for step in range(steps + 2):
        # Each is the first one equally often.
        shift = step % len(names)
        for name in names[shift:] + names[:shift]:
            calls = ways[name]
            dist.barrier()
            begin = time.perf_counter()
            for call in calls:
                call()
            if step >= 2:  # the first ones make the state
                seconds[name].append(time.perf_counter() - begin)
    return {"parameters": sum(p.numel() for p in ours), "seconds": seconds}


def main() -> None:
    arguments = parser(__doc__, hidden=512, layers=4, steps=30).parse_args()
    pool = RankPool(2)
    first, second = pool.run(measure, **vars(arguments), timeout=1200)
    pool.stop()
    medians = {
        name: statistics.median(map(max, zip(first["seconds"][name], second["seconds"][name])))
        for name in first["seconds"]
    }
    ours, theirs = medians["ours"], medians["torch, gradients averaged"]
    clipped = medians["ours, clipped"] / medians["torch, gradients averaged and clipped"]
    report = {
        "parameters": first["parameters"],
        "steps": arguments.steps,
        "median_ms": {name: round(1e3 * value, 2) for name, value in medians.items()},
        "ours_over_torch": round(ours / theirs, 3),
        "ours_over_torch_step_alone": round(ours / medians["torch, step alone"], 3),
        "clipped_ours_over_torch": round(clipped, 3),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
