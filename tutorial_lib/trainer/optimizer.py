"""The optimizer that does, at each step, all that stands between backward and the update, in the
right order.
"""

from collections import OrderedDict

import torch

from tutorial_lib.optimizer.finite_step import check_finite, update_where
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import grads, parallel_state
from tutorial_lib.xla_model import reduce_gradients


class NxDOptimizer(torch.optim.Optimizer):
    """An optimizer for the whole mesh around one for a single device, or around ZeRO-1.

    `step` sums what sequence parallelism left partial, averages over data parallelism, clips and
    steps; the last three are ZeRO-1's own where it is on.
    A step whose gradients are not finite is left out, see `finite_step`.

    Groups, state and everything else are those of the optimizer inside, `optimizer`. Hooks of a
    step run before and after the whole of it.

    Attributes:
        grad_norm: the norm of all gradients at the last step, before clipping; None before it or
            without clipping.
        skipped_steps: how many steps were left out, a 0-d tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: dict):
        # Not Optimizer.__init__, which makes groups and a state.
        vars(self).update(optimizer=optimizer, nxd_config=nxd_config)
        vars(self)["_optimizer_step_pre_hooks"] = OrderedDict()
        vars(self)["_optimizer_step_post_hooks"] = OrderedDict()
        self._patch_step_function()
        if not isinstance(optimizer, NeuronZero1Optimizer):
            vars(self).update(grad_norm=None, skipped_steps=torch.tensor(0))

    def __getattr__(self, name: str):
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value) -> None:
        own = name in vars(self) or hasattr(type(self), name) or not hasattr(self.optimizer, name)
        object.__setattr__(self if own else self.optimizer, name, value)

    def __reduce__(self):
        return NxDOptimizer, (self.optimizer, self.nxd_config)

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
            grads.allreduce_sequence_parallel_gradients(self.optimizer)
        if isinstance(self.optimizer, NeuronZero1Optimizer):
            self.optimizer.step()
        else:
            self._average_clip_and_step()
        return loss

    @torch.no_grad()
    def _average_clip_and_step(self) -> None:
        config = self.nxd_config["optimizer_config"]
        reduce_gradients(self.optimizer, parallel_state.get_data_parallel_group())
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = grads.get_grad_norm(parameters)
        finite = check_finite(norm, self.param_groups)
        if config["grad_clipping"]:
            self.grad_norm = norm
            grads.clip_grads_with_norm(parameters, norm, config["max_grad_norm"])
        update_where(finite, self.optimizer.step, self.optimizer)
        self.skipped_steps = self.skipped_steps.to(finite.device) + ~finite


def initialize_parallel_optimizer(
    nxd_config: dict, optimizer_class: type[torch.optim.Optimizer], parameters, **defaults
) -> NxDOptimizer:
    """The optimizer that the configuration describes.

    Args:
        nxd_config: from `neuronx_distributed_config`.
        optimizer_class: of the optimizer proper, for example `AdamW_FP32OptimParams`.
        parameters: parameters, named parameters or groups of them.
        **defaults: for `optimizer_class`.
    """
    config, precision = nxd_config["optimizer_config"], nxd_config["mixed_precision_config"]
    if not config["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(parameters, **defaults), nxd_config)
    optimizer = NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        use_master_weights=precision["use_master_weights"],
        grad_clipping=config["grad_clipping"],
        max_norm=config["max_grad_norm"],
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        save_master_weights=precision["use_master_weights_in_ckpt"],
        **defaults,
    )
    return NxDOptimizer(optimizer, nxd_config)
