"""What `metadata.json` says of a checkpoint: the mesh that wrote it, and how each tensor's shards
make the full tensor.

Tools read it instead of building a model. How a tensor is sharded is a
`parallel_layers.sharding.Partition`, as in the layers.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from ..parallel_layers.sharding import Partition, full_shape, partition_of
from ..parallel_layers.utils import divide
from ..storage import Digest, read_json, write_text

METADATA = "metadata.json"
SHARD = "dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
RANKS = 1_000_000  # that a mesh can have at most
MAYBE = (dict, type(None))
ENTRIES = {"mesh": dict, "config": MAYBE, "model": MAYBE, "tied": list, "optimizer": MAYBE}


def shard_name(dp: int, tp: int) -> str:
    return SHARD.format(dp=dp, tp=tp, pp=0)


@dataclass(frozen=True)
class Layout:
    """One tensor of a model: its full shape, without padding, its dtype, and how it is sharded
    (None: replicated).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    partition: Partition | None = None

    def local_shape(self) -> torch.Size:
        """The shape of each rank's shard."""
        shape = list(self.shape)
        if self.partition is not None:
            shape[self.partition.dim] = sum(self.partition.local_sizes)
        return torch.Size(shape)

    def blank(self) -> torch.Tensor:
        """A rank's shard on the meta device, which has no elements."""
        return torch.empty(self.local_shape(), dtype=self.dtype, device="meta")

    def at(self, parts: int, pad: bool = False, heads: tuple[int, ...] = ()) -> "Layout":
        """The same tensor at another tensor-parallel degree.

        Padding follows the degree. Where ranks share a shard, there stay as many shards.

        Args:
            pad: allow padding that was not there before, for a vocabulary that does not divide.
            heads: how many attention heads each matrix has, so that none is divided; if there are
                more ranks, they share one.

        Raises:
            ValueError: the sizes do not allow that degree, with the numbers.
        """
        old = self.partition
        if old is None or old.parts == parts:
            return self
        if heads:
            if old.pad:
                raise ValueError(f"attention heads with {old.pad} rows of padding are not divided")
            replicas = tuple(
                divide(parts, n, "ranks over heads") if n % parts else 1 for n in heads
            )
            return replace(self, partition=Partition(old.dim, old.sizes, parts, replicas))
        replicas = tuple(max(parts * r // old.parts, 1) if r > 1 else 1 for r in old.replicas)
        padded = old.pad or old.multiple > 1 or (pad and len(old.sizes) == 1)
        padding = -old.sizes[0] % (parts * old.multiple) if padded else 0
        sharded = replace(old, parts=parts, replicas=replicas, pad=padding)
        return replace(self, partition=sharded)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor that carries a parameter's marks (or none: replicated)."""
    partition = partition_of(tensor)
    layout = Layout(tuple(full_shape(tensor)), tensor.dtype, partition)
    if layout.local_shape() != tensor.shape:
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} is marked as {partition}, a shard of "
            f"{tuple(layout.local_shape())}"
        )
    return layout


def describe(state: dict[str, torch.Tensor]) -> tuple[dict[str, Layout], list[list[str]]]:
    """The layout of each tensor of `state_dict(keep_vars=True)`, and the groups of names that are
    one tensor.
    """
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    layouts = {name: layout_of(tensor) for name, tensor in tensors.items()}
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


def _from_json(entry: dict, tp: int) -> Layout:
    partition = entry.get("partition")
    if partition is not None:
        known = {field.name for field in fields(Partition)}
        if other := [k for k in partition.keys() - known if partition[k] not in (None, 1)]:
            raise ValueError(f"{other[0]} of a partition is not supported")
        items = {name: partition[name] for name in partition.keys() & known}
        partition = Partition(**{k: tuple(v) if type(v) is list else v for k, v in items.items()})
        if partition.parts != tp:
            raise ValueError(f"a tensor is sharded over {partition.parts} ranks of {tp}")
        if sum(partition.sizes) != entry["shape"][partition.dim]:
            raise ValueError(f"{entry} has matrices of other sizes than the tensor")
    layout = Layout(tuple(entry["shape"]), getattr(torch, entry["dtype"]), partition)
    if not isinstance(layout.dtype, torch.dtype) or not all(type(n) is int for n in layout.shape):
        raise ValueError(f"{entry} does not describe a tensor")
    layout.blank()  # raises for numbers that are not sizes
    return layout


def check_mesh(mesh: dict) -> None:
    """Raises ValueError or KeyError unless these are sizes of a mesh without pipeline stages."""
    for axis, size in {"tp": mesh["tp"], "pp": mesh["pp"], **mesh}.items():
        most = 1 if axis == "pp" else RANKS
        if type(size) is not int or not 1 <= size <= most:
            raise ValueError(f"{axis} is {size!r}, must be an integer from 1 to {most}")


def write_metadata(folder: Path, metadata: dict) -> dict[str, Digest]:
    return {METADATA: write_text(folder / METADATA, json.dumps(metadata, indent=1))}


def read_metadata(folder: str | Path) -> dict | None:
    """The metadata of a checkpoint, with `model` as layouts (None if they were not known when it
    was saved); None if another library wrote the checkpoint.

    Raises:
        ValueError: the file is broken, with its path.
    """
    path = Path(folder) / METADATA
    if not path.is_file() and not path.is_symlink():
        return None
    metadata = read_json(path)
    try:
        for name, kinds in ENTRIES.items():
            if not isinstance(metadata[name], kinds):
                raise ValueError(f"{name} is {metadata[name]!r}")
        check_mesh(metadata["mesh"])
        if (model := metadata["model"]) is not None:
            tp = metadata["mesh"]["tp"]
            metadata["model"] = {name: _from_json(entry, tp) for name, entry in model.items()}
            if not all(group and all(n in model for n in group) for group in metadata["tied"]):
                raise ValueError(f"tied {metadata['tied']} are not names of tensors")
        if (optimizer := metadata["optimizer"]) is not None:
            names, zero1 = optimizer["parameters"], optimizer["zero1"]
            if type(zero1) is not bool or not all(type(name) is str for name in names or ()):
                raise ValueError(f"optimizer is {optimizer}, not names and whether it is ZeRO-1")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"it does not have {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is truncated or broken: {reason}") from error
    return metadata
