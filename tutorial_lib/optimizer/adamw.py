"""AdamW whose state is float32 at least, and the groups of parameters that it decays or not."""

import math

import torch
from torch import nn


class AdamW_FP32OptimParams(torch.optim.Optimizer):
    """The tutorials' AdamW: moments in float32 (float64 for such parameters) whatever dtype the
    gradients have.

    With gradient g at step t, in the arithmetic of the state:

        m ← β₁ m + (1 - β₁) g          v ← β₂ v + (1 - β₂) g²
        p ← p - α m / (√v + ε)         α = lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ); lr without `correct_bias`
        p ← p - lr · weight_decay · p  after the update, with plain lr

    (Kingma and Ba, 2015, end of section 2; Loshchilov and Hutter, 2019). `torch.optim.AdamW` adds ε
    to the corrected √v, so its ε is this one over √(1 - β₂ᵗ), and it decays before the update; for
    ε = 0 and no decay the two agree.

    A bfloat16 parameter is updated in float32 and rounded, so small updates are lost: put the
    optimizer under `NeuronZero1Optimizer`, which keeps a float32 master.

    Args:
        params: parameters or groups of them.
        lr: a float, or a tensor on the parameters' device.
        betas, eps, weight_decay: as above.
        correct_bias: see α.

    Raises:
        ValueError: a number out of its range, with its name.

    The step count is a tensor on the parameter's device: a number that changes from step to step
    would make XLA compile each step anew.
    """

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ):
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas {betas} are not both in [0, 1)")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:  # NaN too
                raise ValueError(f"{name} {value} is not at least 0")
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults | {"correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure=None):
        """One step. Parameters without a gradient are left alone, decay included."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple, list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError("AdamW_FP32OptimParams takes no sparse gradients")
                dtype = torch.promote_types(p.dtype, torch.float32)
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    state["exp_avg"] = torch.zeros_like(p, dtype=dtype)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype)
                alike.setdefault((p.device, p.dtype), []).append(p)
            for parameters in alike.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict) -> None:
        """Steps parameters of one dtype and device together, each operation over all of them at
        once.
        """
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in parameters]
        steps, m, v = (
            [state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq")
        )
        wide = m[0].dtype
        grads = [p.grad.to(wide) for p in parameters]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(m, denominators)
        lr = torch.as_tensor(group["lr"], dtype=wide, device=parameters[0].device)
        corrected = group["correct_bias"]
        sizes = self._step_sizes(steps, lr, group) if corrected else [lr] * len(steps)
        torch._foreach_mul_(updates, sizes)
        masters = parameters if parameters[0].dtype == wide else [p.to(wide) for p in parameters]
        torch._foreach_sub_(masters, updates)
        if group["weight_decay"]:
            torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
        if masters is not parameters:
            torch._foreach_copy_(parameters, masters)

    @staticmethod
    def _step_sizes(steps: list[torch.Tensor], lr: torch.Tensor, group: dict) -> list[torch.Tensor]:
        """α of each parameter."""
        t = torch.stack(steps).to(lr.dtype)
        # 1 - βᵗ, exact where βᵗ is close to 1.
        corrections = [
            -torch.expm1(t * math.log(beta)) if beta else torch.ones_like(t)
            for beta in group["betas"]
        ]
        return list((lr * corrections[1].sqrt() / corrections[0]).unbind())

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state as it was saved: torch alone would round the moments to the dtype of the
        parameters.
        """
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(indices, parameters):
            for key, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, torch.Tensor):  # the step count of the vendor's AdamW
                    value = torch.tensor(float(value), dtype=torch.float32, device=p.device)
                self.state[p][key] = value.detach().to(p.device, copy=True)


def get_param_groups_by_weight_decay(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices with decay; vectors (every bias, the scales of norms) without.

    No name counts: "LayerNorm.weight" does not contain "norm", and a fused projection's bias is
    `bias_qkv`. Frozen parameters are included.

    Returns:
        `[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]`.
    """
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
