"""A model that costs nothing: one parameter of each kind of cut, trained elementwise, so that every
degree gives the same.
"""

import torch
from torch import nn

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
    return {
        name: (
            torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) / 64 + i
        ).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


class Standin(nn.Module):
    """`embed` (cut by rows, padded where they do not divide) tied to `head`, `gate_up` (two fused
    matrices), `down` (cut by columns), `qkv` (4 query rows, 2 key and 2 value rows that ranks share
    if they are more), `norm` and `scale` (replicated).
    """

    def __init__(self, dtype=torch.float32, vocabulary: int = V):
        super().__init__()
        self.tp, self.rank = (
            parallel_state.get_tensor_model_parallel_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
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
        embed = self.embed[
            : partition_of(self.embed).real_size(self.rank)
        ]  # padding takes no part in a model's loss
        parameters = [embed, *(p for p in self.parameters() if p is not self.embed)]
        return sum(((p * (step % 3 + 1) - 0.5) ** 2).sum() for p in parameters)

    def train_step(self, optimizer, step: int) -> float:
        optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        optimizer.step()
        return loss.item()


def run(model, optimizer, first: int, last: int) -> tuple[dict, dict]:
    """Takes the steps from `first` to before `last`; weights and masters then."""
    for step in range(first, last):
        model.train_step(optimizer, step)
    masters = optimizer.state_dict().get("sharded_master_weights", {})
    return state(model), {str(number): shard.clone() for number, shard in masters.items()}


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
