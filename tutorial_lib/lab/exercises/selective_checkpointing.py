"""Notebook 04: a rank's shard of coalesced matrices, and activation checkpointing."""

import torch
from torch import nn

from tutorial_lib.training.memory import SavedActivations

from .judge import Exercise


def fused_shard(namespace) -> Exercise:
    """`fused_shard(matrices, t, T)`."""
    shapes = [(8, 4, 4), (12, 12), (4, 4, 4)]
    stacks = [
        [10.0 * i + torch.arange(4.0 * rows).view(rows, 4) for i, rows in enumerate(stack)]
        for stack in shapes
    ]
    return Exercise(
        right=lambda matrices, t, T: torch.cat([matrix.chunk(T)[t] for matrix in matrices]),
        wrong={
            "that is a block of the stack: the first ranks have all of the first matrix": (
                lambda matrices, t, T: torch.cat(matrices).chunk(T)[t]
            ),
            "every rank gets the first rank's rows": (
                lambda matrices, t, T: torch.cat([matrix.chunk(T)[0] for matrix in matrices])
            ),
            "those are columns; a column-parallel layer shards the rows of its weight": (
                lambda matrices, t, T: torch.cat([matrix.chunk(T, dim=1)[t] for matrix in matrices])
            ),
            "a rank's rows of a matrix lie together: they are whole heads": (
                lambda matrices, t, T: torch.cat([matrix[t::T] for matrix in matrices])
            ),
            "that is the shard of the first matrix alone": (
                lambda matrices, t, T: matrices[0].chunk(T)[t]
            ),
            "that is all of it, on every rank": lambda matrices, t, T: torch.cat(matrices),
        },
        inputs=[
            (stack, t, T) for stack, T, ranks in zip(stacks, (2, 2, 4), ((0, 1), (1,), (2,)))
            for t in ranks
        ],
    )  # fmt: skip


def _checkpoint(outward=True, all_inputs=True, runs: int | None = 1, keep_graph=False):
    """A class like the one asked for, with the mistakes that its switches make. With `runs` None
    the function runs again for each input.
    """

    class Variant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.function = function
            ctx.save_for_backward(*inputs)
            if keep_graph:
                ctx.graph = Variant.run(function, inputs)
                return ctx.graph[1].detach()
            return function(*inputs)

        @staticmethod
        def run(function, inputs):
            inputs = [tensor.detach().requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                return inputs, function(*inputs)

        @staticmethod
        def backward(ctx, grad):
            for _ in range(len(ctx.saved_tensors) if runs is None else runs):
                again = Variant.run(ctx.function, ctx.saved_tensors)
            inputs, output = ctx.graph if keep_graph else again
            grad = grad if outward else torch.ones_like(grad)
            found = torch.autograd.grad(output, inputs, grad)
            return None, *(found if all_inputs else [found[0], *[None] * (len(found) - 1)])

    return Variant


def own_checkpoint(namespace) -> Exercise:
    """`Checkpoint`, a `torch.autograd.Function`."""
    functions = {
        "attention": lambda q, k, v: torch.softmax(q @ k.T, -1) @ v,
        "gated": lambda x, w: torch.sigmoid(x @ w) * (x @ w).exp(),
        "sine": lambda x: (x.sin() * x).cos(),
    }

    def use(answer, name, *inputs):
        calls = []

        def counted(*tensors):
            calls.append(name)
            return functions[name](*tensors)

        with SavedActivations(nn.Module()) as saved:
            output = answer.apply(counted, *inputs)
        forward = len(calls)
        scale = torch.linspace(1, 2, output.numel()).view_as(output)
        (output * scale).sum().backward()
        return {
            "output": output,
            "runs forward": forward,
            "runs again in backward": len(calls) - forward,
            "gradients": [tensor.grad for tensor in inputs],
            "keeps more than the inputs": saved.nbytes > sum(x.nbytes for x in inputs),
        }

    generator = torch.Generator().manual_seed(3)

    def tensors(*shapes):
        return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    return Exercise(
        right=_checkpoint(),
        wrong={
            "backward is given the output's gradient, and has to pass it on": _checkpoint(
                outward=False
            ),
            "every input needs its gradient, not the first alone": _checkpoint(all_inputs=False),
            "nothing runs again: forward has kept the graph, with all its tensors": _checkpoint(
                runs=0, keep_graph=True
            ),
            "one more run gives the gradients of all inputs": _checkpoint(runs=None),
            "backward runs the function twice": _checkpoint(runs=2),
        },
        inputs=[
            ("attention", *tensors((8, 2), (8, 2), (8, 2))),
            ("gated", *tensors((4, 3), (3, 3))),
            ("sine", *tensors((5,))),
        ],
        use=use,
    )
