"""The backends `cpu`, `cuda` and `xla`: a rank's environment, its process group, its device, the
end of its step.

The same calls serve the ranks of a notebook (`tutorial_lib.lab.mesh`), `torchrun`, SLURM and the
tests.
"""

import importlib.util
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutorial_lib.network import interface_towards

BACKENDS = ("cpu", "cuda", "xla")
NEURON_ROOT_PORT = 62182  # torch-xla's own choice


def on_trainium() -> bool:
    """True where the vendor's PJRT plugin is installed; elsewhere `xla` means XLA between CPU
    processes.
    """
    return importlib.util.find_spec("libneuronxla") is not None


def only_compiles() -> bool:
    """Whether `neuron_parallel_compile` runs this program: graphs are then compiled and not run, so
    no value means anything.
    """
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "") not in ("", "0")


def check_backend(backend: str) -> None:
    """Raises ValueError if `backend` is unknown or cannot work on this machine, with what is
    missing.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend 'cuda' needs a CUDA device, and torch sees none here")
    if backend == "xla" and not on_trainium():
        missing = [m for m in ("torch_xla", "jax") if importlib.util.find_spec(m) is None]
        if missing:
            python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
            raise ValueError(
                f"backend 'xla' needs {' and '.join(missing)}, missing here ({sys.platform}, "
                f"{python}); XLA between CPU processes runs on Linux with Python 3.11 to 3.13: "
                "pip install 'tutorial-lib[xla]'"
            )


def rank_environment(
    backend: str,
    rank: int,
    world_size: int,
    *,
    master_addr: str = "127.0.0.1",
    master_port: int,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    threads: int = 1,
    root_addr: str | None = None,
) -> dict[str, str]:
    """The environment of one rank, as `torchrun` would set it, to be in place before torch-xla is
    imported.

    Args:
        backend: one of `BACKENDS`.
        rank, world_size: this rank and the number of ranks over all nodes.
        master_addr, master_port: where rank 0 serves the rendezvous. An address rather than a name:
            a laptop's own name often does not resolve.
        local_rank, local_world_size: rank and number of ranks on this node; by default a single
            node.
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
    if backend == "xla" and on_trainium():
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
        environment["PJRT_DEVICE"] = "CPU"
        # Each process is a world of one to torch-xla, which would drop its collectives.
        environment["XLA_ALWAYS_ALLREDUCE"] = "1"
    return environment


def init_distributed(backend: str, timeout: float = 60.0, store: dist.Store | None = None) -> None:
    """Joins the process group that the environment describes (`rank_environment`, or `torchrun`).

    Args:
        backend: `cpu` (gloo), `cuda` (NCCL, with gloo for what lives on the host) or `xla`:
            torch-xla's own on Trainium; elsewhere gloo for the host and `tutorial_lib.xla_cpu` for
            what is traced.
        timeout: seconds that a host-side collective waits for its peers.
        store: where the ranks meet, in place of the one at MASTER_ADDR and MASTER_PORT.
    """
    check_backend(backend)
    limit = timedelta(seconds=timeout)
    options = {"timeout": limit}
    if store is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        options |= {"store": store, "rank": rank, "world_size": world_size}
    # gloo would take the interface that has the machine's name, which on Debian is the loopback
    # one.
    if "MASTER_ADDR" in os.environ and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(os.environ["MASTER_ADDR"])
    # A group that is made later gets torch's own default otherwise, half an hour, and not the
    # time-out of the world.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
    if backend == "cpu":
        dist.init_process_group("gloo", **options)
    elif backend == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl", **options)
    elif on_trainium():
        import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend

        dist.init_process_group("xla", **options)
    else:
        dist.init_process_group("gloo", **options)
        from tutorial_lib import xla_cpu

        xla_cpu.start(timeout)


def get_device(backend: str) -> torch.device:
    """The device that this rank computes on."""
    if backend == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    if backend == "xla":
        import torch_xla

        return torch_xla.device()
    return torch.device("cpu")


def uses_xla() -> bool:
    """Whether this process computes with torch-xla. That it is imported proves nothing: other
    libraries do that.
    """
    if not dist.is_initialized():
        return False
    xla_cpu = sys.modules.get("tutorial_lib.xla_cpu")
    return dist.get_backend() == "xla" or (xla_cpu is not None and xla_cpu.is_started())


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

    # Those that torch-xla compiles itself: all on Trainium; elsewhere what was read without an end
    # of the step.
    timed = torch_xla.debug.metrics.metric_data("CompileTime")
    own = 0 if timed is None else timed[0]
    if on_trainium():
        return own
    from tutorial_lib import xla_cpu

    return own + xla_cpu.compilations()
