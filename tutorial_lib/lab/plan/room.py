"""Whether a machine can hold a training: asked by a notebook before it allocates anything."""

from transformers import PretrainedConfig

from tutorial_lib.training.memory import require_memory

from .dry_run import dry_run
from .parameters import parameter_count
from .runs import Run


def require_room(
    config: PretrainedConfig, mesh, batch_size: int, seq_length: int, **switches
) -> None:
    """Refuses a training with AdamW that the ranks of a mesh have no room for.

    Args:
        config: of the model.
        mesh: a `lab.mesh.Mesh`, not started yet.
        batch_size, seq_length: of a micro-batch of one rank.
        switches: further fields of `Run`.

    Raises:
        ValueError: it does not fit, with the bytes and a dry run of it (see notebook 7).
    """
    run = Run(config, mesh.tp_size, mesh.world_size // mesh.tp_size, batch_size, seq_length,
              **switches)  # fmt: skip
    needed = 16 * parameter_count(config, run.tp)  # weights, gradients, two moments
    local = mesh.world_size // mesh.nodes
    require_memory(needed, local, mesh.backend, report=lambda: dry_run(run))
