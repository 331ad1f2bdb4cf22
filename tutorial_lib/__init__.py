"""Training models larger than one device: the library of the course."""

_CHECKPOINTS = ("save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint")


def __getattr__(name: str):
    if name in _CHECKPOINTS:  # loaded when asked for: a notebook's kernel needs none of it
        from . import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
