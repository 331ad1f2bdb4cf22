"""A model that costs nothing: one parameter of each kind of cut, trained elementwise, so that every
degree gives the same.
"""

import json
import os
import random
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tutorial_lib.optimizer import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.marks import set_tensor_model_parallel_attributes
from tutorial_lib.parallel_layers.sharding import partition_of

H, F, V = 4, 8, 10


def full_weights(dtype=torch.float32, vocabulary: int = V) -> dict[str, torch.Tensor]:
    """The weights of the whole model, each number another one."""
    shapes = {
        "embed": (vocabulary, H), "norm": (H,), "gate_up": (2 * F, H),
        "down": (H, F), "qkv": (8, H), "scale": (1,),
    }  # fmt: skip
    counted = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        for name, shape in shapes.items()
    }
    return {name: (t / 64 + i).to(dtype) for i, (name, t) in enumerate(counted.items())}


class Standin(nn.Module):
    """`embed` (cut by rows, padded where they do not divide) tied to `head`, `gate_up` (two fused
    matrices), `down` (cut by columns), `qkv` (4 query rows, 2 key and 2 value rows that ranks share
    if they are more), `norm` and `scale` (replicated).
    """

    def __init__(self, dtype=torch.float32, vocabulary: int = V):
        super().__init__()
        self.tp = parallel_state.get_tensor_model_parallel_size()
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        full = full_weights(dtype, vocabulary)
        self.embed = self._cut(full["embed"], 0, pad=-vocabulary % self.tp)
        self.norm = nn.Parameter(full["norm"])
        self.gate_up = self._cut(full["gate_up"], 0, stride=2)
        self.down = self._cut(full["down"], 1)
        shared = max(self.tp // 2, 1)
        self.qkv = self._cut(
            full["qkv"], 0, partition_sizes=(4, 2, 2), partition_replicas=(1, shared, shared)
        )
        self.scale = nn.Parameter(full["scale"])
        self.head = self.embed
        self.register_buffer("positions", torch.arange(4))

    def _cut(self, full, dim, stride=1, pad=0, **marks):
        shape = list(full.shape)
        probe = nn.Parameter(torch.empty(0))
        set_tensor_model_parallel_attributes(probe, True, dim, stride, self.tp)
        sizes = marks.get("partition_sizes", (shape[dim] // stride,) * stride)
        probe.partition_sizes, probe.partition_replicas = sizes, marks.get("partition_replicas", ())
        probe.pad_size = pad
        part = nn.Parameter(partition_of(probe).shard(full, self.rank))
        part.__dict__.update(probe.__dict__)
        return part

    def loss(self, step: int) -> torch.Tensor:
        """Different at each step, so that a step that is lost or done twice shows."""
        # Padding takes no part in a model's loss.
        embed = self.embed[: partition_of(self.embed).real_size(self.rank)]
        parameters = [embed, *(p for p in self.parameters() if p is not self.embed)]
        return sum(((p * (step % 3 + 1) - 0.5) ** 2).sum() for p in parameters)

    def train_step(self, optimizer, step: int) -> float:
        optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        optimizer.step()
        return loss.item()


class Odd(Standin):
    """What is hard to shard: 7 rows, fewer rows than places, no rows at all, nothing to learn."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype)
        self.seven = nn.Parameter((torch.arange(21, dtype=dtype) / 8).reshape(7, 3))
        self.pair = nn.Parameter((torch.arange(10, dtype=dtype) / 8).reshape(2, 5, 1))
        self.frozen = nn.Parameter(torch.ones(3, 2, dtype=dtype), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5, dtype=dtype))


def build(kind: type = Standin, dtype=torch.float32, zero1: bool = False):
    """A model, its optimizer of two groups and a schedule."""
    model = kind(dtype)
    named = dict(model.named_parameters())
    few = [(name, named.pop(name)) for name in ("norm", "pair", "frozen") if name in named]
    groups = [{"params": few, "weight_decay": 0.0}, {"params": list(named.items())}]
    if zero1:
        optimizer = NeuronZero1Optimizer(groups, torch.optim.AdamW, lr=0.1, grad_clipping=False)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, schedule


def train(objects, first: int, last: int) -> tuple[dict, dict, tuple]:
    """Takes the steps from `first` to before `last`; weights and masters then, and random
    numbers.
    """
    model, optimizer, schedule = objects
    for step in range(first, last):
        model.train_step(optimizer, step)
        schedule.step()
    masters = optimizer.state_dict().get("sharded_master_weights", {})
    drawn = torch.rand(()).item(), np.random.rand(), random.random()
    return state(model), {str(place): shard.clone() for place, shard in masters.items()}, drawn


def zero(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


def attempt(function, *args, **kwargs):
    """`(type, message)` of what `function` raises. A rank that answers so is left in order for the
    next test.
    """
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def refused(ranks, error, words, function, *args, world_size: int = 2, tp=2) -> None:
    """That every rank raises `error` with these words, none of them left waiting for another."""
    where = dict(world_size=world_size, tp=tp, timeout=30)
    for kind, message in ranks(attempt, function, *args, **where):
        assert issubclass(kind or object, error), (kind, message)
        assert all(word in message for word in words), message


WITNESS = "/tmp/should-not-exist"


class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {WITNESS}",)


def alter(path) -> None:
    """Turns a bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@contextmanager
def largest_file(size: int):
    """No file may become larger: what a full disk is to a program, but for the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_nobody():
    """Nothing may be written where only the owner may, not by root either."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def mark_as_vendor(folder) -> None:
    """The two files by which another library says that a checkpoint is complete."""
    for name in ("checkpoint", "done"):
        (Path(folder) / name).write_text("1")


def edit(file, change) -> None:
    """Changes a JSON file."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))
