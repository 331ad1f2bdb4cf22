"""Notebook 01: gathering features, a sharded feed-forward part, the norm of all gradients."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.autograd import Function

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from tutorial_lib.parallel_layers.mappings import gather_from_tensor_model_parallel_region

from .judge import Exercise


def _own(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """This rank's shard."""
    size = parallel_state.get_tensor_model_parallel_size()
    return x.chunk(size, dim)[parallel_state.get_tensor_model_parallel_rank()]


def gather(namespace) -> Exercise:
    """`GatherFeatures`, an autograd function."""

    def pair(forward, backward):
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type("Pair", (Function,), methods)

    def gathered(_, x):
        return comm.all_gather(x, -1)

    class Right:
        apply = staticmethod(gather_from_tensor_model_parallel_region)

    def use(answer, shape):
        size = parallel_state.get_tensor_model_parallel_size()
        place = parallel_state.get_tensor_model_parallel_rank()
        x = (torch.arange(24.0, device=namespace["device"]) + 100 * place).view(shape)
        x.requires_grad_()
        output = answer.apply(x)
        if output is None:
            return None
        weights = torch.linspace(1, 2, 24 * size, device=x.device).view(output.shape)
        (output * weights).sum().backward()
        return {"output": output, "gradient": x.grad}

    return Exercise(
        right=Right,
        wrong={
            "the features are the last dimension": pair(
                lambda _, x: comm.all_gather(x, 0), lambda _, g: _own(g, 0)
            ),
            "every rank keeps the first shard of the gradient": pair(
                gathered, lambda _, g: g[..., : g.size(-1) // size_of_group()]
            ),
            "every rank has the whole gradient already: a sum makes it T times too large": pair(
                gathered, lambda _, g: comm.reduce_scatter("sum", g, scatter_dim=g.dim() - 1)
            ),
            "backward the mean of the shards is not a shard": pair(
                gathered, lambda _, g: sum(g.chunk(size_of_group(), -1)) / size_of_group()
            ),
        },
        inputs=[((24,),), ((4, 6),), ((2, 3, 4),)],
        use=use,
    )


def size_of_group() -> int:
    return parallel_state.get_tensor_model_parallel_size()


def feed_forward(namespace) -> Exercise:
    """`shard_feed_forward(layer, config)`."""

    def variant(first, second, gather=False, parallel=True, parts=1):
        def answer(layer, config):
            hidden, features = config.hidden_size, config.intermediate_size // parts
            if first:
                layer.intermediate.dense = first(hidden, features, gather)
            if second:
                layer.output.dense = second(features, hidden, parallel)

        return answer

    def column(inputs, outputs, gather):
        return ColumnParallelLinear(inputs, outputs, gather_output=gather)

    def row(inputs, outputs, parallel):
        return RowParallelLinear(inputs, outputs, input_is_parallel=parallel)

    def all_columns(inputs, outputs, _):
        return ColumnParallelLinear(inputs, outputs, gather_output=True)

    def use(answer, hidden, features):
        device = namespace["device"]
        layer = SimpleNamespace(
            intermediate=SimpleNamespace(dense=nn.Linear(hidden, features)),
            output=SimpleNamespace(dense=nn.Linear(features, hidden)),
        )
        torch.manual_seed(0)  # the ranks' shards are of one weight
        answer(layer, SimpleNamespace(hidden_size=hidden, intermediate_size=features))
        first, second = layer.intermediate.dense, layer.output.dense
        for module in (first, second):
            module.to(device)
        x = torch.linspace(-1, 1, 6 * hidden, device=device).view(2, 3, hidden)
        shapes = {
            "the shape of intermediate.dense": list(first.weight.shape),
            "the shape of output.dense": list(second.weight.shape),
        }
        with comm.record() as log:
            y = second(nn.functional.gelu(first(x)))
        whole = [_whole(first, hidden, features), _whole(second, features, hidden)]
        plain = nn.functional.linear(
            nn.functional.gelu(nn.functional.linear(x, *whole[0])), *whole[1]
        )
        return shapes | {
            "the collectives of the forward pass": [one.kind for one in log],
            "a bias is missing": None in (first.bias, second.bias),
            "the distance from one process": (y - plain).abs().max(),
        }

    return Exercise(
        right=variant(column, row),
        wrong={
            "each layer divides the sizes itself": variant(column, row, parts=size_of_group()),
            "intermediate.dense is still whole": variant(None, row, parallel=False),
            "output.dense is still whole, and takes all features": variant(
                all_columns, None, gather=True
            ),
            "the features between the two are gathered, and sharded again": variant(
                column, row, gather=True, parallel=False
            ),
            "the second matrix is sharded by outputs: its input has to be gathered": variant(
                all_columns, all_columns
            ),
            "a row layer first and a column layer after it reduce and gather": variant(
                lambda inputs, outputs, _: row(inputs, outputs, False), all_columns
            ),
        },
        inputs=[(8, 32), (16, 48)],
        use=use,
    )


def _whole(layer: nn.Module, inputs: int, outputs: int) -> list[torch.Tensor]:
    """Weight and bias of a layer, gathered if they are sharded."""
    weight, bias = layer.weight.detach(), layer.bias
    if weight.size(1) < inputs:
        weight = comm.all_gather(weight, 1)
    elif weight.size(0) < outputs:
        weight = comm.all_gather(weight, 0)
    return [weight, bias if bias is None or bias.size(0) == outputs else comm.all_gather(bias)]


def norm(namespace) -> Exercise:
    """`my_grad_norm(parameters)`."""

    def squares(parameters, sharded):
        chosen = [p for p in parameters if getattr(p, "tensor_model_parallel", False) == sharded]
        zero = torch.zeros((), device=namespace["device"])
        return sum((p.grad.pow(2).sum() for p in chosen), zero)

    def total(x, group=None):
        return comm.all_reduce("sum", x, group)

    def right(parameters):
        return (total(squares(parameters, True)) + squares(parameters, False)).sqrt()

    def world(parameters):
        group = parallel_state.get_world_group()
        return (total(squares(parameters, True), group) + squares(parameters, False)).sqrt()

    def use(answer, sharded, whole):
        device = namespace["device"]
        place = parallel_state.get_tensor_model_parallel_rank()
        parameters = []
        for number, marked in enumerate([True] * sharded + [False] * whole):
            parameter = nn.Parameter(torch.zeros(3, 2, device=device))
            parameter.grad = torch.full((3, 2), 1.0 + number + marked * place, device=device)
            parameter.tensor_model_parallel = marked
            parameters.append(parameter)
        return answer(parameters)

    return Exercise(
        right=right,
        wrong={
            "the other ranks' shards are missing": lambda ps: (
                squares(ps, True) + squares(ps, False)
            ).sqrt(),
            "what every rank holds whole is counted T times": lambda ps: total(
                squares(ps, True) + squares(ps, False)
            ).sqrt(),
            "add the squares and take the root at the end: norms do not add up": lambda ps: (
                total(squares(ps, True).sqrt()) + squares(ps, False).sqrt()
            ),
            "the root is missing": lambda ps: right(ps).pow(2),
            "the world holds every shard once for each data-parallel rank": world,
            "the parameters that are whole count too": lambda ps: total(squares(ps, True)).sqrt(),
        },
        inputs=[(1, 0), (0, 2), (2, 3)],
        use=use,
    )
