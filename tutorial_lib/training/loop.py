"""The training loop of every tutorial: accumulate, reduce, clip, step. The models differ, the loop
does not.

A loss is the mean over what is predicted in the *global* batch, however that is divided into
micro-batches and data-parallel ranks: each micro-batch contributes its sum, divided by the count of
the whole. A mean of means would weigh a token of a short micro-batch more than one of a long one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tutorial_lib.backends import mark_step
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.random import separate_replicas

WINDOW = 10  # steps that the throughput is averaged over


@dataclass
class Step:
    """What one optimizer step did, the same on every rank."""

    step: int  # counted from 1
    epoch: int
    loss: float  # of the global batch, before the step
    learning_rate: float
    grad_norm: float | None  # before clipping
    throughput: float  # sequences per second over all data-parallel ranks, moving average
    sequences: int  # in it, over all data-parallel ranks
    seconds: float  # from reading its batches to its last value
    samples: int  # given to it and all steps before, on all ranks; 0 without a sampler
    skipped: int  # steps left out so far, as their gradients were not finite


def accumulate_gradients(model: nn.Module, micro_batches: list[dict]) -> torch.Tensor:
    """Forward and backward of every micro-batch; gradients are left as this rank's share, to be
    averaged over data-parallel ranks.

    Args:
        model: takes a micro-batch and `num_items_in_batch` as keywords, returns an output with
            `.loss`, and counts what it predicts with `count_targets`.
        micro_batches: on the model's device; as many on every rank.

    Returns:
        The loss of the global batch, a 0-d tensor, the same on every rank.
    """
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch")
    dp_group = parallel_state.get_data_parallel_group()
    dp_size = parallel_state.get_data_parallel_size()
    targets = sum(model.count_targets(batch) for batch in micro_batches)
    totals = comm.all_reduce("sum", targets, dp_group)
    loss = 0.0
    for batch in micro_batches:
        share = model(**batch, num_items_in_batch=totals).loss
        (share * dp_size).backward()  # the reduction divides by the data-parallel size
        loss = loss + share.detach()
        mark_step()
    return comm.all_reduce("sum", loss, dp_group)


def train(
    model: nn.Module,
    optimizer,
    batches: Iterable[dict],
    *,
    steps: int,
    gradient_accumulation_steps: int = 1,
    scheduler: LRScheduler | None = None,
    sampler=None,
    start_step: int = 0,
    on_step: Callable[[Step], object] | None = None,
) -> list[Step]:
    """Trains up to optimizer step number `steps`.

    A run that begins here (`start_step` 0) gives each data-parallel replica a random stream of its
    own; one that goes on has them already, from what it was before or from its checkpoint.

    Args:
        model: see `accumulate_gradients`.
        optimizer: of `initialize_parallel_optimizer`; its `step` reduces and clips.
        batches: an endless stream of micro-batches on the model's device.
        steps: number of the last step; a run that resumes does `steps - start_step`.
        gradient_accumulation_steps: micro-batches in a step, on each rank.
        scheduler: moved once a step.
        sampler: a `ResumableBatchSampler`, told what each step consumed.
        start_step: steps that are done already.
        on_step: called after each step, on every rank; a true result, on every rank or none, ends
            training.

    Returns:
        One record for each step done.

    Raises:
        ValueError: numbers of steps that do not fit, or batches that end before the last step.
    """
    if gradient_accumulation_steps < 1 or not 0 <= start_step <= steps:
        raise ValueError(
            f"need at least 1 micro-batch a step and 0 ≤ start_step ≤ steps, got "
            f"{gradient_accumulation_steps} micro-batches, start_step {start_step}, steps {steps}"
        )
    model.train()
    if start_step == 0:
        separate_replicas()
    stream = iter(batches)
    recent = deque(maxlen=WINDOW)
    done = []
    for number in range(start_step + 1, steps + 1):
        began = time.perf_counter()
        epoch = 0 if sampler is None else sampler.epoch
        micro_batches = list(islice(stream, gradient_accumulation_steps))
        if len(micro_batches) < gradient_accumulation_steps:
            raise ValueError(
                f"the batches ended in step {number} of {steps}, after {len(micro_batches)} of its "
                f"{gradient_accumulation_steps}: they have to be an endless stream"
            )
        sequences = next(iter(micro_batches[0].values())).size(0)
        sequences *= gradient_accumulation_steps * parallel_state.get_data_parallel_size()
        learning_rate = float(optimizer.param_groups[0]["lr"])
        loss = accumulate_gradients(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        if sampler is not None:
            sampler.advance(gradient_accumulation_steps)
        mark_step()
        grad_norm, value = getattr(optimizer, "grad_norm", None), float(loss)
        recent.append(time.perf_counter() - began)
        step = Step(
            number,
            epoch,
            value,
            learning_rate,
            grad_norm=None if grad_norm is None else float(grad_norm),
            throughput=sequences * len(recent) / sum(recent),
            sequences=sequences,
            seconds=recent[-1],
            samples=0 if sampler is None else sampler.consumed_samples,
            skipped=int(getattr(optimizer, "skipped_steps", 0)),
        )
        done.append(step)
        if on_step is not None and on_step(step):
            break
    return done
