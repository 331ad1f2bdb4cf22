"""Whether a machine can hold a training: asked by a notebook before it allocates anything."""

from transformers import PretrainedConfig

from tutorial_lib.training.memory import require_memory

from .dry_run import dry_run
from .parameters import parameter_count
from .runs import Run


def require_room(
    config: PretrainedConfig,
    mesh,
    batch_size: int,
    seq_length: int,
    *,
    tp_size: int | None = None,
    whole_models: int = 0,
    **switches,
) -> None:
    """Refuses a training with AdamW that the ranks of a mesh have no room for.

    Args:
        config: of the model.
        mesh: a `lab.mesh.Mesh`, not started yet.
        batch_size, seq_length: of a micro-batch of one rank.
        tp_size: where the mesh has none, as its ranks form their groups later.
        whole_models: how many models a rank holds whole; 0 for one that is sharded.
        switches: further fields of `Run`.

    Raises:
        ValueError: it does not fit, with the bytes and a dry run of it (see notebook 7).
    """
    tp = tp_size or mesh.tp_size
    run = Run(config, tp, mesh.world_size // tp, batch_size, seq_length, **switches)
    held = whole_models * parameter_count(config) or parameter_count(config, tp)
    needed = 16 * held  # weights, gradients, two moments
    local = mesh.world_size // mesh.nodes
    require_memory(needed, local, mesh.backend, report=lambda: dry_run(run))
