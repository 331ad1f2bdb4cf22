"""The ranks of a notebook: `Mesh` starts, checks, resets and stops them.

`mesh` is what the reader calls and `magics` is `%%px`. `ranks` (or `slurm`, on several nodes) holds
the kernel's end of each rank, `worker` is what runs on a rank, and `nursery` is the parent of the
ranks on this machine, which ends them when the kernel is gone. `watch` waits for ranks and releases
stuck ones. A rank describes its errors with `reports`; `failures` makes a message of these, and
`output` of what ranks print.
"""

import importlib

_EXPORTS = {"Mesh": "mesh", "MeshError": "failures", "RankError": "failures"}


def __getattr__(name: str):
    # When asked for: a rank imports `worker` before its environment is set, and torch after that.
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
