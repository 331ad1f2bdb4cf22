"""The shards of a complete checkpoint as whole tensors, or as the shards of another mesh.

This is the one way between shards and tensors: load, merge, reshard and verify all use it. Tensors
stay in their files, memory-mapped by torch, until they are used; every file is compared with its
digest before its first use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from ..parallel_layers.flat_shards import as_rows
from ..storage import check_file, xser
from .layout import METADATA, Layout, read_metadata
from .shard_files import LOW_LEVEL, TAGGED, ranks_of
from .tags import Complete

MASTERS = "sharded_master_weights"


class Shards:
    """Reads one checkpoint, this library's or the vendor's.

    Args:
        checkpoint: as `tags.latest` and `tags.find` give it.
        blanks: read only shapes and dtypes from xser.
        names: where the shards of each part are.

    Attributes:
        path: its folder.
        metadata: as `layout.read_metadata` gives it.
        mesh, tp: the mesh that saved it.
        layouts: how each tensor is sharded, by name; None where the checkpoint does not say so,
            until the caller does.
        parameters: the names of the optimizer's parameters; likewise.

    Raises:
        FileNotFoundError, ValueError: a shard or the metadata is missing or broken, with the file's
            name.
    """

    def __init__(self, checkpoint: Complete, blanks: bool = False, names: dict[str, str] = TAGGED):
        self.checkpoint, self.path, self._blanks = checkpoint, checkpoint.path, blanks
        self._names = names
        self._open: dict[Path, dict] = {}
        if self.has(METADATA):
            self._check(METADATA)
        self.metadata = read_metadata(self.path)
        found = self._found("model") or self._found("optim")
        if not found and self.metadata is None:
            raise FileNotFoundError(f"{self.path} does not hold a shard in model/ or in optim/")
        self.mesh = checkpoint.mesh or (self.metadata or {}).get("mesh")
        if not self.mesh:
            self.mesh = {name: 1 + max(x[i] for x in found) for i, name in ((1, "tp"), (2, "pp"))}
        if self.mesh["pp"] > 1:
            raise ValueError(f"{self.path} is of {self.mesh['pp']} pipeline stages; 1 is supported")
        self.tp, known = self.mesh["tp"], self.metadata or {}
        self.layouts: dict[str, Layout] | None = known.get("model")
        self.parameters: list[str] | None = (known.get("optimizer") or {}).get("parameters")

    # --- files ------------------------------------------------------------------------------------

    def _found(self, part: str) -> list[tuple[int, int, int]]:
        """`(dp, tp, pp)` of each shard that is there."""
        return ranks_of(self.path, self._names[part]) if part in self._names else []

    def file(self, part: str, tp: int, dp: int = 0) -> Path:
        path = self.path / self._names[part].format(dp=dp, tp=tp, pp=0)
        return path / "checkpoint.pt" if path.is_dir() else path

    def found(self) -> list[tuple[str, int, int]]:
        """`(part, tp, dp)` of each shard that is there, those of the model first."""
        return [(part, tp, dp) for part in self._names for dp, tp, _ in self._found(part)]

    def missing(self) -> Iterator[Path]:
        """The shards that are not there, although others that belong to them are."""
        for part, entry, places in (("model", "model", 1), ("optim", "optimizer", self.degree)):
            if self._found(part) or (self.metadata or {}).get(entry):
                files = (self.file(part, tp, dp) for dp in range(places) for tp in range(self.tp))
                yield from (file for file in files if not file.is_file())

    def has(self, name: str) -> bool:
        return name in self.checkpoint.files or (self.path / name).is_file()

    def _check(self, name: str) -> None:
        """Compares all that belongs to a file with what was written."""
        check_file(self.path / name)
        for each, digest in self.checkpoint.files.items():
            if each == name or each.startswith(f"{name}."):
                check_file(self.path / each, digest)

    def object(self, name: str):
        """What the file of that name holds."""
        self._check(name)
        return xser.load(self.path / name)

    def shard(self, part: str, tp: int, dp: int = 0) -> dict:
        """What one rank saved, with tensors that are read from the file when they are used.

        Raises:
            FileNotFoundError, ValueError: the file is missing, broken, or not a dict.
        """
        file = self.file(part, tp, dp)
        if file not in self._open:
            self._check(str(file.relative_to(self.path)))
            value = xser.load(file, True, self._blanks)
            if self._names is LOW_LEVEL and isinstance(value, dict):
                value = value.get("model")
            if not isinstance(value, dict):
                raise ValueError(f"{file} holds a {type(value).__name__}, not a dict of the {part}")
            self._check_content(file, part, value)
            self._open[file] = value
        return self._open[file]

    def _check_content(self, file: Path, part: str, value: dict) -> None:
        known = (self.metadata or {}).get("model") or value
        for name, held in value.items() if part == "model" else ():
            if not isinstance(name, str):
                raise ValueError(f"{file} has keys that are not names of tensors")
            if isinstance(held, torch.Tensor) and name not in known:
                raise ValueError(f"{file} holds {name}, which the metadata do not know")
        kinds = ("state", "base_state", MASTERS, "shape_info", "sharding")
        for key in kinds if part == "optim" else ():
            if not isinstance(value.get(key, {}), dict):
                raise ValueError(f"{file}: {key} is a {type(value[key]).__name__}, not a dict")

    # --- weights ----------------------------------------------------------------------------------

    def use_layouts(self, targets: dict[str, Layout]) -> None:
        """Assumes a model's layouts, at the saved degree, where the checkpoint has none.

        Raises:
            ValueError: they cannot be; with the tensor and the degree.
        """
        if self.layouts is not None:
            return
        held, layouts = self.shard("model", 0) if self._found("model") else {}, {}
        for name, target in targets.items():
            dtype = held[name].dtype if torch.is_tensor(held.get(name)) else target.dtype
            try:
                layouts[name] = replace(target.at(self.tp, pad=True), dtype=dtype)
            except ValueError as error:
                raise ValueError(
                    f"{self.path} was saved with tensor-parallel size {self.tp} and does not say "
                    f"how {name} is sharded: {error}"
                ) from error
        self.layouts = layouts

    def weight(self, name: str, rank: int) -> torch.Tensor:
        """The shard of a weight that a rank has.

        Raises:
            ValueError: it is not there, or is not as the layout says, with the file.
        """
        layout, found = self.layouts[name], self.shard("model", rank).get(name)
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"{self.file('model', rank)} does not hold a tensor {name}: it is of another model"
            )
        if found.shape != layout.local_shape() or found.dtype != layout.dtype:
            raise ValueError(
                f"{self.file('model', rank)}: {name} is {tuple(found.shape)} {found.dtype}, "
                f"{tuple(layout.local_shape())} {layout.dtype} was expected"
            )
        return found.detach()  # the vendor's may be a parameter

    def weights(self, name: str) -> list[torch.Tensor]:
        """The shards of a weight; one if all ranks have the same."""
        return [self.weight(name, rank) for rank in self._ranks(name)]

    def _ranks(self, name: str) -> range:
        return range(self.tp if self.layouts[name].partition else 1)

    def differing(self, name: str) -> Iterator[tuple[int, int]]:
        """`(rank, where in the full tensor)` of what ranks share but differ in."""
        held: dict[tuple[int, int], torch.Tensor] = {}
        partition = self.layouts[name].partition
        if partition and max(partition.replicas) == 1:
            return
        for rank in range(self.tp):
            shard = self.weight(name, rank)
            for start, local, length in partition.pieces(rank) if partition else [(0, 0, 0)]:
                rows = shard.narrow(partition.dim, local, length) if partition else shard
                if not torch.equal(held.setdefault((start, length), rows), rows):
                    yield rank, start

    def to(
        self, name: str, shards: list[torch.Tensor], target: Layout, rank: int, result=None
    ) -> torch.Tensor:
        """What `rank` of another mesh holds of a tensor, from the shards of this one.

        Args:
            shards: of the weight of that name, or of its optimizer state.
            result: a tensor of zeros to put it into; a new one by default.
        """
        result = shards[0].new_zeros(target.local_shape()) if result is None else result
        saved, wanted = self.layouts[name].partition, target.partition
        if (sharded := saved or wanted) is None:
            return result.copy_(shards[0])
        whole = [(0, 0, target.shape[sharded.dim])]
        for start, to, length in wanted.pieces(rank) if wanted else whole:
            for number, shard in enumerate(shards):
                for first, at, size in saved.pieces(number) if saved else whole:
                    low, high = max(start, first), min(start + length, first + size)
                    if low < high:
                        found = shard.narrow(sharded.dim, at + low - first, high - low)
                        result.narrow(sharded.dim, to + low - start, high - low).copy_(found)
        return result

    # --- the optimizer ----------------------------------------------------------------------------

    @cached_property
    def degree(self) -> int:
        """Over how many ranks the optimizer's state is sharded."""
        return 1 + max((dp for dp, *_ in self._found("optim")), default=0)

    @property
    def has_optimizer(self) -> bool:
        return bool(self._found("optim"))

    @cached_property
    def zero1(self) -> bool:
        """True if the optimizer's state is sharded over the data-parallel ranks."""
        if self.metadata is not None:
            return bool((self.metadata["optimizer"] or {}).get("zero1"))
        return self.degree > 1 or "base_state" in self.shard("optim", 0)

    def state_head(self) -> dict:
        """All that the optimizer saved but what is kept for each parameter.

        Raises:
            ValueError: it is not the state of an optimizer, with the file.
        """
        apart, state = ("state", "base_state", MASTERS), self.shard("optim", 0)
        if not isinstance(groups := state.get("param_groups"), list) or not all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        ):
            raise ValueError(f"{self.file('optim', 0)} does not hold the groups of an optimizer")
        return {key: value for key, value in state.items() if key not in apart}

    def _entries(self, number: int, tp: int, dp: int) -> dict:
        """What is kept for a parameter: `exp_avg`, …, and the master weight."""
        shard = self.shard("optim", tp, dp)
        try:
            masters = shard.get(MASTERS, {})
            held = {MASTERS: masters[number]} if number in masters else {}
            return shard["base_state" if self.zero1 else "state"].get(number, {}) | held
        except (KeyError, TypeError, AttributeError) as error:
            file = self.file("optim", tp, dp)
            raise ValueError(f"{file} is not the state of an optimizer: {error}") from error

    def state(self) -> Iterator[tuple[int, str, object]]:
        """`(number of a parameter, field, value)` of all that is kept for parameters. The value is,
        for each tensor-parallel shard, the list of its ZeRO-1 shards; a step count and the like is
        as it was saved.

        Raises:
            ValueError: one is missing or does not fit the parameter, with the file.
        """
        for number in range(len(self.parameters)):
            for field in self._entries(number, 0, 0):
                yield number, field, self._state_shards(number, field)

    def _state_shards(self, number: int, field: str):
        name, result = self.parameters[number], []
        shape = self.layouts[name].local_shape()
        for tp in self._ranks(name):
            places = range(self.degree if self.zero1 else 1)
            found = [self._entries(number, tp, dp).get(field) for dp in places]
            if not isinstance(found[0], torch.Tensor):
                return found[0]
            if not found[0].dim() and (shape or self.zero1 or field == "step"):
                return found[0]
            row = max(shape[1:].numel(), 1)  # the vendor's shards are padded to whole rows
            held = sum(x.numel() for x in found if isinstance(x, torch.Tensor))
            same = all(isinstance(x, torch.Tensor) and x.dtype == found[0].dtype for x in found)
            if not same or not 0 <= held - shape.numel() < len(found) * row:
                raise ValueError(
                    f"{self.file('optim', tp)}: {field} of {name} has {held} elements on "
                    f"{len(found)} ranks, the parameter {shape.numel()}"
                )
            result.append(found)
        return result

    def state_at(
        self, targets: dict[str, Layout], tp: int, places: int, zero1: bool, blank: bool = False
    ) -> Iterator[tuple[int, str, Sequence]]:
        """The state of one tensor-parallel rank of another mesh: `(number, field, values)`, where
        `values[place]` is what a place among `places` holds; tensors may be views of a larger one.

        ZeRO-1 shards the flattened parameter equally, the vendor's library along dim 0.
        Concatenated, both give the parameter, row by row, plus padding. With `blank` nothing is
        read: tensors are on the meta device.
        """
        for number, field, value in self.state():
            if not isinstance(value, list):
                yield number, field, [value] * places
                continue
            name = self.parameters[number]
            if blank:
                mine = replace(targets[name], dtype=value[0][0].dtype).blank()
            else:
                shape = self.layouts[name].local_shape()
                flat = [torch.cat([shard.reshape(-1) for shard in shards]) for shards in value]
                whole = [shard[: shape.numel()].view(shape) for shard in flat]
                mine = self.to(name, whole, targets[name], tp)
            yield number, field, as_rows(mine, places) if zero1 else [mine]
