"""The ranks of a notebook: `Mesh` starts, checks, resets and stops them.

`mesh` is what the reader calls, `engines` the processes, `engine` what runs on a rank, `watch`
waits for ranks and releases stuck ones, `report` says what went wrong, `magics` is `%%px`, and
`reaper` cleans up after a kernel that died.
"""

import importlib

_EXPORTS = {"Mesh": "mesh", "MeshError": "report", "RankError": "report"}


def __getattr__(name: str):
    # When asked for: a rank imports `engine` before its environment is set, and torch must come after that.
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
