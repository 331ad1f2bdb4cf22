"""ZeRO stage 1: each data-parallel rank keeps, and steps, its shard of the optimizer's state.

(Rajbhandari et al., 2020.)

One step reduce-scatters the gradients, clips by the norm over all shards, steps the shards with any
optimizer and all-gathers the weights: together the traffic of the all-reduce that plain data
parallelism does. Interface: `neuronx_distributed.optimizer.NeuronZero1Optimizer`.
"""

import weakref
from collections import defaultdict

import torch
from torch import nn

from tutorial_lib.checkpoint import zero1_files
from tutorial_lib.parallel_layers import grads, parallel_state, ranks
from tutorial_lib.parallel_layers.flat_shards import as_rows, take_shard

from .finite_step import check_finite, update_where
from .zero1_collectives import all_gather_into, reduce_scatter_mean
from .zero1_state import check_fits, complete_state, load_shards


class NeuronZero1Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer class and shards its state over the ranks that hold the same weights.

    The inner optimizer sees a flat shard of each parameter in float32 (float64 for such
    parameters), the master weight; so it has to treat each element by itself (Adam and SGD do;
    LAMB's and Adafactor's per-tensor statistics would be those of a shard).

    `step` uses what the model and this optimizer hold when it is called, and hands it to the inner
    optimizer anew each time: weights (however they were changed; a master that still rounds to its
    weight keeps its further digits), gradients, groups with their options, and state, of which
    `state[param]` is this rank's shard.

    Args:
        params: parameters, named parameters or groups of them; frozen ones may be among them.
        optimizer_class: the inner optimizer.
        grad_clipping: clip to `max_norm`; also what makes `grad_norm` available.
        max_norm: 1.0 by default.
        pin_layout: accepted and ignored.
        sharding_groups: the ranks with the same weights; by default the data-parallel groups.
        grad_norm_groups: accepted if they are the tensor-parallel groups, over which the norm is
            always taken.
        use_grad_acc_hook: accumulate in float32, so that `param.grad` is float32.
        save_master_weights: put the masters into `state_dict`, by default unlike in the vendor's
            library. Without them a resumed bfloat16 run starts from rounded weights.
        use_master_weights: False keeps masters and state in each parameter's own dtype.
        **optimizer_defaults: for the inner optimizer.

    Attributes:
        grad_norm: the norm of all gradients at the last step, before clipping; None without
            clipping.
        skipped_steps: how many steps were left out, a 0-d tensor.

    Raises:
        RuntimeError: model parallelism is not initialised.
        ValueError: unknown groups, or a `max_norm` that is not above 0.
    """

    def __init__(
        self,
        params,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: parallel_state.ReplicaGroups | None = None,
        grad_norm_groups: parallel_state.ReplicaGroups | None = None,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = True,
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
        self.optimizer_class, self.grad_clipping = optimizer_class, grad_clipping
        self.use_grad_acc_hook, self.save_master_weights = use_grad_acc_hook, save_master_weights
        self.use_master_weights = use_master_weights
        self.grad_norm: torch.Tensor | None = None
        self.skipped_steps = torch.tensor(0)
        self._shards: dict[torch.Tensor, nn.Parameter] = {}
        super().__init__(params, optimizer_defaults)
        self.init_zero()

    def __reduce_ex__(self, protocol):
        raise TypeError("a ZeRO-1 optimizer, of many ranks, cannot be copied: use its state_dict")

    def init_zero(self) -> None:
        """Makes the inner optimizer, without state, of shards of the parameters as they are now.

        The published scripts call it after they have loaded weights. Nothing has to: a step takes
        over weights that were loaded later.
        """
        self.state.clear()
        self.base_optimizer = self.optimizer_class(self._sharded_groups(), **self.defaults)
        self.defaults = self.base_optimizer.defaults
        self._take_back()

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group, at any time; every rank adds the same."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            self._shard_of(param)

    def pairs(self) -> list[tuple[torch.Tensor, nn.Parameter]]:
        """Each parameter and its shard on this rank, in the order of the groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        return [(param, self._shard_of(param)) for param in params]

    def _sharded_groups(self) -> list[dict]:
        groups = [{**group, "params": []} for group in self.param_groups]
        for group, sharded in zip(self.param_groups, groups):
            sharded.pop("param_names", None)
            sharded["params"] = [self._shard_of(param) for param in group["params"]]
        return groups

    def _shard_of(self, param: torch.Tensor) -> nn.Parameter:
        if param not in self._shards:
            self._shards[param] = self._make_shard(param)
        return self._shards[param]

    def _make_shard(self, param: torch.Tensor) -> nn.Parameter:
        rank, size = self._axis.rank, self._axis.size
        shard = nn.Parameter(take_shard(param, rank, size, self._master_dtype(param)))
        vars(shard).update(vars(param))  # its marks
        shared = getattr(param, "kv_shared_numel", 0)
        if shared:
            end = (rank + 1) * shard.numel()
            shard.kv_shared_numel = min(max(end - (param.numel() - shared), 0), shard.numel())
        if self.use_grad_acc_hook:
            handle = grads.accumulate_widely(param)
            weakref.finalize(self, handle.remove)  # an optimizer that is gone accumulates nothing
        return shard

    def _master_dtype(self, param: torch.Tensor) -> torch.dtype:
        return grads.wide_dtype(param) if self.use_master_weights else param.dtype

    @torch.no_grad()
    def take_over_weights(self) -> None:
        """Gives the masters the weights that the model has now, where these are not the masters'
        own, rounded.

        Raises:
            ValueError: a parameter has another size than when the optimizer was made.
        """
        for param, shard in self.pairs():
            dtype = self._master_dtype(param)
            if (shard.device, shard.dtype) != (param.device, dtype):
                shard.data = shard.data.to(param.device, dtype)
            weights = as_rows(param, self._axis.size)[self._axis.rank]
            if weights.shape != shard.shape:
                raise ValueError(
                    f"a parameter has shape {tuple(param.shape)} and a shard of {len(weights)} "
                    f"elements, and had one of {len(shard)}: make a new optimizer for it"
                )
            if dtype != weights.dtype:
                unchanged = shard.to(weights.dtype) == weights
                weights = torch.where(unchanged, shard, weights.to(dtype))
            shard.copy_(weights)

    def _hand_over(self) -> None:
        """Gives the inner optimizer the groups and the state that this one has now."""
        base, state = self.base_optimizer, self.state.items()
        base.param_groups = self._sharded_groups()
        base.state = defaultdict(dict, {self._shard_of(param): value for param, value in state})

    def _take_back(self) -> None:
        """Takes back what a step or a load has changed."""
        base = self.base_optimizer
        for group, sharded in zip(self.param_groups, base.param_groups, strict=True):
            group.update(sharded | {"params": group["params"]})
        for param, shard in self.pairs():
            if shard in base.state:
                self.state[param] = base.state[shard]

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
        pairs = self.pairs()
        grads.fill_missing_gradients((param for param, _ in pairs), self.sharding_groups)
        self.take_over_weights()
        self._hand_over()
        pairs = [(param, shard) for param, shard in pairs if param.grad is not None]

        def update() -> None:
            self.base_optimizer.step()
            self._gather(pairs)

        try:
            finite = self._reduce_gradients(pairs)
            update_where(finite, update, self.base_optimizer, [param for param, _ in pairs])
        finally:
            for _, shard in pairs:
                shard.grad = None
        self.skipped_steps = self.skipped_steps.to(finite.device) + ~finite
        self._take_back()
        return loss

    def _reduce_gradients(self, pairs: list[tuple[torch.Tensor, nn.Parameter]]) -> torch.Tensor:
        """Gives each shard its gradient, clipped; returns whether all gradients are finite."""
        shards = [shard for _, shard in pairs]
        dtypes = [shard.dtype for shard in shards]
        gradients = [param.grad for param, _ in pairs]
        if self.use_grad_acc_hook:  # also those that no backward has made
            gradients = [
                grad.to(grads.wide_dtype(param)) for grad, (param, _) in zip(gradients, pairs)
            ]
        buffers, gradients = reduce_scatter_mean(gradients, dtypes, self.sharding_groups)
        for shard, grad in zip(shards, gradients):
            shard.grad = grad
        norm = grads.get_grad_norm(shards, self.sharding_groups)
        finite = check_finite(norm, self.param_groups)
        if self.grad_clipping:
            self.grad_norm = norm
            coefficient = grads.clip_coefficient(norm, self.max_norm)
            for buffer in buffers:  # the shards' gradients are views of them
                buffer.mul_(coefficient)
        return finite

    def _gather(self, pairs: list[tuple[torch.Tensor, nn.Parameter]]) -> None:
        params, shards = [param for param, _ in pairs], [shard.detach() for _, shard in pairs]
        all_gather_into(params, shards, self.sharding_groups)

    @property
    def sharding(self) -> dict[str, int]:
        """This rank's place in the group that shares the weights, and the group's size."""
        return {"rank": self._axis.rank, "size": self._axis.size}

    def state_dict(self) -> dict:
        """What this rank holds, and what it takes to shard it for another mesh; see
        `zero1_state`.
        """
        self.take_over_weights()
        return complete_state(self, super().state_dict())

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the `state_dict` of the same rank of a mesh of the same sizes, on every rank.

        With masters in the state, the parameters are written from them. Without, the masters are
        taken from the parameters, so load the model first.

        Raises:
            ValueError: another number of shards, another rank's shard or other parameters; on all
                ranks.
        """
        ranks.together(check_fits, state_dict, self)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._hand_over()
        load_shards(self, state_dict)
        self._take_back()
        if "sharded_master_weights" in state_dict:
            with torch.no_grad():
                self._gather(self.pairs())

    def save_sharded_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Writes what every rank holds into a folder: `optim.dp_rank_DD.tp_rank_TT`.

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
