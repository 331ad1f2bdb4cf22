"""A course that people run: models larger than one device, trained on many, from a laptop to
Trainium.

The names at the top are those of `neuronx_distributed`, and are imported when they are asked for.
"""

import importlib
import os
import warnings

# transformers imports torch-xla (seconds, and a device of its own) for its Trainer, which nothing
# here uses.
os.environ.setdefault("USE_TORCH_XLA", "0")
# tqdm, in a notebook without widgets. There are none here on purpose: they leave nothing in a saved
# notebook.
warnings.filterwarnings("ignore", message="IProgress not found")

_EXPORTS = {
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "has_checkpoint": "checkpoint",
    "finalize_checkpoint": "checkpoint",
    "neuronx_distributed_config": "trainer",
    "initialize_parallel_model": "trainer",
    "initialize_parallel_optimizer": "trainer",
    "parallel_state": "parallel_layers",
}


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    if name in ("parallel_layers", "modules", "optimizer", "trainer", "checkpoint", "utils"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
