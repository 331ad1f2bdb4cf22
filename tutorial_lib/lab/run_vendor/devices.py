"""What the scripts call on torch-xla and `torch.distributed`, with gloo (`cpu`) or XLA between CPU
processes (`xla`) behind it.
"""

import functools
import os

import requests
import torch
import torch.distributed as dist
import torch.utils.checkpoint
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as parallel_loader
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint

from tutorial_lib.backends import init_distributed
from tutorial_lib.parallel_layers import recompute
from tutorial_lib.parallel_layers.marks import keep_ties_and_marks
from tutorial_lib.xla_cpu import NARROW

TIMEOUT = 300.0  # seconds that a step waits, while other ranks compile theirs for example
CPU = torch.device("cpu")
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_meshes: dict[str, list[list[int]]] = {}  # by the name of a process group


def install(backend: str) -> None:
    """Replaces the functions; before the script runs, and before transformers is imported."""
    # What torch-xla would ask its runtime for, which knows one process.
    xr._WORLD_SIZE, xr._ORDINAL = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    xr.local_ordinal = lambda: int(os.environ["LOCAL_RANK"])
    xm.xrt_world_size, xm.get_ordinal = xr.world_size, xr.global_ordinal  # older names
    xm.rendezvous = lambda tag, payload=b"", replicas=(): dist.barrier()
    replace(requests, "put", _no_metadata)
    replace(dist, "init_process_group", functools.partial(_init_process_group, backend))
    replace(dist, "new_group", _new_group)
    replace(torch.utils.checkpoint, "checkpoint", _checkpoint)
    torch_xla.utils.checkpoint.checkpoint = torch.utils.checkpoint.checkpoint
    dist.ProcessGroup._mesh = property(mesh_of)  # as torch-xla's process groups have it
    if backend == "xla":
        from tutorial_lib.xla_cpu import reading

        replace(dist, "all_reduce", _traced_all_reduce)
        replace(dist, "all_gather", _traced_all_gather)
        replace(reading, "_check", _end_step)
        torch.nn.Module.to = _moved
        return
    replace(dist, "all_reduce", _waited_all_reduce)
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        replace(torch, name, _make_here)
    torch_xla.device = lambda index=None: CPU
    torch_xla.sync = lambda wait=False, reset_scope=True: xm._run_step_closures()
    xm.all_reduce, xm.all_gather = _all_reduce, _all_gather
    parallel_loader.MpDeviceLoader = DeviceLoader


def replace(module, name: str, function) -> None:
    """Has `module.name(…)` call `function(original, …)`."""
    setattr(module, name, functools.partial(function, getattr(module, name)))


def _init_process_group(ours: str, original, /, *args, **options) -> None:
    if "xla" not in (*args[:1], options.get("backend")):
        original(*args, **options)
        return
    # torch-xla reads these once, at its first tensor, and would store float32 as bfloat16. The
    # script finds them again.
    hidden = {name: os.environ.pop(name) for name in NARROW if name in os.environ}
    init_distributed(ours, TIMEOUT)
    os.environ |= hidden
    if hidden and dist.get_rank() == 0:
        print(f"run_vendor: float32 stays float32 here, for all that {' and '.join(hidden)} is set")


def _no_metadata(original, url, *args, **options):
    """The scripts ask an instance for its type, and would wait minutes for the answer."""
    raise requests.ConnectionError(f"{url} is asked on an instance only")


def _new_group(original, ranks=None, *args, pg_options=None, **options):
    return original(ranks, *args, **options)  # gloo does not know the options of torch-xla


def _checkpoint(original, function, *args, use_reentrant=None, preserve_rng_state=None, **options):
    """Recomputation that knows XLA's devices, which torch's own does not; it calls the original."""
    if options:
        options |= {"use_reentrant": use_reentrant, "preserve_rng_state": preserve_rng_state}
        return original(function, *args, **options)
    return recompute.checkpoint(function, *args)


