"""Notebook 08: its eight faults. Spoilers below.

The notebook defines `Training`, whose methods are the parts of a training. A fault replaces one of
them, and so does a repair.
"""

from typing import Any

import torch
from torch.nn import functional

from tutorial_lib.parallel_layers import clip_grad_norm, mappings, parallel_state
from tutorial_lib.parallel_layers.grads import bucket_allreduce_gradients

reduce_from_region = mappings.reduce_from_tensor_model_parallel_region


def with_parts(training: type, **parts: Any) -> type:
    """This kind of training with some of its parts replaced."""
    return type("Training", (training,), parts)


def dealt_in_turn(self, ids):
    replicas = parallel_state.get_data_parallel_size()
    return ids.split(self.batch_size)[parallel_state.get_data_parallel_rank() :: replicas]


def bias_on_every_rank(self, x, weight, bias):
    return reduce_from_region(functional.linear(x, weight, bias))


def dealt_by_rank(self, ids):
    world = parallel_state.get_world_group()
    whole = len(ids) // (world.size() * self.batch_size)
    ids = ids[: whole * world.size() * self.batch_size]
    return ids.view(whole, world.size(), self.batch_size, ids.size(1))[:, world.rank()]


def averaged_over_the_world(self):
    world = parallel_state.get_world_group(as_list=True)
    bucket_allreduce_gradients([p.grad for p in self.model.parameters()], groups=world)


def clipped_first(self):
    clip_grad_norm(self.model.parameters(), self.max_norm)
    self.sum_shares()
    self.average()
    self.optimizer.step()


def not_summed(self):
    pass


def one_mask(self, hidden):
    return functional.dropout(hidden, self.dropout)


def moved_as_on_xla(self, model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model._apply(lambda tensor: tensor.to(self.device, copy=True))  # what `model.to` calls
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    return model


FAULTS = {
    1: dict(batches=dealt_in_turn),
    2: dict(row_linear=bias_on_every_rank),
    3: dict(batches=dealt_by_rank),
    4: dict(average=averaged_over_the_world),
    5: dict(update=clipped_first),
    6: dict(sum_shares=not_summed),
    7: dict(drop=one_mask, dropout=0.5),
    8: dict(move=moved_as_on_xla),
}


def hunts(training: type) -> dict[str, type]:
    """`Hunt1` to `Hunt8`: the training with one fault each."""
    return {f"Hunt{number}": with_parts(training, **parts) for number, parts in FAULTS.items()}
