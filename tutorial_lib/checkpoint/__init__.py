"""Checkpoints that are complete or absent: saved, loaded, merged, resharded, exchanged with Hugging
Face.

`python -m tutorial_lib.checkpoint --help` lists the tools.
"""

import importlib

_EXPORTS = {
    "save_checkpoint": "save",
    "finalize_checkpoint": "background",
    "load_checkpoint": "load",
    "has_checkpoint": "load",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    # Loaded when asked for: the tools need none of what a rank needs.
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
