"""How a sharded Hugging Face model comes to its weights without any process holding all of them.

A model is built on the meta device, where nothing is allocated, and its modules are exchanged there
for parallel ones. Then `finish` allocates this rank's part and runs Hugging Face's initialisation
over it, module by module; a sharded weight is drawn whole, and each rank keeps its shard. So the
random numbers are the same at every degree, and the weights are bit for bit those of the Hugging
Face model that is initialised the same way from the same seed (`hugging_face_reference`).
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from tutorial_lib.parallel_layers.sharded_module import ShardedModule, materialize
from tutorial_lib.parallel_layers.sharding import partition_of


def finish(model: PreTrainedModel) -> None:
    """Allocates a model that was built on the meta device, on torch's default device, and
    initialises it.

    Inside `with torch.device("meta")` nothing happens, so that a caller can put the moment off.
    """
    if torch.get_default_device().type != "meta":
        with torch.no_grad():
            materialize(model, torch.get_default_device(), model._init_weights)
            for module in model.modules():  # what a module changes in those that it is made of
                if not (module._parameters or module._buffers):
                    model._init_weights(module)


def initialize_sharded(module: nn.Module, std: float) -> bool:
    """Initialises a module with sharded parameters as Hugging Face does plain ones; False if it is
    no such module.

    Weights are normal with standard deviation `std`, a padding row and biases zero. Fused matrices
    are drawn one after the other, as the plain modules are that they stand for.
    """
    if not isinstance(module, ShardedModule):
        return False
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            continue
        padding_idx, partition = getattr(module, "padding_idx", None), partition_of(parameter)

        def init(full: torch.Tensor) -> None:
            matrices = [full] if partition is None else full.split(partition.sizes, partition.dim)
            for matrix in matrices:
                nn.init.normal_(matrix, std=std)
            if padding_idx is not None:
                full[padding_idx] = 0

        module.draw_(name, init)
    return True


def hugging_face_reference(model_class: type[PreTrainedModel], config) -> PreTrainedModel:
    """The Hugging Face model itself, unsharded, initialised as `finish` does: same seed, same
    weights.
    """
    with torch.device("meta"):
        model = model_class(config)
    finish(model)
    return model
