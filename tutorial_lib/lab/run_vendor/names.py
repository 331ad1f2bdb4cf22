"""`neuronx_distributed`, as the scripts import it: the modules of this library under the vendor's
names, with what only the scripts need.
"""

import importlib
import math
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from tutorial_lib.optimizer import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import mappings
from tutorial_lib.parallel_layers.grads import allreduce_sequence_parallel_gradients
from tutorial_lib.parallel_layers.sharded_module import ShardedModule

VENDOR = "neuronx_distributed"
MOVED = {
    "parallel_state": "parallel_layers.parallel_state",
    "optimizer.zero_redundancy_optimizer": "optimizer.zero1",
    "trainer.trainer": "trainer",
    "trainer.checkpoint": "checkpoint",
}


def reduce_in_place(x: torch.Tensor) -> torch.Tensor:
    """`reduce_from_tensor_model_parallel_region` as in the vendor's library, which changes its
    argument: the older scripts call it on a gradient for that effect. Ours is pure.
    """
    reduced = mappings.reduce_from_tensor_model_parallel_region(x)
    if x.requires_grad:
        return reduced
    Zero1.script_sums = True
    return x.copy_(reduced)


class Zero1(NeuronZero1Optimizer):
    """Sums the gradients that sequence parallelism leaves partial, unless the script does. The
    newer one of GPT-NeoX 20B does not, so its replicated weights would drift apart.
    """

    script_sums = False

    def step(self, closure=None):
        if not Zero1.script_sums:
            allreduce_sequence_parallel_gradients(self)
        return super().step(closure)


def rotate_half(x: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    return torch.cat((-second, first), dim)


def apply_rotary_pos_emb(
    q, k, cos, sin, position_ids=None, use_flash_attn=False, transpose_nki_inputs=False
):
    """Rotates heads `[B, N, S, D]`, or `[B, N, D, S]` where the vendor's kernel wants them so."""
    cos, sin, dim = cos.unsqueeze(1), sin.unsqueeze(1), -1
    if use_flash_attn and transpose_nki_inputs:
        cos, sin, dim = cos.transpose(2, 3), sin.transpose(2, 3), -2
    return tuple(x * cos + rotate_half(x, dim) * sin for x in (q, k))


def nki_flash_attn_func(q, k, v, *_, transpose_nki_inputs: bool = True, **__) -> torch.Tensor:
    """What the vendor's kernel for Trainium computes, causal attention, in torch's words."""
    if transpose_nki_inputs:
        q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


# What the scripts import and this library lacks, by the module in which they look for it.
ADDED = {
    "kernels": {},
    "kernels.flash_attn": {"nki_flash_attn_func": nki_flash_attn_func},
    "kernels.ring_attention_kernel": {"nki_ring_attn_func": None},  # for context parallelism
    "optimizer": {"NeuronZero1Optimizer": Zero1},
    "optimizer.zero_redundancy_optimizer": {"NeuronZero1Optimizer": Zero1},
    "overrides": {},
    "overrides.transformer_overrides": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    "parallel_layers.mappings": {
        "reduce_from_tensor_model_parallel_region": reduce_in_place,
        "_split_along_first_dim": mappings.scatter_to_sequence_parallel_region,
        "_gather_along_first_dim": mappings.gather_from_sequence_parallel_region,
    },
    "parallel_layers.parallel_state": {
        "get_context_model_parallel_rank": lambda: 0,
        "get_context_model_parallel_src_tgt_pairs": lambda: None,
    },
    "parallel_layers.utils": {
        "get_local_world_size": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
        "is_pjrt_device": lambda: False,  # asked before the process group is made the old way
        "requires_init_pg_override": lambda: False,
    },
    "utils.batch_utils": {"get_batch_on_this_context_parallel_rank": lambda batch: batch},
}


class Alias(MetaPathFinder, Loader):
    """Finds the vendor's modules. Each is a module of its own with the contents of ours, so that
    what is added to it is not added to the library.
    """

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == VENDOR:
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        below = module.__name__.removeprefix(VENDOR).removeprefix(".")
        path = "tutorial_lib." + MOVED.get(below, below)
        try:
            ours = importlib.import_module(path.rstrip("."))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            if below not in ADDED:
                message = f"{module.__name__} is beyond what the tutorials teach: no {path} here"
                raise ModuleNotFoundError(message, name=module.__name__) from None
            ours = None
        for name, value in vars(ours or module).copy().items():
            if not name.startswith("__") and not isinstance(value, ModuleType):
                setattr(module, name, value)
        vars(module).update(ADDED.get(below, {}))

        def look_up(name: str):
            """A module below this one, or what ours imports when it is asked for."""
            if not name.startswith("__"):
                try:
                    return importlib.import_module(f"{module.__name__}.{name}")
                except ModuleNotFoundError:
                    if ours is not None:
                        return getattr(ours, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = look_up


def install() -> None:
    """Makes `import neuronx_distributed` find this library."""
    sys.meta_path.insert(0, Alias())
    # Meta-device initialisation calls these on the layers.
    ShardedModule.init_weight_cpu = lambda layer: layer.reset_parameters()
    ShardedModule.initialize_weight_biases = ShardedModule.init_weight_cpu
    # Megatron switches off a cache of Trainium's runtime, and has names that torch and NumPy had.
    operations = SimpleNamespace(set_unload_prior_neuron_models_mode=lambda mode: None)
    sys.modules.setdefault("torch_neuronx.xla_impl.ops", operations)
    sys.modules.setdefault("torch._six", SimpleNamespace(inf=math.inf))
    np.float = float
