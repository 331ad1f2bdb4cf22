"""Notebook 09: the order of 1F1B, and one weight of ZeRO-3."""

import torch
import torch.distributed as dist

from tutorial_lib.parallel_layers import comm

from .judge import Exercise
from .meet_the_mesh import groups


def _alternating(ahead, m: int) -> list[str]:
    """`ahead` forward passes, then a backward and a forward pass by turns."""
    done = [f"F{number}" for number in range(min(ahead, m))]
    for number in range(m):
        done += [f"B{number}"] + [f"F{ahead + number}"] * (ahead + number < m)
    return done


def order(namespace) -> Exercise:
    """`one_f_one_b(stage, p, m)`."""
    return Exercise(
        right=lambda stage, p, m: _alternating(p - stage, m),
        wrong={
            "all forward passes first: a stage would keep all m micro-batches": (
                lambda stage, p, m: _alternating(m, m)
            ),
            "only the last stage can go back at once; the others wait for gradients": (
                lambda stage, p, m: _alternating(1, m)
            ),
            "it is the first stage that has most to wait for": (
                lambda stage, p, m: _alternating(stage + 1, m)
            ),
            "every stage starts with one forward pass less than the one before": (
                lambda stage, p, m: _alternating(p, m)
            ),
            "a backward pass comes before the forward pass of its micro-batch": (
                lambda stage, p, m: _alternating(p - stage - 1, m)
            ),
        },
        inputs=[(0, 2, 4), (1, 2, 4), (1, 4, 6), (0, 4, 8), (3, 4, 3)],
    )


def _unshard(gather=True, reduce=True, mean=True, scatter=True, own=True):
    """A class like the one asked for, with the mistakes that its switches make."""

    class Variant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard, group):
            ctx.group = group
            return comm.all_gather(shard, groups=group) if gather else shard.clone()

        @staticmethod
        def backward(ctx, grad):
            n, place = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
            scale = 1 / n if reduce and mean else 1.0
            if gather and reduce and scatter:
                return comm.reduce_scatter("sum", grad, scale, groups=ctx.group), None
            total = scale * (comm.all_reduce("sum", grad, ctx.group) if reduce else grad)
            return (total.chunk(n)[place if own else 0] if gather else total), None

    return Variant


def unshard(namespace) -> Exercise:
    """`Unshard`, a `torch.autograd.Function`, on ranks."""

    def use(answer, group):
        n, place = dist.get_world_size(group), dist.get_rank(group)
        rows = torch.arange(6.0 * n, device=namespace["device"]).view(2 * n, 3)
        shard = rows.chunk(n)[place].clone().requires_grad_()
        with comm.record() as log:
            output = answer.apply(shard, group)
            (output * (rows[: len(output)] + 10 * place)).sum().backward()
        least = 2 * (n - 1) / n * rows.nbytes
        return {
            "weight": output,
            "gradient": shard.grad,
            "no more communication than needed": sum(x.bytes_sent for x in log) <= 1.01 * least,
        }

    return Exercise(
        right=_unshard(),
        wrong={
            "the layer needs the whole weight, of all ranks": _unshard(gather=False),
            "each rank has the gradient of its own data: they were never added up": _unshard(
                reduce=False
            ),
            "it is the mean over the ranks, not the sum": _unshard(mean=False),
            "every rank keeps the first shard's gradient": _unshard(scatter=False, own=False),
            "an all-reduce sends twice what a reduce-scatter does": _unshard(scatter=False),
        },
        inputs=[(group,) for group in groups()],
        use=use,
    )
