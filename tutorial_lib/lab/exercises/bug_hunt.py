"""Notebook 08: what its checks say to a repair. Spoilers below, and in `faults`."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tutorial_lib.parallel_layers import clip_grad_norm, comm, parallel_state
from tutorial_lib.parallel_layers.consistency import find_drift

from .faults import FAULTS, bias_on_every_rank, moved_as_on_xla, reduce_from_region, with_parts
from .judge import Exercise

# Seeds, and the norm to clip at: once the gradients are clipped, once they are not.
CASES = ((1, 0.5), (2, math.inf))


def _train(kind: type, namespace: Mapping, seed: int, max_norm: float) -> dict:
    """What the notebook's instruments read."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # .to unties, as on XLA
    try:
        training = kind(seed, max_norm)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    losses = training.run(namespace["ids"])
    return {
        "the loss of step 1": losses[0],
        "what find_drift names": find_drift(training.model),
        "a weight after step 1": training.first,
        "a later loss": losses,
    }


def _trains(namespace: Mapping, number: int, wrong: Mapping[str, Any], part: str) -> Exercise:
    """A repair has to train as `Training` does. `wrong` has usual repairs of a part by reason."""
    training = namespace["Training"]
    kinds = {"the fault is still there": with_parts(training, **FAULTS[number])}
    kinds |= {reason: with_parts(training, **{part: how}) for reason, how in wrong.items()}
    return Exercise(
        right=training,
        wrong=kinds,
        inputs=CASES,
        use=lambda kind, seed, max_norm: _train(kind, namespace, seed, max_norm),
        tolerance=1e-5,
    )


