"""The ranks of a notebook: `Mesh` starts, checks, resets and stops them.

`mesh` is what the reader calls and `magics` is `%%px`. `ranks` (or `slurm`, on several nodes) holds
the kernel's end of each rank, `worker` is what runs on a rank, and `nursery` is the parent of the
ranks on this machine, which ends them when the kernel is gone. `watch` waits for ranks and releases
stuck ones. A rank describes its errors with `reports`; `failures` turns these into a message, and
`output` shows what ranks print.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors, and for the test of stale outputs, which reads the imports
    from .mesh import Mesh as Mesh


def __getattr__(name: str):
    # When asked for: a rank imports `worker` before its environment is set, and torch after that.
    if name == "Mesh":
        from .mesh import Mesh

        return Mesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
