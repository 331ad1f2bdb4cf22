"""The ranks of a notebook: `Mesh` starts, checks, resets and stops them.

`mesh` is what the reader calls, `engines` the processes, `engine` what runs on a rank, `watch` waits for ranks and releases stuck
ones, `report` says what went wrong, `magics` is `%%px`, and `reaper` cleans up after a kernel that died.
"""

from .mesh import Mesh as Mesh
from .report import MeshError as MeshError
from .report import RankError as RankError