def _deals(namespace: Mapping) -> Exercise:
    """A repair has to share the sequences out; which one goes where is its own business."""
    training = namespace["Training"]
    whole = training.batch_size * parallel_state.get_data_parallel_size()

    def use(kind: type, sequences: int) -> dict:
        ids = torch.arange(2 * sequences).view(sequences, 2)
        mine = [[row[0].item() // 2 for row in batch] for batch in kind(1).batches(ids)]
        place, world = parallel_state.get_data_parallel_rank(), parallel_state.get_world_group()
        everywhere = parallel_state.gather_python_object((place, mine), world)
        replicas = dict(everywhere)
        every = [batch for batches in replicas.values() for batch in batches]
        dealt = [row for batch in every for row in batch]
        return {
            "other batches on ranks that share a model": any(
                replicas[place] != batches for place, batches in everywhere
            ),
            "a batch that is not full": any(len(b) != training.batch_size for b in every),
            "more batches on one replica than on another": (
                len({len(batches) for batches in replicas.values()}) > 1
            ),
            "a sequence that is in two batches": len(set(dealt)) < len(dealt),
            "too few batches": len(mine) < sequences // whole,
        }

    sizes = (2 * whole, 2 * whole + training.batch_size, 3 * whole - 1, whole)
    return Exercise(right=training, inputs=[(size,) for size in sizes], use=use)


hunt_1 = hunt_3 = _deals


def hunt_2(namespace: Mapping) -> Exercise:
    """`Repaired2`: `row_linear`."""
    size, rank = _tp().size(), _tp().rank()

    def bias_over(divisor):
        return lambda self, x, weight, bias: reduce_from_region(
            functional.linear(x, weight, bias / divisor)
        )

    def on_rank_0(self, x, weight, bias):
        return reduce_from_region(functional.linear(x, weight, bias if rank == 0 else 0 * bias))

    wrong = {
        "the bias is gone altogether": bias_over(math.inf),
        "the output is right, but the bias gets a T-th of its gradient": bias_over(size),
        "the output is right, but the bias gets its gradient on one rank alone": on_rank_0,
        "the output is the sum, not the mean: only the bias counted too often": (
            lambda self, *x_weight_bias: bias_on_every_rank(self, *x_weight_bias) / size
        ),
        "the ranks' products were not added up": (
            lambda self, *x_weight_bias: functional.linear(*x_weight_bias)
        ),
    }
    return _trains(namespace, 2, wrong, "row_linear")


def _tp():
    return parallel_state.get_tensor_model_parallel_group()


def _summed(group, divisor: int = 1, among=lambda name, parameter: True):
    """A part that sums gradients over a group."""

    def reduce(self):
        for name, parameter in self.model.named_parameters():
            if among(name, parameter):
                parameter.grad = comm.all_reduce("sum", parameter.grad, group) / divisor

    return reduce


def hunt_4(namespace: Mapping) -> Exercise:
    """`Repaired4`: `average`."""
    dp, size = parallel_state.get_data_parallel_group(), _tp().size()
    wrong = {
        "the replicas' gradients are added up; the loss is a mean": _summed(dp),
        "ranks that share a model hold different weights: average over the others": (
            _summed(_tp(), size)
        ),
        "the group is right, but the sum is divided by the number of all ranks": (
            _summed(dp, size * dp.size())
        ),
        "nothing is averaged: every replica goes its own way": lambda self: None,
    }
    return _trains(namespace, 4, wrong, "average")


def hunt_5(namespace: Mapping) -> Exercise:
    """`Repaired5`: `update`."""

    def order(*names):
        def update(self):
            weights = list(self.model.parameters())
            steps = {
                "clip": lambda: clip_grad_norm(weights, self.max_norm),
                "PyTorch's": lambda: nn.utils.clip_grad_norm_(weights, self.max_norm),
                "sum": self.sum_shares,
                "average": self.average,
            }
            for name in names:
                steps[name]()
            self.optimizer.step()

        return update

    wrong = {
        "nothing is clipped before the step": order("sum", "average"),
        "the norms' shares are no longer summed": order("average", "clip"),
        "the norms' shares are summed after the clipping": order("average", "clip", "sum"),
        "the replicas are no longer averaged": order("sum", "clip"),
        "PyTorch's own norm is of one rank's shards": order("sum", "average", "PyTorch's"),
    }
    return _trains(namespace, 5, wrong, "update")


def hunt_6(namespace: Mapping) -> Exercise:
    """`Repaired6`: `sum_shares`."""

    def marked(name, parameter):
        return getattr(parameter, "sequence_parallel_enabled", False)

    world, dp = parallel_state.get_world_group(), parallel_state.get_data_parallel_group()
    wrong = {
        "the shares add up to the gradient: their mean is too small": (
            _summed(_tp(), _tp().size(), marked)
        ),
        "only parameters that saw a shard of the sequence need the sum": _summed(_tp()),
        "the norm's weight is summed, its bias is not": _summed(
            _tp(), among=lambda name, parameter: name == "norm.weight"
        ),
        "these are replicas; the shares are on the ranks that share a model": (
            _summed(dp, among=marked)
        ),
        "replicas are averaged later: summing over all ranks counts them twice": (
            _summed(world, among=marked)
        ),
    }
    return _trains(namespace, 6, wrong, "sum_shares")


def hunt_7(namespace: Mapping) -> Exercise:
    """`Repaired7`: `drop`."""

    device = namespace["device"]

    def use(kind: type) -> dict:
        training = kind(1)
        training.run(namespace["ids"])
        ones = torch.ones(64, 64, device=device)
        first, second = training.drop(ones).cpu(), training.drop(ones).cpu()
        zeros, kept = first == 0, first[first != 0] * (1 - training.dropout)
        share = zeros.double().mean().item()
        drawn = zeros, torch.rand(8, device=device).cpu()
        group = parallel_state.get_tensor_model_parallel_group()
        masks, shared = zip(*parallel_state.gather_python_object(drawn, group))
        return {
            "another share of units dropped": abs(share - training.dropout) > 0.1,
            "what is kept, not divided by 1 - dropout": bool((kept - 1).abs().max() > 1e-4),
            "the same mask at every call": torch.equal(first, second),
            "the same mask on ranks that hold other units": any(
                (mask == masks[0]).double().mean() > 0.7 for mask in masks[1:]
            ),
            "other random numbers in the stream that ranks share": any(
                not torch.equal(one, shared[0]) for one in shared
            ),
        }

    right = with_parts(namespace["Training"], dropout=FAULTS[7]["dropout"])
    return Exercise(right=right, inputs=[()], use=use)


def hunt_8(namespace: Mapping) -> Exercise:
    """`Repaired8`: `move`."""

    def moved(then):
        def move(self, model):
            then(moved_as_on_xla(self, model))
            return model

        return move

    def share_memory(model):
        model.head.weight.data = model.embedding.weight.data

    wrong = {
        "head and embedding share memory, but are two parameters": moved(share_memory),
        "the head has to be trained too": moved(
            lambda model: model.head.weight.requires_grad_(False)
        ),
    }
    return _trains(namespace, 8, wrong, "move")