def mesh_of(group: dist.ProcessGroup | None) -> list[list[int]]:
    """The replica groups that a process group belongs to: all ranks call it, each with its own."""
    group = dist.group.WORLD if group is None else group
    if group.group_name not in _meshes:
        groups = [None] * dist.get_world_size()
        dist.all_gather_object(groups, dist.get_process_group_ranks(group))
        _meshes[group.group_name] = [list(ranks) for ranks in sorted(set(map(tuple, groups)))]
    return _meshes[group.group_name]


# --- xla: collectives of torch.distributed, traced ------------------------------------------------


def _traced_all_reduce(original, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if tensor.device.type != "xla":
        return original(tensor, op, group, async_op)
    kind = next((kind for kind, reduction in REDUCTIONS.items() if reduction == op), None)
    if kind is None:
        raise ValueError(f"{op} is not one of {', '.join(REDUCTIONS)}")
    return xm.all_reduce(kind, [tensor], groups=mesh_of(group), pin_layout=False)


def _traced_all_gather(original, tensors, tensor, group=None, async_op=False):
    if tensor.device.type != "xla":
        return original(tensors, tensor, group, async_op)
    gathered = xm.all_gather(tensor[None], groups=mesh_of(group), pin_layout=False)
    for destination, part in zip(tensors, gathered, strict=True):
        destination.copy_(part)
    return None


def _moved(module: torch.nn.Module, *args, own=torch.nn.Module.to, **options) -> torch.nn.Module:
    """`module.to(…)`, as `move_model_to_device` does it: Megatron would lose its parameters' marks,
    and with them all shards but those of the first rank in the norm of the gradients.
    """
    keep_ties_and_marks(module, lambda: own(module, *args, **options))
    return module


def _end_step(original, tensors: list[torch.Tensor]) -> None:
    """Where the course refuses to read a value before the step has ended: ends it. All ranks do."""
    try:
        original(tensors)
    except RuntimeError:
        torch_xla.sync()


# --- cpu: torch-xla's functions on gloo -----------------------------------------------------------


def _waited_all_reduce(original, *args, async_op=False, **options):
    """Megatron never waits for its asynchronous ones: XLA keeps their order, gloo does not."""
    work = original(*args, async_op=True, **options)
    work.wait()
    return work if async_op else None


def _make_here(original, *args, device=None, **options) -> torch.Tensor:
    """`torch.ones(…, device="xla")`, for example: on the CPU."""
    return original(*args, device=CPU if device == "xla" else device, **options)


class DeviceLoader:
    """`MpDeviceLoader`: ends the step after each batch."""

    def __init__(self, loader, device, **options):
        self._loader = loader

    def __iter__(self):
        for batch in self._loader:
            yield batch
            torch_xla.sync()

    def __len__(self):
        return len(self._loader)


@functools.cache
def _group_of(mesh: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    groups = [dist.new_group(ranks) for ranks in mesh]
    return next(group for group, ranks in zip(groups, mesh) if dist.get_rank() in ranks)


def _find_group(groups: list[list[int]] | None) -> dist.ProcessGroup:
    return _group_of(tuple(map(tuple, groups))) if groups else dist.group.WORLD


def _all_reduce(kind, inputs, scale=1.0, groups=None, pin_layout=True):
    """In place for a list, a new tensor for a tensor, as torch-xla does it."""
    alone = isinstance(inputs, torch.Tensor)
    tensors = [inputs.detach().clone()] if alone else list(inputs)
    for tensor in tensors:
        dist.all_reduce(tensor, REDUCTIONS[kind], _find_group(groups))
        if scale != 1.0:
            tensor.mul_(scale)
    return tensors[0] if alone else inputs


def _all_gather(value, dim=0, groups=None, output=None, pin_layout=True):
    group = _find_group(groups)
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group)
    return torch.cat(parts, dim)
