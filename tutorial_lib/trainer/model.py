"""Building the model of each rank: in waves, so that a node does not hold all ranks' models on the
host at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tutorial_lib.parallel_layers import ranks
from tutorial_lib.parallel_layers.marks import move_model_to_device
from tutorial_lib.parallel_layers.sharded_module import materialize
from tutorial_lib.utils.activation_checkpoint import apply_activation_checkpointing
from tutorial_lib.xla_model import xla_device


class NxDModel(nn.Module):
    """A thin wrapper with the vendor's names; every attribute that it lacks is the model's."""

    def __init__(self, module: nn.Module, nxd_config: dict):
        super().__init__()
        self.module, self.nxd_config = module, nxd_config

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def original_module(self) -> nn.Module:
        """The model as `model_fn` made it."""
        return self.module

    # A checkpoint is the model's: without the name of this wrapper.
    def named_parameters(self, *args, **kwargs):
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args, **kwargs):
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args, **kwargs) -> dict:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the block a module's parameters go to the meta device as they are registered; buffers
    keep their values.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            marks = vars(parameter)
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(parameter).update(marks)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _build(
    nxd_config: dict, model_fn: Callable, include_buffers: bool, args: tuple, kwargs: dict
) -> nn.Module:
    config, device = nxd_config["model_init_config"], xla_device()
    if not config["meta_device_init"]:
        return move_model_to_device(model_fn(*args, **kwargs), device)
    with torch.device("meta") if include_buffers else _parameters_on_meta():
        model = model_fn(*args, **kwargs)
    with torch.no_grad():
        materialize(model, device, lambda module: config["param_init_fn"](module, device))
    return move_model_to_device(model, device)  # what was never on the meta device


def initialize_parallel_model(
    nxd_config: dict,
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args,
    **model_kwargs,
) -> NxDModel:
    """Builds `model_fn(*model_args, **model_kwargs)` on every rank and moves it to the rank's
    device.

    On each node `sequential_move_factor` ranks at a time do so, the others wait.

    Args:
        nxd_config: from `neuronx_distributed_config`.
        model_fn: the same weights from the same random state on every rank.
        include_buffers: with `meta_device_init`, buffers are made by `param_init_fn` too.

    Raises:
        ValueError: `include_buffers` is not a bool: positional arguments for the model come after
            it.
        Exception: what `model_fn` raised on any rank, on all of them.
    """
    if not isinstance(include_buffers, bool):
        raise ValueError(
            f"include_buffers is {include_buffers!r}, must be True or False: it is the third "
            "argument, before the model's own"
        )
    model = ranks.in_turn(
        lambda: _build(nxd_config, model_fn, include_buffers, model_args, model_kwargs),
        nxd_config["model_init_config"]["sequential_move_factor"],
    )
    if nxd_config["activation_checkpoint_config"] is not None:
        checkpoint_modules(model, nxd_config["activation_checkpoint_config"])
    return NxDModel(model, nxd_config)


def checkpoint_modules(model: nn.Module, which: str | type | list[type] | tuple[type, ...]) -> None:
    """Has every module of these classes recompute its activations in backward, dropout included; in
    place.

    Raises:
        ValueError: neither module classes nor "full", or "full" for a model that names no blocks.
    """
    if which == "full":
        names = getattr(model, "_no_split_modules", None) or []
        classes = tuple({type(m) for m in model.modules() if type(m).__name__ in names})
    else:
        classes = tuple(which) if isinstance(which, (list, tuple)) else (which,)
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise ValueError(
            f"activation_checkpoint_config is {which!r}, must be module classes, or 'full' if "
            f"{type(model).__name__} names its blocks in _no_split_modules"
        )
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, classes))
