"""Notebook 00: a reduce-scatter made of an all-reduce, and the gradient of a step."""

import torch
import torch.distributed as dist
from torch import nn

from tutorial_lib.parallel_layers import comm, parallel_state

from .judge import Exercise


def groups() -> list:
    """All ranks, and the two kinds of groups of the mesh that this rank is in."""
    return [
        parallel_state.get_world_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    ]


def reduce_scatter(namespace) -> Exercise:
    """`my_reduce_scatter(x, group)`."""

    def chunk_of(x, group, place=None):
        place = dist.get_rank(group) if place is None else place
        return x.chunk(dist.get_world_size(group))[place]

    def summed(x, group):
        return comm.all_reduce("sum", x, group)

    x = torch.arange(4.0 * dist.get_world_size(), device=namespace["device"])
    return Exercise(
        right=lambda x, group: comm.reduce_scatter("sum", x, groups=group),
        wrong={
            "it is the whole sum: keep this rank's shard of it": summed,
            "every rank keeps the first shard": lambda x, g: chunk_of(summed(x, g), g, 0),
            "the shards were never added up": chunk_of,
            "it is the mean, not the sum": lambda x, g: (
                chunk_of(summed(x, g), g) / dist.get_world_size(g)
            ),
            "a rank's place is counted in the group, not in the world": lambda x, g: chunk_of(
                summed(x, g), g, dist.get_rank() % dist.get_world_size(g)
            ),
        },
        inputs=[(x + 10 * dist.get_rank(), group) for group in groups()],
    )


def _backward(model, loss_of, micro_batches, group, divide=True, clear=False, each=False):
    """The gradient of a step, with the mistakes that its switches make."""
    for batch in micro_batches:
        if clear:
            model.zero_grad()
        (loss_of(model, batch) / (len(micro_batches) if divide else 1)).backward()
        if each:
            _reduce(model, group)


def _reduce(model, group, size=None):
    for parameter in model.parameters():
        total = comm.all_reduce("sum", parameter.grad, group)
        parameter.grad = total / (size or dist.get_world_size(group))


def accumulate(namespace) -> Exercise:
    """`accumulate(model, loss_of, micro_batches, group)`."""

    def variant(reduce=True, size=None, **switches):
        def answer(model, loss_of, micro_batches, group):
            _backward(model, loss_of, micro_batches, group, **switches)
            if reduce:
                _reduce(model, group, size)

        return answer

    def use(answer, count, group):
        size, device = dist.get_world_size(group), namespace["device"]
        generator = torch.Generator().manual_seed(count)
        data = torch.randn(size * count, 2, 4, generator=generator).chunk(size)[
            dist.get_rank(group)
        ]
        model = nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        model.to(device)

        def loss_of(model, batch):
            return (model(batch[:, :3]).squeeze(-1) - batch[:, 3]).pow(2).mean()

        with comm.record() as log:
            answer(model, loss_of, list(data.to(device)), group)
        most = 1.01 * 2 * (size - 1) / size * sum(4 * p.numel() for p in model.parameters())
        found = {
            f"gradient of the {name}": parameter.grad
            for name, parameter in model.named_parameters()
        }
        return found | {"more than one all-reduce": sum(one.bytes_sent for one in log) > most}

    return Exercise(
        right=variant(),
        wrong={
            "each rank still has the gradient of its own data alone": variant(reduce=False),
            "the ranks' gradients are added up; the loss is a mean": variant(size=1),
            "divide by the group's size, not the world's": variant(size=dist.get_world_size()),
            "divide each loss by the number of micro-batches: .grad adds up": variant(divide=False),
            "only the last micro-batch counts; .grad adds up all": variant(clear=True),
            "the gradient is right, but one reduction a step is enough": variant(
                reduce=False, each=True
            ),
        },
        inputs=[(count, group) for count, group in zip((1, 3, 2), groups())],
        use=use,
    )
