"""Padding that makes odd numbers divisible: heads of attention, entries of the vocabulary. Zeros
that stay zeros.

A padded head has zero weights in the projections before it and behind it. Its output is zero, and
so is the gradient of each of its weights; the model computes, and trains, as without it.
"""

from collections.abc import Callable

import torch
from torch import nn

from . import comm
from .layers import ColumnParallelLinear, RowParallelLinear
from .sharding import Partition
from .utils import divide, ensure_positive


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """How many heads have to be added to `n_head` so that `tp_degree` divides them."""
    ensure_positive(n_head=n_head, tp_degree=tp_degree)
    return -n_head % tp_degree


def get_padded_vocab_size(vocab_size: int, tp_degree: int, make_divisible_by: int = 1) -> int:
    """The vocabulary with its padding: the next multiple of `make_divisible_by` on each of
    `tp_degree` ranks.

    Give the real size to the loss (`parallel_cross_entropy(…, vocab_size=…)`), and to
    `ParallelEmbedding(pad=True)`.
    """
    ensure_positive(vocab_size=vocab_size, tp_degree=tp_degree, make_divisible_by=make_divisible_by)
    multiple = tp_degree * make_divisible_by
    return -(-vocab_size // multiple) * multiple


@torch.no_grad()
def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: tuple[type, ...] = (),
    pad_hook_fn: Callable[[nn.Module, int], object] | None = None,
) -> nn.Module:
    """Adds zero heads to the sharded projections of a model, in place, and cuts them anew so that
    heads stay whole.

    For a model whose attention divides its padded number of heads, `n_heads +
    get_number_of_extra_heads(n_heads, T)`, by T. The projections are built for the real number,
    with `pad=True` where the ranks do not divide their size.

    Args:
        model: with `ColumnParallelLinear` before and `RowParallelLinear` behind its attention.
        tp_degree: T, which has to be that of the layers.
        n_heads: the real number of heads.
        wrapped_classes: the modules to look in (the attention); by default all. Others are left
            alone.
        pad_hook_fn: called as `pad_hook_fn(module, padded number of heads)` on each of
            `wrapped_classes`, to adapt what the module itself keeps.

    Returns:
        The same model; the parameters are new, with the same marks.

    Raises:
        ValueError: a projection that does not consist of `n_heads` heads, or is cut over another
            number of ranks.
    """
    extra = get_number_of_extra_heads(n_heads, tp_degree)
    if not extra:
        return model
    roots = (
        [m for m in model.modules() if isinstance(m, wrapped_classes)]
        if wrapped_classes
        else [model]
    )
    layers = {id(m): m for root in roots for m in root.modules()}.values()
    for layer in layers:
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            _add_heads(layer, tp_degree, n_heads, extra)
    for root in roots if pad_hook_fn is not None and wrapped_classes else ():
        pad_hook_fn(root, n_heads + extra)
    return model


def _add_heads(
    layer: ColumnParallelLinear | RowParallelLinear, tp_degree: int, n_heads: int, extra: int
) -> None:
    old = layer._cut
    if old.parts != tp_degree:
        raise ValueError(f"{layer} is cut over {old.parts} ranks, not tp_degree {tp_degree}")
    head = divide(old.sizes[0], n_heads, f"features of {layer} over heads")
    new = Partition(old.dim, old.sizes, old.parts, old.replicas, extra * head, old.order)
    for name in layer._partitions:
        parameter = getattr(layer, name)
        full = old.merge(comm.all_gather(parameter[None], 0, layer.groups).unbind(0))
        padded = nn.Parameter(new.shard(full, layer._rank), parameter.requires_grad)
        vars(padded).update(vars(parameter), pad_size=new.pad)
        setattr(layer, name, padded)
        layer._partitions[name] = new
    layer._set_cut(new)
