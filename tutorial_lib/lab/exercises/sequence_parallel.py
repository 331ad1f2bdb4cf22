"""Notebook 03: the largest logit of a sharded vocabulary, and ZeRO-1 with momentum."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tutorial_lib.parallel_layers import comm, parallel_state

from .judge import Exercise


def largest(namespace) -> Exercise:
    """`largest(logits)`."""
    size = parallel_state.get_tensor_model_parallel_size()
    place = parallel_state.get_tensor_model_parallel_rank()

    def own(logits, offset=True):
        value, index = logits.max(-1)
        return value, index + place * logits.size(-1) * offset

    def best(logits, offset=True):
        values, ids = (comm.all_gather(found[None]) for found in own(logits, offset))
        return ids.gather(0, values.argmax(0)[None])[0]

    def use(answer, logits):
        with comm.record() as log:
            ids = answer(logits)
        return {"ids": ids, "all logits are gathered": any(c.nbytes >= logits.nbytes for c in log)}

    generator = torch.Generator().manual_seed(7)
    trials = [torch.randn(tokens, size * 5, generator=generator) for tokens in (4, 1, 9)]
    trials.append(trials[0] - 100)  # all of them negative
    return Exercise(
        right=best,
        wrong={
            "places count from this rank's first token, ids from the first rank's": lambda x: best(
                x, offset=False
            ),
            "each rank answers for its own shard: compare the shards' largest": lambda x: own(x)[1],
            "each rank answers with a place in its own shard": lambda x: x.argmax(-1),
            "that is the largest id, not the id of the largest logit": lambda x: comm.all_reduce(
                "max", own(x)[1]
            ),
            "that is the sum of all ranks' ids": lambda x: comm.all_reduce("sum", own(x)[1]),
            "that is the rank which has it, not its id": lambda x: comm.all_gather(
                own(x)[0][None]
            ).argmax(0),
            "the ids are right, but you gathered all logits; two numbers a token will do": (
                lambda x: comm.all_gather(x, dim=-1).argmax(-1)
            ),
        },
        inputs=[
            (logits.to(namespace["device"]).chunk(size, dim=-1)[place].contiguous(),)
            for logits in trials
        ],
        use=use,
    )


def momentum_step(namespace) -> Exercise:
    """`momentum_step(weight, grad, velocity, lr, group, dp, d)`."""

    def step(weight, grad, velocity, lr, group, dp, d, decay=0.9, scale=None, reduce=True):
        n = weight.numel()
        padding = 0, dp * velocity.numel() - n
        weight, grad = F.pad(weight, padding), F.pad(grad, padding)
        share = grad.chunk(dp)[d]
        if reduce:
            scale = 1 / dp if scale is None else scale
            share = comm.reduce_scatter("sum", grad, scale=scale, groups=group)
        velocity = decay * velocity + share
        share = weight.chunk(dp)[d] - lr * velocity
        return comm.all_gather(share, groups=group)[:n], velocity

    def variant(**switches):
        return lambda *arguments: step(*arguments, **switches)

    def padded(weight, grad, velocity, lr, group, dp, d):
        padding = 0, dp * velocity.numel() - weight.numel()
        return step(F.pad(weight, padding), F.pad(grad, padding), velocity, lr, group, dp, d)

    def own_share(weight, grad, velocity, lr, group, dp, d):
        _, velocity = step(weight, grad, velocity, lr, group, dp, d)
        padding = 0, dp * velocity.numel() - weight.numel()
        return F.pad(weight, padding).chunk(dp)[d] - lr * velocity, velocity

    def whole_velocity(weight, grad, velocity, lr, group, dp, d):
        weight, velocity = step(weight, grad, velocity, lr, group, dp, d)
        return weight, comm.all_gather(velocity, groups=group)

    def rate_inside(weight, grad, velocity, lr, group, dp, d):
        return step(weight, lr * grad, velocity, 1.0, group, dp, d)

    def all_reduced(weight, grad, velocity, lr, group, dp, d):
        mean = comm.all_reduce("sum", grad, group) / dp
        return step(weight, mean, velocity, lr, group, dp, d, reduce=False)

    def use(answer, *arguments):
        with comm.record() as log:
            weight, velocity = answer(*arguments)
        twice = any(one.kind == "all_reduce" and one.nbytes > 4 for one in log)
        return {"new weights": weight, "velocity": velocity, "all-reduced": twice}

    trials = []
    for n, group in (
        (7, parallel_state.get_tensor_model_parallel_group()),
        (8, parallel_state.get_data_parallel_group()),
        (5, parallel_state.get_world_group()),
    ):
        dp, d = dist.get_world_size(group), dist.get_rank(group)
        share = -(-n // dp)
        weight, velocity = torch.linspace(-1, 1, n), torch.linspace(2, 0, dp * share)
        grad = (d + 1) * torch.linspace(1, 3, n)
        tensors = (weight, grad, velocity.chunk(dp)[d])
        trials.append((*(x.to(namespace["device"]) for x in tensors), 0.1, group, dp, d))
    return Exercise(
        right=step,
        wrong={
            "nothing is reduced: each rank steps with its own gradient": variant(reduce=False),
            "the gradients are added up; g is their mean": variant(scale=1.0),
            "the old velocity counts too: 0.9 of it": variant(decay=0.0),
            "the old velocity fades: 0.9 of it": variant(decay=1.0),
            "the new weights still have their padding: return n of them": padded,
            "those are this rank's weights alone: gather the shares": own_share,
            "the velocity stays sharded: return this rank's share": whole_velocity,
            "the learning rate belongs to the step, not into the velocity": rate_inside,
            "the result is right, but an all-reduce sends twice what a reduce-scatter does": (
                all_reduced
            ),
        },
        inputs=trials,
        use=use,
    )
