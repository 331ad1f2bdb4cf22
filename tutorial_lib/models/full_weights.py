"""Between the parts of a sharded model and the full tensors of Hugging Face's, bit for bit, in both
directions; over the ranks that train. (`checkpoint` does the same from file to file.)
"""

import torch
from torch import nn

from tutorial_lib.checkpoint.architectures import architecture_of
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.sharding import partition_of


def full_tensors(
    model: nn.Module, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Full copies of the model's parameters, on every rank; called on every rank of the group.

    Args:
        tensors: by parameter name, what is cut as the parameters are (their gradients, say); by default the parameters.

    Returns:
        By Hugging Face's names, without padding; tied parameters once, as in `named_parameters`.
    """
    full, names_of = {}, architecture_of(model.config.to_dict()).names
    for name, parameter in model.named_parameters():
        partition = partition_of(parameter)
        part = (parameter if tensors is None else tensors[name]).detach()
        if partition is None:
            full[name] = part.clone()
            continue
        gathered = comm.all_gather(part.movedim(partition.dim, 0)).chunk(partition.parts)
        whole = partition.merge([chunk.movedim(0, partition.dim) for chunk in gathered])
        theirs = names_of(name)
        matrices = whole.split(partition.sizes, partition.dim) if len(theirs) > 1 else (whole,)
        full.update(zip(theirs, matrices, strict=True))
    return full


@torch.no_grad()
def load_full_tensors(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    """Sets every parameter to this rank's part of a full state dict, in the parameter's dtype.

    Args:
        full: of the Hugging Face model, under its names or those of its published checkpoints; not
            modified. What Hugging Face's class ignores there (buffers of old versions) is ignored.

    Raises:
        ValueError: names that are missing or too many, or a tensor of another shape.
    """
    architecture = architecture_of(model.config.to_dict())
    renamed = {architecture.current_name(name): tensor for name, tensor in full.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Of each set of tied ones.
    first = {id(parameter): name for name, parameter in reversed(parameters.items())}
    theirs = {name: architecture.names(name) for name in parameters}
    known = {one for names in theirs.values() for one in names}
    absent = [
        one
        for name, p in parameters.items()
        if first[id(p)] == name
        for one in theirs[name]
        if one not in renamed
    ]
    extra = [name for name in renamed if name not in known and not architecture.ignores(name)]
    if absent or extra:
        without, excess = (", ".join(names) or "nothing" for names in (absent, extra))
        raise ValueError(
            f"a state dict without {without}, and with {excess} that {type(model).__name__} has not"
        )
    for name, parameter in parameters.items():
        if first[id(parameter)] != name:
            continue
        partition, matrices = partition_of(parameter), [renamed[one] for one in theirs[name]]
        if partition is not None and len(matrices) > 1:
            for one, matrix, size in zip(theirs[name], matrices, partition.sizes, strict=True):
                if matrix.size(partition.dim) != size:  # two that are wrong may have the right sum
                    raise ValueError(
                        f"{one}: shape {tuple(matrix.shape)} should have {size} in dimension {partition.dim}"
                    )
        part = matrices[0] if len(matrices) == 1 else torch.cat(matrices, partition.dim)
        shape = tuple(part.shape)
        if partition is not None:
            part = partition.shard(part, parallel_state.get_tensor_model_parallel_rank())
        if part.shape != parameter.shape:
            raise ValueError(f"{name}: shape {shape} gives {tuple(part.shape)} for this rank, "
                             f"not {tuple(parameter.shape)}")  # fmt: skip
        parameter.copy_(part)
