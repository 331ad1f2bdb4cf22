"""Between the shards of a model and the full tensors of Hugging Face's, bit for bit, in both
directions; over the ranks that train. (`checkpoint` does the same from file to file.)
"""

import copy
import warnings
from functools import reduce

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import logging

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.sharding import Partition, full_shape, partition_of

from .base import ShardedModel


def full_tensors(
    model: nn.Module, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Full copies of the model's parameters, on every rank; called on every rank of the group.

    Args:
        tensors: by parameter name, what is sharded as the parameters are (their gradients, say); by
            default the parameters.

    Returns:
        By Hugging Face's names, without padding; tied parameters once, as in `named_parameters`.
    """
    full = {}
    for name, parameter in model.named_parameters():
        partition = partition_of(parameter)
        part = (parameter if tensors is None else tensors[name]).detach()
        if partition is None:
            full[name] = part.clone()
            continue
        gathered = comm.all_gather(part.movedim(partition.dim, 0)).chunk(partition.parts)
        whole = partition.merge([chunk.movedim(0, partition.dim) for chunk in gathered])
        theirs = model.hugging_face_names(name)
        matrices = whole.split(partition.sizes, partition.dim) if len(theirs) > 1 else (whole,)
        full.update(zip(theirs, matrices, strict=True))
    return full


@torch.no_grad()
def load_full_tensors(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    """Sets every parameter to this rank's shard of a full state dict, in the parameter's dtype.

    Args:
        full: of the Hugging Face model, under any names that its `from_pretrained` knows; not
            modified.

    Raises:
        ValueError: names that are missing, or a tensor of another shape.
    """
    model = getattr(model, "original_module", lambda: model)()  # without the trainer's wrapper
    tensors = published_tensors(type(model), model.config, full)
    for name, parameter in model.named_parameters():
        partition = partition_of(parameter)
        whole = fused(type(model), name, partition, tuple(full_shape(parameter)), tensors)
        if partition is not None:
            whole = partition.shard(whole, parallel_state.get_tensor_model_parallel_rank())
        parameter.copy_(whole)


def published_tensors(
    cls: type[ShardedModel], config: PretrainedConfig, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a published checkpoint under the names that Hugging Face's class has today:
    its own `from_pretrained` renames, ties and leaves out.

    Raises:
        ValueError: tensors that the model needs are missing, or have another shape.
    """
    theirs = next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.device("cpu"):
            model, info = theirs.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=dict(tensors),
                dtype=reduce(torch.promote_types, floating, floating[0]) if floating else None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    finally:
        if shown:
            logging.enable_progress_bar()
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(f"{name} has shape {tuple(found)}, {tuple(expected)} was expected")
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{len(missing)} tensors of {theirs.__name__} are missing: {', '.join(missing[:3])}"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        warnings.warn(
            f"{theirs.__name__} does not use {len(unexpected)} tensors: "
            f"{', '.join(unexpected[:3])}",
            stacklevel=2,
        )
    return model.state_dict()


def fused(
    cls: type[ShardedModel],
    name: str,
    partition: Partition | None,
    shape: tuple[int, ...],
    tensors: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The full tensor that is `name` here, made of the one or several that Hugging Face has.

    Raises:
        ValueError: it, or one of its matrices, has another size.
    """
    matrices = [tensors[theirs] for theirs in cls.hugging_face_names(name)]
    whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices, partition.dim)
    sizes = [matrix.size(partition.dim) for matrix in matrices] if len(matrices) > 1 else []
    if tuple(whole.shape) != shape or (sizes and tuple(sizes) != partition.sizes):
        raise ValueError(f"{name} is {tuple(whole.shape)} (matrices: {sizes}), must be {shape}")
    return whole
