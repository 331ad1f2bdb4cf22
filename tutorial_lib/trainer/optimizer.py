"""The optimizer that does, at each step, all that stands between backward and the update, in the
right order.
"""

import os

import torch

from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.grads import (
    allreduce_sequence_parallel_gradients,
    bucket_allreduce_gradients,
    clip_grad_norm,
    fill_missing_gradients,
)


class NxDOptimizer(torch.optim.Optimizer):
    """An optimizer for the whole mesh around one for a single device, or around ZeRO-1.

    `step` sums what sequence parallelism left partial, averages over data parallelism, clips and
    steps; the last three are ZeRO-1's own where it is on.
    For learning-rate schedulers and everything else it is the optimizer that it wraps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: dict):
        # Not Optimizer.__init__: the groups and the state are the wrapped optimizer's.
        self.optimizer, self.nxd_config = optimizer, nxd_config
        self._grad_norm: torch.Tensor | None = None

    def __getattr__(self, name: str):
        if name == "optimizer":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # torch's own would leave out what is wrapped.
    def __getstate__(self) -> dict:
        return {name: vars(self)[name] for name in ("optimizer", "nxd_config", "_grad_norm")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict:
        return self.optimizer.defaults

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients at the last step, before clipping; None before it or without
        clipping.
        """
        return (
            self.optimizer.grad_norm
            if isinstance(self.optimizer, NeuronZero1Optimizer)
            else self._grad_norm
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure=None):
        """One step of the whole mesh; every rank calls it, after the last micro-batch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.nxd_config["sequence_parallel"]:
            allreduce_sequence_parallel_gradients(self.optimizer)
        if not isinstance(self.optimizer, NeuronZero1Optimizer):
            self._average_and_clip()
        self.optimizer.step()
        return loss

    def _average_and_clip(self) -> None:
        config, groups = (
            self.nxd_config["optimizer_config"],
            parallel_state.get_data_parallel_group(),
        )
        parameters = [p for group in self.param_groups for p in group["params"]]
        fill_missing_gradients(parameters, groups)
        bucket_allreduce_gradients(
            [p.grad for p in parameters if p.grad is not None], groups=groups
        )
        if config["grad_clipping"]:
            self._grad_norm = clip_grad_norm(parameters, config["max_grad_norm"])


def initialize_parallel_optimizer(
    nxd_config: dict, optimizer_class: type[torch.optim.Optimizer], parameters, **defaults
) -> NxDOptimizer:
    """The optimizer that the configuration describes.

    The size of ZeRO-1's collectives in 10⁶ bytes can be set by
    `ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB`.

    Args:
        nxd_config: from `neuronx_distributed_config`.
        optimizer_class: of the optimizer proper, for example `AdamW_FP32OptimParams`.
        parameters: parameters, named parameters or groups of them.
        **defaults: for `optimizer_class`.
    """
    config, precision = nxd_config["optimizer_config"], nxd_config["mixed_precision_config"]
    if not config["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(parameters, **defaults), nxd_config)
    given = os.environ.get("ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB")
    cap_mb = None if given is None else float(given)
    optimizer = NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        use_master_weights=precision["use_master_weights"],
        grad_clipping=config["grad_clipping"],
        max_norm=config["max_grad_norm"],
        bucket_cap_mb_all_gather=cap_mb,
        bucket_cap_mb_reduce_scatter=cap_mb,
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        save_master_weights=precision["use_master_weights_in_ckpt"],
        **defaults,
    )
    return NxDOptimizer(optimizer, nxd_config)
