"""XLA between CPU processes: the `xla` backend on machines without Trainium.

torch-xla traces each rank's step as it would for Trainium, collectives with their replica groups
included. Its own CPU client cannot reach another process, though. So at the step boundary the
pending graph goes to jaxlib's client instead, which compiles it as one replica of a program of
`world_size` and runs its collectives between the processes:

    trace (torch-xla) → HLO → compile and run (jaxlib) → results become the tensors' data

`start()` puts this behind the calls that a program for Trainium makes: `torch_xla.sync()`,
`xm.mark_step()`, `xm.optimizer_step(..., barrier=True)`, `MpDeviceLoader`, `xr.world_size()`,
`xr.global_ordinal()`. `stop()` takes it away. README.md has what this relies on.

- `tensors`: which tensors are pending, and how one gets its result.
- `saved`: what autograd still holds of them.
- `client`: the processes' connection, execution with a time-out.
- `compiler`: each graph is compiled by one rank, and kept for the others and for later runs.
- `reading`: a value that depends on a collective cannot be read before the step.
- `graphs`: the collectives of a compiled graph.
"""

import atexit
import os

import torch.distributed as dist

NARROW = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")  # torch-xla then stores float32 as bfloat16
# Errors alone; torch-xla reads it when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
_boundary = None


def start(timeout: float = 60.0) -> None:
    """Connects the processes of the default process group and takes over torch-xla's step boundary.

    Every rank calls it, before its first XLA tensor. It may be called again after `stop()`.

    Args:
        timeout: seconds that a step waits for ranks that do not reach theirs.

    Raises:
        ValueError: a variable asks torch-xla to store float32 as bfloat16.
        RuntimeError: it is started already, or the process group is missing.
    """
    for name in NARROW:
        if os.environ.get(name, "0") not in ("", "0"):
            raise ValueError(
                f"{name}={os.environ[name]}: XLA between CPU processes does not store float32 as "
                "bfloat16. Unset the variable; a bfloat16 model does without it"
            )
    global _boundary
    if _boundary is not None:
        raise RuntimeError("XLA between CPU processes is started already: stop() comes first")
    if not dist.is_initialized():
        raise RuntimeError(
            "XLA between CPU processes needs a process group: call init_process_group first"
        )
    from .step import StepBoundary

    _boundary = StepBoundary(dist.get_rank(), dist.get_world_size(), timeout)
    atexit.register(stop)


def stop() -> None:
    """Gives torch-xla its own step boundary back and disconnects. No rank waits for another, save
    rank 0 for all.
    """
    global _boundary
    if _boundary is not None:
        atexit.unregister(stop)
        boundary, _boundary = _boundary, None
        boundary.close()


def is_started() -> bool:
    return _boundary is not None


def compilations() -> int:
    """How many graphs this process has compiled since `start()`. A graph that several ranks run is
    compiled by one of them.
    """
    return 0 if _boundary is None else _boundary.client.compiler.compilations


def hlo_texts() -> list[str]:
    """The different graphs that this rank has run since `start()`, in the order of their first use,
    as torch-xla traced them, before XLA's own passes: what a compiler for Trainium would get.

    A training loop needs few: each micro-batch after the first runs the same one, and each step
    after the first another.
    """
    graphs = {} if _boundary is None else _boundary.client.graphs
    return [graph.computation.as_hlo_text() for graph in graphs.values()]
