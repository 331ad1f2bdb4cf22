"""The backends `cpu`, `cuda`, `neuron` and `xla`: a rank's environment, its process group, its
device, the end of its step.

Whatever depends on a device asks here, so a further eager one is an entry of `EAGER`. The same
calls serve the ranks of a notebook (`tutorial_lib.lab.mesh`), `torchrun`, SLURM and the
tests.
"""

import gc
import importlib.util
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutorial_lib.network import interface_towards

# Backends that run each operation at once, with the library of their collectives. The device of
# each is a module of torch: `torch.cpu`, `torch.cuda`, and `torch.neuron`, which the vendor's
# package adds when torch is imported.
EAGER = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}
BACKENDS = (*EAGER, "xla")
NEURON_ROOT_PORT = 62182  # torch-xla's own choice

# A forked process, such as a loader's worker, must not collect its parent's garbage: a process
# group there would join threads that only the parent has, and crash.
os.register_at_fork(after_in_child=gc.freeze)


def is_installed(*modules: str) -> bool:
    """Whether all of these can be imported; none of them is."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


def on_trainium(backend: str) -> bool:
    """True if a rank of this backend owns a NeuronCore.

    For `xla` the vendor's PJRT plugin decides; elsewhere `xla` means XLA between CPU processes. The
    package `torch-neuronx` proves nothing: up to 2.9 it was a part of that plugin, and from 2.13 on
    it is the `neuron` device.
    """
    return backend == "neuron" or (backend == "xla" and is_installed("libneuronxla", "torch_xla"))


def only_compiles() -> bool:
    """Whether `neuron_parallel_compile` runs this program: graphs are then compiled and not run, so
    no value means anything.
    """
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "") not in ("", "0")


def device_count(backend: str) -> int:
    """How many devices of an eager backend torch sees on this machine."""
    device = getattr(torch, backend, None)
    return device.device_count() if device is not None and device.is_available() else 0


def check_backend(backend: str, local_ranks: int = 1) -> str:
    """The backend; for `auto`, the first of `neuron`, `xla` on Trainium, `cuda` and `cpu` that
    works here.

    Args:
        local_ranks: ranks on this machine; each needs a device, except on `cpu` and `xla`.

    Raises:
        ValueError: it is unknown or cannot work here; says what is missing.
    """
    if backend == "auto":
        works = {b: device_count(b) for b in EAGER} | {"xla": on_trainium("xla")}
        return next(b for b in ("neuron", "xla", "cuda", "cpu") if works[b])
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    if backend not in ("cpu", "xla") and (seen := device_count(backend)) < local_ranks:
        raise ValueError(
            f"backend {backend!r} needs a device for each of {local_ranks} ranks; torch sees {seen}"
        )
    if backend == "xla" and not (on_trainium("xla") or is_installed("torch_xla", "jax")):
        raise ValueError(
            "backend 'xla' needs torch_xla and jax, and at least one is missing: on Linux with "
            "Python 3.11 to 3.13, pip install 'tutorial-lib[xla]'"
        )
    return backend


def rank_environment(
    backend: str,
    rank: int,
    world_size: int,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    *,
    master_addr: str = "127.0.0.1",
    master_port: int,
    threads: int = 1,
    root_addr: str | None = None,
) -> dict[str, str]:
    """The environment of one rank, as `torchrun` would set it, to be in place before torch-xla is
    imported.

    Args:
        backend: one of `BACKENDS`.
        rank, world_size: this rank and the number of ranks over all nodes.
        local_rank, local_world_size: rank and number of ranks on this node; by default a single
            node.
        master_addr, master_port: where rank 0 serves the rendezvous. An address rather than a name:
            a laptop's own name often does not resolve.
        threads: threads each rank computes with. More ranks × threads than cores slow every rank
            down.
        root_addr: where rank 0 runs, if that is not where the rendezvous is served; the runtimes of
            Trainium meet there.
    """
    local_rank = rank if local_rank is None else local_rank
    local_world_size = world_size if local_world_size is None else local_world_size
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if backend == "xla" and on_trainium("xla"):
        # torch-xla derives NEURON_RT_VISIBLE_CORES, NEURON_PJRT_PROCESS_INDEX and the rest from
        # the variables above, at import, if it believes that torchrun started the process
        # (torch_xla/_internal/neuron.py).
        environment["TORCHELASTIC_RUN_ID"] = "tutorial"
        environment["PJRT_DEVICE"] = "NEURON"
        environment["NEURON_RT_ROOT_COMM_ID"] = f"{root_addr or master_addr}:{NEURON_ROOT_PORT}"
        if world_size > local_world_size:
            # The network between trn1 nodes, as the published job scripts set it.
            environment["FI_PROVIDER"] = "efa"
            environment["FI_EFA_USE_DEVICE_RDMA"] = environment["FI_EFA_FORK_SAFE"] = "1"
    elif backend == "xla":
        # Each process is a world of one to torch-xla, which would drop its collectives.
        environment |= {"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1"}
    return environment


def init_distributed(backend: str, timeout: float = 60.0, store: dist.Store | None = None) -> None:
    """Joins the process group that the environment describes (`rank_environment`, or `torchrun`).

    Args:
        backend: one of `EAGER` (with gloo for what lives on the host) or `xla`: torch-xla's own on
            Trainium; elsewhere gloo for the host and `tutorial_lib.xla_cpu` for what is traced.
        timeout: seconds that a host-side collective waits for its peers.
        store: where the ranks meet, in place of the one at MASTER_ADDR and MASTER_PORT.
    """
    backend = check_backend(backend)
    limit = timedelta(seconds=timeout)
    options = {"timeout": limit}
    if store is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        options |= {"store": store, "rank": rank, "world_size": world_size}
    # gloo would take the interface that has the machine's name, which on Debian is the loopback
    # one.
    if "MASTER_ADDR" in os.environ and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(os.environ["MASTER_ADDR"])
    # Otherwise a group made later would get torch's default time-out, half an hour, and not the
    # world's.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
    group = "gloo"
    if backend == "xla" and on_trainium("xla"):
        import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend

        group = "xla"
    elif backend not in ("cpu", "xla"):
        getattr(torch, backend).set_device(int(os.environ["LOCAL_RANK"]) % device_count(backend))
        group = f"cpu:gloo,{backend}:{EAGER[backend]}"
    dist.init_process_group(group, **options)
    if backend == "xla" and group == "gloo":
        from tutorial_lib import xla_cpu

        xla_cpu.start(timeout)


def current_backend() -> str:
    """The backend that this process computes with, as its process group says; else `cpu`."""
    if uses_xla():
        return "xla"
    groups = dist.get_backend_config() if dist.is_initialized() else ""
    found = (b for b in EAGER if b != "cpu" and EAGER[b] in groups and device_count(b))
    return next(found, "cpu")


def get_device(backend: str | None = None) -> torch.device:
    """The device that this rank computes on; by default that of its `current_backend`."""
    backend = backend or current_backend()
    if backend == "xla":
        import torch_xla

        return torch_xla.device()
    return torch.device(backend)  # of several, the one that `init_distributed` has set


def uses_xla() -> bool:
    """Whether this process computes with torch-xla. An import proves nothing: other libraries do it
    too.
    """
    xla_cpu = sys.modules.get("tutorial_lib.xla_cpu")
    started = xla_cpu is not None and xla_cpu.is_started()
    return dist.is_initialized() and (started or dist.get_backend() == "xla")


def mark_step() -> None:
    """The end of a step: on `xla`, what was traced since the last one is compiled (the first time)
    and run.

    The same as torch-xla's own `torch_xla.sync()`, for code that runs on every backend; elsewhere
    nothing waits to be run. Every rank calls it, once a step and before it reads a value of that
    step.
    """
    if uses_xla():
        import torch_xla

        torch_xla.sync()


def compilations() -> int:
    """How many graphs this process has compiled; 0 where nothing is traced."""
    if not uses_xla():
        return 0
    import torch_xla.debug.metrics

    # Graphs that torch-xla compiles itself: all on Trainium; elsewhere those of values read within
    # a step.
    timed = torch_xla.debug.metrics.metric_data("CompileTime")
    own = 0 if timed is None else timed[0]
    if on_trainium("xla"):
        return own
    from tutorial_lib import xla_cpu

    return own + xla_cpu.compilations()
