"""What the exercises of notebook 08 need: its training, defined on a rank as there."""

import nbformat
import torch

from notebooks import run


def define(namespace: dict) -> None:
    """Runs the cells that define the training; nothing where this process is not a rank."""
    if "rank" not in namespace:
        return
    sizes = dict(V=32, H=8, S=16, B=4, seed=0)
    starts = torch.randint(sizes["V"], (20, 1), generator=torch.Generator().manual_seed(0))
    ids = (starts + torch.arange(sizes["S"])) % sizes["V"]
    namespace.update(sizes, ids=ids)
    for cell in nbformat.read(run.FOLDER / "08_bug_hunt.ipynb", 4).cells:
        if cell.source.startswith("%%px\n# training, "):
            exec(cell.source.removeprefix("%%px\n"), namespace)
