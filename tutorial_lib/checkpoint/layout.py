"""What `metadata.json` says of a checkpoint: the mesh that wrote it, and how each tensor's shards
make the full tensor.

Tools read it instead of building a model. How a tensor is cut is a
`parallel_layers.sharding.Partition`, as in the layers.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..parallel_layers.sharding import Partition, partition_of
from ..parallel_layers.utils import divide
from .files import Digest, write_text

METADATA = "metadata.json"
MAYBE = (dict, type(None))
ENTRIES = {"mesh": dict, "config": MAYBE, "model": MAYBE, "tied": list, "optimizer": MAYBE}


@dataclass(frozen=True)
class Layout:
    """One tensor of a model: its full shape, without padding, its dtype, and its cut (None:
    replicated).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    partition: Partition | None = None

    def local_shape(self) -> tuple[int, ...]:
        """The shape of each rank's shard."""
        shape = list(self.shape)
        if self.partition is not None:
            shape[self.partition.dim] = sum(self.partition.local_sizes)
        return tuple(shape)

    def fill(self, full: torch.Tensor, shard: torch.Tensor, rank: int) -> None:
        """Copies the shard of `rank` to its place in the full tensor."""
        if self.partition is None:
            full.copy_(shard)
            return
        for start, local, length in self.partition.pieces(rank):
            full.narrow(self.partition.dim, start, length).copy_(
                shard.narrow(self.partition.dim, local, length)
            )

    def cut(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of `rank` with its padding: a copy, or `full` itself where it is replicated."""
        return full if self.partition is None else self.partition.shard(full, rank)

    def sources(self) -> list[int]:
        """The ranks whose shards together make the full tensor, one for each part."""
        if self.partition is None:
            return [0]
        needed, seen = [], set()
        for rank in range(self.partition.parts):
            pieces = set(self.partition.pieces(rank))
            if not pieces <= seen:
                needed.append(rank)
                seen |= pieces
        return needed

    def at(self, parts: int, pad: bool = False, heads: tuple[int, ...] | None = None) -> "Layout":
        """The same tensor at another tensor-parallel degree.

        Padding follows the degree. Where ranks share a part, there stay as many parts.

        Args:
            pad: allow padding that was not there before, for a vocabulary that does not divide.
            heads: of how many attention heads each matrix consists, so that none is cut; ranks that
                are more share one.

        Raises:
            ValueError: the sizes do not allow that degree, or the ranks are in an order of their
                own; with the numbers.
        """
        old = self.partition
        if old is None or old.parts == parts:
            return self
        if old.order is not None:
            raise ValueError(
                f"the parts lie on the ranks in the order {old.order}: {parts} ranks need one of "
                "their own"
            )
        if heads is not None:
            if old.pad:
                raise ValueError(
                    f"attention heads that are padded (by {old.pad} rows here) cannot be cut anew"
                )
            replicas = tuple(
                divide(parts, h, "ranks over heads") if h % parts else 1 for h in heads
            )
            return replace(self, partition=Partition(old.dim, old.sizes, parts, replicas))
        replicas = tuple(max(parts * r // old.parts, 1) if r > 1 else 1 for r in old.replicas)
        padded = old.pad or old.multiple > 1 or (pad and len(old.sizes) == 1)
        padding = -old.sizes[0] % (parts * old.multiple) if padded else 0
        cut = Partition(old.dim, old.sizes, parts, replicas, padding, None, old.multiple)
        return replace(self, partition=cut)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor that carries a parameter's marks (or none: replicated)."""
    partition = partition_of(tensor)
    shape = list(tensor.shape)
    if partition is not None:
        shape[partition.dim] = sum(partition.sizes)
    layout = Layout(tuple(shape), tensor.dtype, partition)
    if layout.local_shape() != tuple(tensor.shape):
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} is marked as {partition}, a part "
            f"{layout.local_shape()}"
        )
    return layout


def describe(state: dict[str, torch.Tensor]) -> tuple[dict[str, Layout], list[list[str]]]:
    """The layout of each tensor of `state_dict(keep_vars=True)`, and the groups of names that are
    one tensor (tied).
    """
    layouts, names = {}, {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            layouts[name] = layout_of(tensor)
            names.setdefault(id(tensor), []).append(name)
    return layouts, [group for group in names.values() if len(group) > 1]


def to_json(layouts: dict[str, Layout]) -> dict:
    return {
        name: {
            "shape": list(layout.shape),
            "dtype": str(layout.dtype).removeprefix("torch."),
            **({} if layout.partition is None else {"partition": asdict(layout.partition)}),
        }
        for name, layout in layouts.items()
    }


def from_json(entries: dict) -> dict[str, Layout]:
    result = {}
    for name, entry in entries.items():
        cut = entry.get("partition")
        if cut is not None:
            cut = Partition(**{k: tuple(v) if isinstance(v, list) else v for k, v in cut.items()})
        layout = Layout(tuple(entry["shape"]), getattr(torch, entry["dtype"]), cut)
        if not isinstance(layout.dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {entry['dtype']!r}")
        torch.Size(layout.local_shape())  # raises what these numbers are not
        result[name] = layout
    return result


def write_metadata(folder: str | Path, metadata: dict) -> Digest:
    return write_text(Path(folder) / METADATA, json.dumps(metadata, indent=1))


def read_metadata(folder: str | Path) -> dict | None:
    """The metadata of a checkpoint, with `model` as layouts (None where whoever saved did not say
    how the tensors are cut); None where another library wrote the checkpoint.

    Raises:
        ValueError: the file is broken, with its path.
    """
    path = Path(folder) / METADATA
    if not path.is_file():
        return None
    try:
        metadata = json.loads(path.read_text())
        for name, kinds in ENTRIES.items():
            if not isinstance(metadata[name], kinds):
                raise ValueError(f"{name} is {metadata[name]!r}")
        if metadata["model"] is not None:
            metadata["model"] = from_json(metadata["model"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is truncated or broken: {reason}") from error
    return metadata
