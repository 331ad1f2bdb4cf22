"""A run that stops, is loaded in new processes and goes on equals one that never stopped: losses
and weights, bit for bit.

It stops in the middle of an epoch, accumulates gradients, drops out, and has a schedule.
"""

from itertools import product

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from tests.pool import RankPool
from tests.standin import same, state
from tests.tiny_models import TINY, Samples
from tutorial_lib.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from tutorial_lib.data.sampler import ResumableBatchSampler, data_loader
from tutorial_lib.models.full_weights import full_tensors
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams, get_param_groups_by_weight_decay
from tutorial_lib.parallel_layers import move_model_to_device, parallel_state
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.training.loop import train
from tutorial_lib.xla_model import xla_device

SAVED_AT, STEPS = 3, 8
SAMPLES, GLOBAL_BATCH = 20, 8  # so an epoch ends within a step


class Run:
    """A run of this rank: everything that a checkpoint has to bring back."""

    def __init__(
        self, kind, zero, seed, dtype, sequence_parallel=False, dropout=0.1, micro_batch=2
    ):
        tiny = TINY[kind]
        sequence_parallel = sequence_parallel and tiny.sequence_parallel
        nxd_config = neuronx_distributed_config(
            tensor_parallel_size=parallel_state.get_tensor_model_parallel_size(),
            optimizer_config={"zero_one_enabled": zero},
            sequence_parallel=sequence_parallel,
        )
        model_parallel_xla_manual_seed(seed)
        config = tiny.config(**dict.fromkeys(tiny.dropout, dropout))
        self.model = move_model_to_device(
            tiny.build(config, sequence_parallel).to(dtype), xla_device()
        )
        groups = get_param_groups_by_weight_decay(self.model, 0.01)
        self.optimizer = initialize_parallel_optimizer(
            nxd_config, AdamW_FP32OptimParams, groups, lr=1e-2
        )
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 2, STEPS + 2)
        self.sampler = ResumableBatchSampler(Samples(kind, SAMPLES), micro_batch)
        self.all = self.model, self.optimizer, self.schedule

    def train(self, start, on_step=None):
        batches = data_loader(self.sampler.dataset, self.sampler)
        moved = (
            {name: tensor.to(xla_device()) for name, tensor in batch.items()} for batch in batches
        )
        done = train(
            self.model, self.optimizer, moved, steps=STEPS, start_step=start,
            scheduler=self.schedule, sampler=self.sampler, on_step=on_step,
            gradient_accumulation_steps=GLOBAL_BATCH // self.sampler.global_batch_size,
        )  # fmt: skip
        return [
            (step.loss, step.grad_norm, step.learning_rate) for step in done[-(STEPS - SAVED_AT) :]
        ]

    def result(self, records, full):
        weights = full_tensors(self.model) if full else state(self.model)
        return records, {name: tensor.cpu() for name, tensor in weights.items()}


def never_stopped(folder, kind, zero, use_xser=False, async_save=False, full=False, **options):
    run = Run(kind, zero, 5, **options)

    def on_step(step):
        if step.step == SAVED_AT:
            assert run.sampler.epoch > 0 and run.sampler.offset > 0, "not in the middle of an epoch"
            content = {"global_step": step.step, "data": run.sampler.state_dict()}
            saves = dict(use_xser=use_xser, async_save=async_save)
            save_checkpoint(folder, f"step_{step.step}", *run.all, content, **saves)

    records = run.train(0, on_step)
    finalize_checkpoint()
    return run.result(records, full)


def gone_on(folder, kind, zero, full=False, **options):
    run = Run(kind, zero, 99, **options)  # with other weights until they are loaded
    content = load_checkpoint(folder, None, *run.all)
    run.sampler.load_state_dict(content["data"])
    return run.result(run.train(content["global_step"]), full)


# Every pair of two switches' values, and of a model and a value, occurs.
COVERING = [
    ("bert", True, True, True), ("bert", False, False, False), ("gpt_neox", True, False, True),
    ("gpt_neox", False, True, False), ("llama", True, True, False), ("llama", False, False, True),
    ("gpt2", True, False, False), ("gpt2", False, True, True),
]  # fmt: skip
SLOW = [(*case, case[1] and TINY[case[0]].sequence_parallel, "cpu") for case in COVERING]
SLOW.append((*COVERING[0], False, "xla"))


def cases():
    """By model: ZeRO-1, xser, asynchronous, sequence parallel, backend."""
    switches = [(False, True)] * 4
    for case in product(TINY, *switches, ("cpu", "xla")):
        if TINY[case[0]].sequence_parallel or not case[4]:
            yield pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.grid)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind, zero, use_xser, async_save, sequence_parallel, backend", list(cases())
)
def test_resume_equals_never_having_stopped(
    ranks, tmp_path, kind, zero, use_xser, async_save, sequence_parallel, backend
):
    # With ZeRO-1 a bfloat16 model, whose masters matter; without, torch's own precision.
    options = dict(
        dtype=torch.bfloat16 if zero else torch.float32, sequence_parallel=sequence_parallel
    )
    arguments, where = (str(tmp_path), kind, zero), dict(tp=2, timeout=400)
    saves = dict(use_xser=use_xser, async_save=async_save)
    before = ranks(
        never_stopped, *arguments, **saves, **options, **where, world_size=4, backend=backend
    )
    pool = RankPool(4, backend)  # new processes
    try:
        after = pool.run(gone_on, *arguments, **where, **options)
    finally:
        pool.stop()
    for (records, weights), (again, resumed) in zip(before, after):
        assert len({loss for loss, *_ in records}) == len(records) == STEPS - SAVED_AT
        assert again == records and same(weights, resumed)


# At every other mesh; in the quick part one for each model and both optimizers.
RESHARDED = [("bert", True, 2, 1), ("gpt_neox", False, 4, 4), ("gpt_neox", True, 2, 2)]
RESHARDED += [("llama", True, 4, 4), ("gpt2", True, 4, 4)]
EVERY_MESH = [
    pytest.param(*case, marks=[pytest.mark.grid] * (case not in RESHARDED))
    for case in product(TINY, (False, True), (1, 2, 4), (1, 2, 4))
    if case[3] <= case[2] and case[2:] != (4, 2)  # which is where it was saved
]


@pytest.mark.parametrize("kind, zero, world_size, tp", EVERY_MESH)
def test_resume_at_another_mesh(ranks, tmp_path, kind, zero, world_size, tp):
    # At another mesh other random numbers would be drawn.
    options = dict(full=True, dtype=torch.float64, dropout=0.0)
    arguments = (str(tmp_path), kind, zero)
    (records, weights), *_ = ranks(never_stopped, *arguments, world_size=4, tp=2, **options)
    options["micro_batch"] = min(2, GLOBAL_BATCH * tp // world_size // 2)  # an epoch ends evenly
    for again, resumed in ranks(gone_on, *arguments, world_size=world_size, tp=tp, **options):
        assert torch.tensor(again).sub(torch.tensor(records)).abs().max() <= 1e-7
        for name, tensor in weights.items():
            torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-7)
