"""Notebook 09: the plans and the pipeline of its cells give the gradients of one process, in
float64.
"""

import copy

import nbformat
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F

from notebooks import run
from tests.parity import hugging_face_loss, micro_batch, precise
from tests.tiny_models import TINY

# Words of the cells that define what is tested, in their order.
CELLS = (
    *("init_device_mesh(", "def noted(", "def tie(", 'plans["Llama"]', "def shard_fully("),
    *("def their_loss(", "def whole_gradients(", "class Half(", "def pipeline("),
)
KINDS = {"bert": "BERT", "llama": "Llama"}


def cells() -> list[str]:
    found = nbformat.read(run.select(["09"])[0], 4).cells
    sources = [cell.source for cell in found if cell.cell_type == "code"]
    return [next(s for s in sources if words in s).removeprefix("%%px\n") for words in CELLS]


def next_token_loss(model, batch, counts):
    """The notebook's, but for Hugging Face's cast of the logits to float32."""
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    logits = model(batch["input_ids"], use_cache=False).logits.flatten(0, 1)
    return F.cross_entropy(logits, targets, reduction="sum").to_local() / counts


def defined(sources: list[str], kind: str):
    """What the cells define on this rank, Hugging Face's model in one process, and a batch."""
    name = KINDS[kind]
    config = TINY[kind].config(vocab_size=96, **dict.fromkeys(TINY[kind].dropout, 0.0))
    space = dict(torch=torch, dist=dist, transformers=transformers, device=torch.device("cpu"))
    space |= dict(tp_size=2, seed=1, configs={name: config}, rank=dist.get_rank())
    for source in sources:
        exec(source, space)
    torch.manual_seed(space["seed"])
    alone = precise(space["hugging_face_reference"](space["CLASSES"][name], config))
    # Of two shapes, see the notebook's remark.
    batches = [micro_batch(kind, "whole", index) for index in range(2 if kind == "bert" else 4)]
    return space, alone, {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def farthest(found: dict, alone) -> float:
    right = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return max((gradient - right[name]).abs().max().item() for name, gradient in found.items())


def by_plan(sources: list[str], kind: str) -> tuple[float, float]:
    """How far loss and gradients are from those of one process."""
    torch.set_default_dtype(torch.float64)  # until the next task of the pool
    space, alone, whole = defined(sources, kind)
    model = precise(space["theirs"](KINDS[kind]))
    assert kind == "llama" or space["tie"](model)
    space["shard_fully"](model)
    mine, counts = space["share"](whole)
    with space["loss_parallel"]():
        loss = (next_token_loss if kind == "llama" else space["their_loss"])(model, mine, counts)
        (loss * space["dp"]).backward()
    total = space["comm"].all_reduce("sum", loss, space["over_dp"])
    expected = hugging_face_loss(alone, whole)
    expected.backward()
    gradients = space["whole_gradients"](model)
    assert gradients.keys() == dict(alone.named_parameters()).keys()
    return (total - expected).abs().item(), farthest(gradients, alone)


def in_stages(sources: list[str]) -> tuple[float, float, int]:
    """The same by two stages, and how many gradients a stage has."""
    torch.set_default_dtype(torch.float64)  # until the next task of the pool
    space, alone, whole = defined(sources, "llama")
    ids = whole["input_ids"]
    space["next_token_loss"](alone(ids, use_cache=False).logits, ids).backward()
    right = space["next_token_loss"](alone(ids, use_cache=False).logits, ids).item()
    if space["rank"] > 1:
        return 0.0, 0.0, 0
    model = copy.deepcopy(alone)
    model.zero_grad()
    precise(model)
    half = space["Half"](model, space["rank"])
    schedule, _ = space["pipeline"](half, 4, space["next_token_loss"])
    loss = space["step"](schedule, ids)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return 0.0 if loss is None else abs(loss - right), farthest(found, alone), len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_give_loss_and_gradients_of_one_process(ranks, kind):
    for loss, gradients in ranks(by_plan, cells(), kind, world_size=4, tp=2):
        assert loss <= 1e-10 and gradients <= 1e-10


def test_a_pipeline_gives_loss_and_gradients_of_one_process(ranks):
    found = ranks(in_stages, cells(), world_size=4, tp=2)
    assert all(loss <= 1e-10 and gradients <= 1e-10 for loss, gradients, _ in found)
    assert [count for *_, count in found] == [10, 11, 0, 0]  # a layer has 9; the rest is apart
