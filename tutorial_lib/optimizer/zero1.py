"""ZeRO stage 1: each data-parallel rank keeps, and steps, its part of the optimizer's state.

(Rajbhandari et al., 2020.)

One step reduce-scatters the gradients, clips by the norm over all shards, steps the shards with any
optimizer and all-gathers the weights: together the traffic of the all-reduce that plain data
parallelism does. Interface: `neuronx_distributed.optimizer.NeuronZero1Optimizer`.
"""

from collections.abc import Iterator

import torch
from torch import nn

from tutorial_lib.checkpoint import zero1_files
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.grads import (
    clip_coefficient,
    fill_missing_gradients,
    forget_main_grads,
    get_grad_norm,
    main_grad,
)
from tutorial_lib.parallel_layers.marks import copy_tensor_model_parallel_attributes

from .shards import all_gather_into, reduce_scatter_mean, take_shard
from .zero1_state import check_fits_on_all, complete_state, load_shards

_NOT_OPTIONS = ("params", "param_names")


class NeuronZero1Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer class and shards its state over the ranks that hold the same weights.

    The inner optimizer sees a flat float32 shard of each parameter, the master weight; so it has to
    treat each element by itself (Adam and SGD do; LAMB's and Adafactor's per-tensor statistics
    would be those of a shard). Learning rates and other options are read from `param_groups`, where
    schedulers write them, at each step.

    Args:
        params: parameters, named parameters or groups of them; frozen ones may be among them.
        optimizer_class: the inner optimizer.
        optimizer_dtype: of masters, state and accumulated gradients; by default float32, or float64
            for such parameters.
        grad_clipping: clip to `max_norm`; also what makes `grad_norm` available.
        max_norm: 1.0 by default.
        pin_layout: accepted and ignored.
        sharding_groups: who shares the weights; by default the data- (and context-) parallel
            groups.
        grad_norm_groups: accepted if they are the tensor-parallel groups, over which the norm is
            always taken.
        lazy_init: shard nothing until `init_zero` is called.
        bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: size of one collective in 10⁶ bytes;
            0 for one a parameter, by default what suits the device (`buckets.buckets_of`).
        use_grad_acc_hook: accumulate into `param.main_grad` in `optimizer_dtype`; `param.grad` is
            None after backward.
        save_master_weights: put the masters into `state_dict`, by default unlike in the vendor's
            library. Without them a resumed bfloat16 run starts from rounded weights.
        higher_cc_precision: sum gradients over the ranks in `optimizer_dtype` rather than their
            own.
        use_master_weights: False keeps masters and state in each parameter's own dtype.
        **optimizer_defaults: for the inner optimizer.

    Raises:
        RuntimeError: model parallelism is not initialised.
        ValueError: unknown groups, or a `max_norm` that is not above 0.
    """

    def __init__(
        self,
        params,
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: parallel_state.ReplicaGroups | None = None,
        grad_norm_groups: parallel_state.ReplicaGroups | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float | None = None,
        bucket_cap_mb_reduce_scatter: float | None = None,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = True,
        higher_cc_precision: bool = False,
        *,
        use_master_weights: bool = True,
        **optimizer_defaults,
    ):
        tensor_parallel = parallel_state.get_tensor_model_parallel_replica_groups()
        if grad_norm_groups not in (None, tensor_parallel):
            raise ValueError(
                f"grad_norm_groups {grad_norm_groups} are not the tensor-parallel groups "
                f"{tensor_parallel}"
            )
        self.max_norm = 1.0 if max_norm is None else max_norm
        if not self.max_norm > 0:
            raise ValueError(f"max_norm {max_norm} is not above 0")
        self.sharding_groups = sharding_groups or parallel_state.get_data_parallel_replica_groups()
        self._axis = parallel_state.axis_of(self.sharding_groups)
        self.optimizer_class, self.optimizer_dtype = optimizer_class, optimizer_dtype
        self.grad_clipping = grad_clipping
        self.bucket_cap_mb_all_gather = bucket_cap_mb_all_gather
        self.bucket_cap_mb_reduce_scatter = bucket_cap_mb_reduce_scatter
        self.use_grad_acc_hook, self.save_master_weights = use_grad_acc_hook, save_master_weights
        self.higher_cc_precision, self.use_master_weights = higher_cc_precision, use_master_weights
        self.base_optimizer: torch.optim.Optimizer | None = None
        self._grad_norm: torch.Tensor | None = None
        self._hooks: list = []
        super().__init__(params, optimizer_defaults)
        if not lazy_init:
            self.init_zero()

    def __getstate__(self):
        raise TypeError("a ZeRO-1 optimizer, of many ranks, cannot be copied: use its state_dict")

    # --- shards -----------------------------------------------------------------------------------

    def init_zero(self) -> None:
        """Cuts the masters from the parameters as they are now, with no optimizer state yet.

        Call it after loading weights into a model that the optimizer was made for already.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.base_optimizer = self.optimizer_class(
            [self._shard_group(g) for g in self.param_groups], **self.defaults
        )
        self.defaults = self.base_optimizer.defaults
        self._copy_options(self.base_optimizer.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group, at any time; every rank adds the same."""
        super().add_param_group(param_group)
        if self.base_optimizer is not None:
            self.base_optimizer.add_param_group(self._shard_group(self.param_groups[-1]))
            self._copy_options(self.base_optimizer.param_groups, self.param_groups)

    def _shard_group(self, group: dict) -> dict:
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        return {"params": [self._make_shard(p) for p in group["params"]], **options}

    def _make_shard(self, param: torch.Tensor) -> nn.Parameter:
        dtype = self._wide(param) if self.use_master_weights else param.dtype
        shard = nn.Parameter(
            take_shard(param, self._axis.rank, self._axis.size, dtype), param.requires_grad
        )
        copy_tensor_model_parallel_attributes(shard, param)
        shared = getattr(param, "kv_shared_numel", 0)
        if shared:
            end = (self._axis.rank + 1) * shard.numel()
            shard.kv_shared_numel = min(max(end - (param.numel() - shared), 0), shard.numel())
        if self.use_grad_acc_hook and param.requires_grad:
            self._hooks.append(
                param.register_post_accumulate_grad_hook(lambda p: _accumulate(p, self._wide(p)))
            )
        return shard

    def _wide(self, param: torch.Tensor) -> torch.dtype:
        """What masters, state and accumulated gradients of the parameter are kept in."""
        return self.optimizer_dtype or torch.promote_types(param.dtype, torch.float32)

    def pairs(self) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        """Each parameter and its shard on this rank, in the order of the groups."""
        if self.base_optimizer is None:
            raise RuntimeError("the optimizer was made with lazy_init=True: call init_zero() first")
        for group, sharded in zip(self.param_groups, self.base_optimizer.param_groups):
            yield from zip(group["params"], sharded["params"])

    @staticmethod
    def _copy_options(source: list[dict], destination: list[dict]) -> None:
        for group, other in zip(source, destination, strict=True):
            other.update({key: value for key, value in group.items() if key not in _NOT_OPTIONS})

    # --- the step ---------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients at the last step, before clipping; None without clipping."""
        return self._grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, accumulated ones too, which a module's own `zero_grad` does not know."""
        super().zero_grad(set_to_none)
        forget_main_grads(param for group in self.param_groups for param in group["params"])

    @torch.no_grad()
    def step(self, closure=None):
        """Reduces, clips, steps and gathers. Every rank of the mesh calls it.

        Parameters without a gradient on any rank are left alone. Gradients stay as they are: those
        of this rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = list(self.pairs())
        fill_missing_gradients((param for param, _ in pairs), self.sharding_groups)
        if self.use_grad_acc_hook:  # what no hook saw: a gradient set by hand, or filled in
            for param, _ in pairs:
                if param.grad is not None:
                    _accumulate(param, self._wide(param))
        pairs = [(param, shard) for param, shard in pairs if main_grad(param) is not None]
        self._reduce_gradients(pairs)
        self._copy_options(self.param_groups, self.base_optimizer.param_groups)
        self.base_optimizer.step()
        self._copy_options(self.base_optimizer.param_groups, self.param_groups)
        for _, shard in pairs:
            shard.grad = None
        self._gather(pairs)
        return loss

    def _reduce_gradients(self, pairs: list[tuple[torch.Tensor, nn.Parameter]]) -> None:
        shards = [shard for _, shard in pairs]
        dtypes = [shard.dtype for shard in shards]
        grads = [main_grad(param) for param, _ in pairs]
        if self.higher_cc_precision:
            grads = [grad.to(self._wide(param)) for grad, (param, _) in zip(grads, pairs)]
        cap_mb = self.bucket_cap_mb_reduce_scatter
        buffers, grads = reduce_scatter_mean(grads, dtypes, self.sharding_groups, cap_mb)
        for shard, grad in zip(shards, grads):
            shard.grad = grad
        if self.grad_clipping:
            self._grad_norm = get_grad_norm(shards, 2, True, self.sharding_groups)
            coefficient = clip_coefficient(self._grad_norm, self.max_norm)
            for buffer in buffers:  # the shards' gradients are views of them
                buffer.mul_(coefficient)

    def _gather(self, pairs: list[tuple[torch.Tensor, nn.Parameter]]) -> None:
        params, shards = [param for param, _ in pairs], [shard.detach() for _, shard in pairs]
        all_gather_into(params, shards, self.sharding_groups, self.bucket_cap_mb_all_gather)

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def sharding(self) -> dict[str, int]:
        """This rank's place in the group that shares the weights, and the group's size."""
        return {"rank": self._axis.rank, "size": self._axis.size}

    def state_dict(self) -> dict:
        """What this rank holds, and what it takes to cut it for another mesh; see `zero1_state`."""
        return complete_state(self, super().state_dict())

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the `state_dict` of the same rank of a mesh of the same sizes, on every rank.

        With masters in the state, the parameters are written from them. Without, the masters are
        cut from the parameters, so load the model first.

        Raises:
            ValueError: another number of shards, another rank's shard or other parameters; on all
                ranks.
        """
        if self.base_optimizer is None:
            self.init_zero()
        check_fits_on_all(self, state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        load_shards(self, state_dict)
        if "sharded_master_weights" in state_dict:
            with torch.no_grad():
                self._gather(list(self.pairs()))

    def save_sharded_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Writes what every rank holds into a folder: `optim.dp_rank_DD.tp_rank_TT`. The files are
        the vendor's library's, which cuts a parameter along dim 0.

        Args:
            output_dir: on a file system that all ranks see.
            num_workers_per_step: how many ranks of a node write at a time.

        Raises:
            OSError: full disk, read-only folder, …, with the path; on every rank.
        """
        zero1_files.save(self, output_dir, num_workers_per_step)

    def load_sharded_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Loads what `save_sharded_state_dict` wrote, here or in the vendor's library, on a mesh of
        any size. Load the model first, as for `load_state_dict`.

        Raises:
            FileNotFoundError, ValueError: a file is missing, broken, or of another model; with its
                name, on every rank.
        """
        zero1_files.load(self, output_dir, num_workers_per_step)


def _accumulate(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Moves the gradient of a parameter into its `main_grad`."""
    if getattr(param, "main_grad", None) is None:
        param.main_grad = param.grad.detach().to(dtype, copy=True)
    else:
        param.main_grad += param.grad.detach()
    param.grad = None
