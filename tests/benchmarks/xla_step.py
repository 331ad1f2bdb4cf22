"""A training step of BERT (`tiny`) at TP 2 × DP 2 with two micro-batches: on gloo (`cpu`), and
traced by XLA.

    python -m tests.benchmarks.xla_step

The two take turns within one run, so that whatever else the machine does hits both; medians count.
What XLA takes before its third step, compilation above all, is reported by itself.
"""

import os
import statistics
import tempfile
import time

import torch

from tests.benchmarks.command import parser
from tests.pool import RankPool
from tutorial_lib import backends

WORLD, TP, BATCH, SEQUENCE, ACCUMULATION = 4, 2, 4, 128, 2
TOLERANCE = 1e-5  # relative, between the losses in float32
# In a rank's process: a function of a number of steps that trains them and returns the losses.
_steps = None


def prepare(backend: str) -> None:
    """Builds model and optimizer on this rank."""
    global _steps
    from tutorial_lib.models import bert
    from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
    from tutorial_lib.parallel_layers import move_model_to_device, parallel_state
    from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
    from tutorial_lib.training.loop import train

    config = bert.make_config("tiny", TP, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    device = backends.get_device(backend)
    torch.manual_seed(0)
    model = move_model_to_device(bert.BertForPreTraining(config), device)
    nxd_config = neuronx_distributed_config(tensor_parallel_size=TP)
    optimizer = initialize_parallel_optimizer(
        nxd_config, AdamW_FP32OptimParams, model.parameters(), lr=1e-3
    )
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())

    def batches():
        while True:
            ids = torch.randint(5, config.vocab_size, (BATCH, SEQUENCE), generator=generator)
            labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.15, -100)
            pieces = [ids, torch.zeros_like(ids), torch.ones_like(ids), labels, ids[:, 0] % 2]
            yield {name: tensor.to(device) for name, tensor in bert.model_inputs(pieces).items()}

    stream = batches()

    def steps(count: int) -> list[float]:
        done = train(
            model, optimizer, stream, steps=count, gradient_accumulation_steps=ACCUMULATION
        )
        return [step.loss for step in done]

    _steps = steps


def train(count: int) -> tuple[float, list[float], int]:
    """Seconds for `count` steps, their losses, and the graphs that this rank has compiled so
    far.
    """
    begun = time.perf_counter()
    losses = _steps(count)
    return time.perf_counter() - begun, losses, backends.compilations()


def main() -> None:
    options = parser(__doc__, rounds=7, steps=3).parse_args()  # steps of each in a round
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TUTORIAL_XLA_CACHE"] = cache  # an empty one
        pools = {backend: RankPool(WORLD, backend) for backend in ("cpu", "xla")}
        seconds: dict[str, list[float]] = {backend: [] for backend in pools}
        for backend, pool in pools.items():
            pool.run(prepare, backend, tp=TP, timeout=120)
        for number in range(-1, options.rounds):
            losses = {}
            for backend, pool in pools.items():
                results = pool.run(train, 2 if number < 0 else options.steps, tp=TP, timeout=600)
                losses[backend], took = results[0][1], max(result[0] for result in results)
                if number >= 0:
                    seconds[backend].append(took / options.steps)
                elif backend == "xla":
                    compiled = sum(result[2] for result in results)
                    print(
                        f"xla: {took:.1f} s for the first two steps, {compiled} compilations on "
                        f"all ranks together"
                    )
            gap = max(abs(a - b) / b for a, b in zip(losses["xla"], losses["cpu"], strict=True))
            if not gap <= TOLERANCE:
                raise SystemExit(f"the losses differ by {gap:.2e} relative in round {number}")
        for pool in pools.values():
            pool.stop()
    ratio = statistics.median(x / c for x, c in zip(seconds["xla"], seconds["cpu"]))
    for backend, times in seconds.items():
        print(f"{backend}: {1e3 * statistics.median(times):7.1f} ms a step")
    print(
        f"xla / cpu {ratio:.2f}; {os.cpu_count()} cores, {WORLD} ranks; losses equal within "
        f"{TOLERANCE} relative"
    )


if __name__ == "__main__":
    main()
