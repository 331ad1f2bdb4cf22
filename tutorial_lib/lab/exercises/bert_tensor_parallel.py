"""Notebook 02: merging shards, and a loss in which each token counts the same."""

import torch
import torch.distributed as dist

from tutorial_lib.backends import mark_step
from tutorial_lib.parallel_layers import comm

from .judge import Exercise
from .meet_the_mesh import groups


def merge(_namespace) -> Exercise:
    """`merge_shards(shards, dims)`."""

    def variant(join=torch.cat, dim_of=lambda dims, name: dims[name], every=False):
        def answer(shards, dims):
            return {
                name: join([shard[name] for shard in shards], dim_of(dims, name))
                if name in dims or every
                else tensor
                for name, tensor in shards[0].items()
            }

        return answer

    def case(ranks: int) -> tuple[list, dict]:
        shapes = {"query": (2, 3), "dense": (4, 2), "norm": (3,), "bias": (2,)}
        shards = [
            {
                name: torch.arange(float(torch.Size(shape).numel())).view(shape)
                + (100 * rank if name != "norm" else 0)
                for name, shape in shapes.items()
            }
            for rank in range(ranks)
        ]
        return shards, {"query": 0, "dense": 1, "bias": 0}

    return Exercise(
        right=variant(),
        wrong={
            "tensors are sharded along the dimension that dims names, not all along the first": (
                variant(dim_of=lambda dims, name: 0)
            ),
            "a tensor that is not in dims is whole on every rank: take it once": variant(
                dim_of=lambda dims, name: dims.get(name, 0), every=True
            ),
            "shards are concatenated, not added up": variant(join=lambda ts, dim: sum(ts)),
            "that is the first rank's shard": variant(join=lambda ts, dim: ts[0]),
            "the shards are in the order of the ranks": variant(
                join=lambda ts, dim: torch.cat(ts[::-1], dim)
            ),
        },
        inputs=[case(2), case(4), case(1)],
    )


def factors(namespace) -> Exercise:
    """`factors(counts, group)`."""

    def variant(formula, everywhere=True):
        def answer(counts, group):
            total = torch.tensor(float(sum(counts)), device=namespace["device"])
            total = comm.all_reduce("sum", total, group) if everywhere else total
            size = dist.get_world_size(group)
            return [formula(count, total, size, len(counts)) for count in counts]

        return answer

    def use(answer, counts, group):
        found = answer(list(counts), group)
        mark_step()
        return found if found is None else [float(factor) for factor in found]

    place = dist.get_rank()
    return Exercise(
        right=variant(lambda count, total, size, n: count * size / total),
        wrong={
            "that is a mean of means: a token of a short micro-batch would count more": variant(
                lambda count, total, size, n: torch.ones_like(total) / n
            ),
            "the tokens of the other ranks are missing from the total": variant(
                lambda count, total, size, n: count / total, everywhere=False
            ),
            "the average over the group divides by its size once more": variant(
                lambda count, total, size, n: count / total
            ),
            "the loss is a mean already: times its count it is a sum": variant(
                lambda count, total, size, n: size / total
            ),
            "there is a total to divide by, not a number of micro-batches": variant(
                lambda count, total, size, n: count / n + 0 * total
            ),
        },
        inputs=[
            ((3 + place, 5), groups()[0]),
            ((2, 7, 1 + 2 * place), groups()[1]),
            ((9 - place,), groups()[2]),
        ],
        use=use,
    )
