"""Ranks are killed while they save: no completed checkpoint is lost, and none that is broken is
ever loaded.
"""

import os
import random
import signal
import threading
import warnings

import pytest
import torch

from tests.standin import Standin
from tutorial_lib.checkpoint import (
    finalize_checkpoint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tags,
)
from tutorial_lib.checkpoint.verify import verify
from tutorial_lib.parallel_layers import parallel_state

VOCABULARY = 20_000  # makes a shard of 160 kB


def save_until_killed(
    folder: str, log: str, victim: int, delay: float, async_save: bool, use_xser: bool
) -> None:
    """Goes on from the latest checkpoint and saves again and again; the weights of step n are all
    n.
    """
    rank = torch.distributed.get_rank()
    model = Standin(vocabulary=VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    model.train_step(optimizer, 0)
    step = 0
    if has_checkpoint(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an interrupted save has left something
            step = load_checkpoint(folder, None, model, optimizer)["global_step"]
        assert all((p == step).all() for p in model.parameters()), f"step {step} is broken"
    first = step + 1
    while True:
        step += 1
        if step == first + 1 and rank == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        save_checkpoint(
            folder, f"step_{step}", model, optimizer, user_content={"global_step": step},
            num_workers=1, use_xser=use_xser, num_kept_ckpts=2, async_save=async_save,
        )  # fmt: skip
        if async_save:
            finalize_checkpoint()
        if parallel_state.is_global_rank_zero():  # complete, as far as the run knows
            with open(log, "a") as file:
                file.write(f"{step}\n")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", [2, pytest.param(50, marks=pytest.mark.grid)])
@pytest.mark.parametrize("async_save", [False, True])
def test_killed_while_saving(ranks, tmp_path, async_save, number):
    """A random rank each time; what is left is looked at. The next run has new processes."""
    folder, log = tmp_path / "run", tmp_path / "log"
    chance, interrupted = random.Random(1), 0
    log.touch()
    for _ in range(number):
        delay, use_xser = chance.uniform(0, 0.6), chance.random() < 0.5
        arguments = str(folder), str(log), chance.randrange(4), delay, async_save, use_xser
        where = dict(world_size=4, tp=2, timeout=120)
        ranks(save_until_killed, *arguments, **where, return_exceptions=True)
        completed = [int(line) for line in log.read_text().split()]
        found = tags.complete(folder)
        interrupted += bool(tags.incomplete(folder))
        assert not completed or found[-1].step >= completed[-1], f"{completed[-1]} is lost: {found}"
        for item in found:
            assert verify(item.path) == []
    assert completed, "nothing was ever saved"
    assert interrupted >= number // 5, "too few kills came in the middle of a save"
