"""The shards of a complete checkpoint as whole tensors, or as the shards of another mesh.

This is the one way between shards and tensors: load, merge, reshard and verify all use it. Tensors
stay in their files, memory-mapped by torch, until they are used; every file is compared with its
digest before its first use.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from ..storage import xser
from .layout import METADATA, Layout, read_metadata, shard_name
from .tags import Complete

MASTERS = "sharded_master_weights"
SHARD = re.compile(r"dp_rank_(\d{1,6})_tp_rank_(\d{1,6})_pp_rank_(\d{1,6})\.pt")


class Shards:
    """Reads one checkpoint, this library's or the vendor's.

    Args:
        checkpoint: as `tags.latest` and `tags.find` give it.
        layouts: how the tensors are sharded, for a checkpoint that does not say so.
        parameters: the names of the optimizer's parameters; likewise.
        check: False leaves the comparison with the digests to somebody else.

    Attributes:
        path: its folder.
        metadata: as `layout.read_metadata` gives it.
        mesh, tp, pp: the mesh that saved it.
        layouts: by name; None if neither the checkpoint nor the caller knows.

    Raises:
        FileNotFoundError, ValueError: a shard or the metadata is missing or broken, with the file's
            name.
    """

    def __init__(
        self,
        checkpoint: Complete,
        layouts: dict[str, Layout] | None = None,
        parameters: list[str] | None = None,
        check: bool = True,
    ):
        self.checkpoint, self.path, self._hashes = checkpoint, checkpoint.path, check
        self._checked: set[Path] = set()
        self._open: dict[Path, dict] = {}
        if self.has(METADATA):
            checkpoint.check(self.path / METADATA)
        self.metadata = read_metadata(self.path)
        found = self._found("model") or self._found("optim")
        if not found and self.metadata is None:
            raise FileNotFoundError(f"{self.path} does not hold a shard in model/ or in optim/")
        self.mesh = checkpoint.mesh or (self.metadata or {}).get("mesh")
        if not self.mesh:
            self.mesh = {
                axis: 1 + max(shard[i] for shard in found) for axis, i in (("tp", 1), ("pp", 2))
            }
        self.tp, self.pp = self.mesh["tp"], self.mesh["pp"]
        saved = (self.metadata or {}).get("model")
        self.layouts = layouts if saved is None else saved
        optimizer = (self.metadata or {}).get("optimizer") or {}
        self.parameters = optimizer.get("parameters") or parameters

    # --- files ------------------------------------------------------------------------------------

    def _found(self, part: str) -> list[tuple[int, int, int]]:
        """`(dp, tp, pp)` of each shard that is there. As numbers: rank 10 comes after 9."""
        folder = self.path / part
        matches = [SHARD.fullmatch(file.name) for file in folder.glob("*.pt")]
        return sorted(tuple(int(n) for n in match.groups()) for match in matches if match)

    def file(self, part: str, tp: int, dp: int = 0, pp: int = 0) -> Path:
        return self.path / part / shard_name(dp, tp, pp)

    def found(self) -> list[tuple[str, int, int, int]]:
        """`(part, tp, dp, pp)` of each shard that is there, those of the model first."""
        parts = ("model", "optim")
        return [(part, tp, dp, pp) for part in parts for dp, tp, pp in self._found(part)]

    def missing(self) -> Iterator[Path]:
        """The shards that are not there, although others that belong to them are."""
        for part, places in (("model", 1), ("optim", self.zero_degree)):
            if self._found(part) or self._expected(part):
                for dp in range(places):
                    for rank in range(self.tp * self.pp):
                        file = self.file(part, rank // self.pp, dp, rank % self.pp)
                        if not file.is_file():
                            yield file

    def _expected(self, part: str) -> bool:
        return bool((self.metadata or {}).get({"optim": "optimizer"}.get(part, part)))

    def _check(self, file: Path) -> None:
        """Compares all that belongs to a file with what was written."""
        if self._hashes and file not in self._checked:
            name = str(file.relative_to(self.path))
            others = (n for n in self.checkpoint.files if n.startswith(f"{name}."))
            for each in {file, *map(self.path.joinpath, others), *xser.files_of(file)}:
                self.checkpoint.check(each)
            self._checked.add(file)

    def has(self, name: str) -> bool:
        return name in self.checkpoint.files or (self.path / name).is_file()

    def object(self, name: str):
        """What the file of that name holds."""
        self._check(self.path / name)
        return xser.load(self.path / name)

    def read(self, part: str, tp: int, dp: int = 0, pp: int = 0, mmap: bool = False) -> dict:
        """What one rank saved.

        Args:
            mmap: leave the tensors in the file until they are used.

        Raises:
            FileNotFoundError, ValueError: the file is missing, broken, or not a dict.
        """
        file = self.file(part, tp, dp, pp)
        self._check(file)
        if not isinstance(value := xser.load(file, mmap), dict):
            raise ValueError(f"{file} holds a {type(value).__name__}, not a dict")
        if part == "model" and not all(isinstance(name, str) for name in value):
            raise ValueError(f"{file} has keys that are not names of tensors")
        return value

    def shard(self, part: str, tp: int, dp: int = 0, pp: int = 0) -> dict:
        """The same, with tensors that are read from the file when they are used."""
        file = self.file(part, tp, dp, pp)
        if file not in self._open:
            self._open[file] = self.read(part, tp, dp, pp, mmap=True)
        return self._open[file]

    # --- weights ----------------------------------------------------------------------------------

    def weight(self, name: str) -> list[torch.Tensor]:
        """The shards of a weight.

        Raises:
            ValueError: one is not there, or is not as the layout says, with the file.
        """
        layout = self.layouts[name]
        ranks = range(self.tp if layout.partition else 1)
        return [self.weight_of(name, rank) for rank in ranks]

    def weight_of(self, name: str, rank: int) -> torch.Tensor:
        """The shard of a weight that a rank has."""
        layout, found = self.layouts[name], self.shard("model", rank).get(name)
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"{self.file('model', rank)} does not hold a tensor {name}: it is of another model"
            )
        if tuple(found.shape) != layout.local_shape() or found.dtype != layout.dtype:
            raise ValueError(
                f"{self.file('model', rank)}: {name} is {tuple(found.shape)} {found.dtype}, "
                f"{layout.local_shape()} {layout.dtype} was expected"
            )
        return found

    def whole(self, name: str) -> torch.Tensor:
        """The full weight, without padding."""
        layout, shards = self.layouts[name], self.weight(name)
        return layout.partition.merge(shards) if layout.partition else shards[0]

    def differing(self, name: str) -> Iterator[tuple[int, int]]:
        """`(rank, where in the full tensor)` of what ranks share and do not have alike."""
        held: dict[tuple[int, int], torch.Tensor] = {}
        partition = self.layouts[name].partition
        for rank in range(self.tp):
            shard = self.weight_of(name, rank)
            rows = [(0, 0, 0)] if partition is None else partition.pieces(rank)
            for start, local, length in rows:
                part = shard.narrow(partition.dim, local, length) if partition else shard
                if not torch.equal(held.setdefault((start, length), part), part):
                    yield rank, start

    def to(self, name: str, shards: list[torch.Tensor], target: Layout, rank: int) -> torch.Tensor:
        """What `rank` of another mesh holds of a tensor, from the shards of this one.

        Args:
            shards: of the weight of that name, or of its optimizer state.
        """
        source = self.layouts[name].partition
        if source is None or target.partition is None:
            return source.merge(shards) if source else shards[0]
        if source == target.partition:
            return shards[rank]
        result, dim = shards[0].new_zeros(target.local_shape()), source.dim
        for start, to, length in target.partition.pieces(rank):
            for number, shard in enumerate(shards):
                for first, at, size in source.pieces(number):
                    low, high = max(start, first), min(start + length, first + size)
                    if low < high:
                        found = shard.narrow(dim, at + low - first, high - low)
                        result.narrow(dim, to + low - start, high - low).copy_(found)
        return result

    # --- the optimizer ----------------------------------------------------------------------------

    @cached_property
    def zero_degree(self) -> int:
        """Over how many ranks the optimizer's state is sharded."""
        return 1 + max((dp for dp, _, _ in self._found("optim")), default=0)

    @property
    def has_optimizer(self) -> bool:
        return bool(self._found("optim"))

    @cached_property
    def zero1(self) -> bool:
        """True if the optimizer's state is sharded over the data-parallel ranks."""
        if self.metadata is not None:
            return bool((self.metadata["optimizer"] or {}).get("zero1"))
        return self.zero_degree > 1 or "base_state" in self.shard("optim", 0)

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

    def fields(self, name: str) -> list[str]:
        """What is kept for a parameter: `exp_avg`, …, and the master weight."""
        return list(self._entries(name, 0, 0))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.parameters)}

    def _entries(self, name: str, tp: int, dp: int) -> dict:
        shard, number = self.shard("optim", tp, dp), self._numbers[name]
        try:
            masters = shard.get(MASTERS, {})
            held = {MASTERS: masters[number]} if number in masters else {}
            return shard["base_state" if self.zero1 else "state"].get(number, {}) | held
        except (KeyError, TypeError, AttributeError) as error:
            file = self.file("optim", tp, dp)
            raise ValueError(f"{file} is not the state of an optimizer: {error}") from error

    def state_shards(self, name: str, field: str):
        """A field as it was saved: for each tensor-parallel shard the list of its ZeRO-1 shards; a
        step count and the like as it is.

        Raises:
            ValueError: one is missing or does not fit the parameter, with the file.
        """
        layout, result = self.layouts[name], []
        for tp in range(self.tp if layout.partition else 1):
            places = range(self.zero_degree if self.zero1 else 1)
            found = [self._entries(name, tp, dp).get(field) for dp in places]
            if not isinstance(found[0], torch.Tensor):
                return found[0]
            scalar = not layout.shape and not self.zero1 and field != "step"
            if not found[0].dim() and not scalar:
                return found[0]
            numel = torch.Size(layout.local_shape()).numel()
            row = max(torch.Size(layout.local_shape()[1:]).numel(), 1)
            held = sum(x.numel() for x in found if isinstance(x, torch.Tensor))
            same = all(isinstance(x, torch.Tensor) and x.dtype == found[0].dtype for x in found)
            if not same or not 0 <= held - numel < len(found) * row:
                raise ValueError(
                    f"{self.file('optim', tp)}: {field} of {name} has {held} elements on "
                    f"{len(found)} ranks, the parameter {numel}"
                )
            result.append(found)
        return result

    def state(self, name: str, field: str):
        """A field as a list of shards of the parameter's shape, those of ZeRO-1 put together; a
        step count and the like as it is.

        ZeRO-1 has equal shards of the flattened parameter, in the vendor's library along dim 0.
        Concatenated both are the parameter, row by row, and some padding.
        """
        shape, found = torch.Size(self.layouts[name].local_shape()), self.state_shards(name, field)
        if not isinstance(found, list):
            return found
        flat = [torch.cat([shard.reshape(-1) for shard in shards]) for shards in found]
        return [shard[: shape.numel()].view(shape) for shard in flat]


def check_knows_layouts(shards: Shards) -> Shards:
    """The shards, if it is known how their tensors are sharded.

    Raises:
        ValueError: it is not, as another library wrote them or a dict was saved; there is no model.
    """
    if shards.layouts is None:
        why = "does not have metadata.json" if shards.metadata is None else "was saved from a dict"
        raise ValueError(
            f"{shards.path} {why}, so it is not known how its tensors are sharded: give the folder "
            "of the Hugging Face model with --config"
        )
    if not shards.layouts:
        raise ValueError(f"{shards.path} does not hold a model")
    if shards.pp > 1:
        raise ValueError(
            f"{shards.path} has pipeline-parallel size {shards.pp}; only size 1 is merged or "
            "resharded"
        )
    return shards
