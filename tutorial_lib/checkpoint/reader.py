"""A complete checkpoint as something to read from: by rank, or by full tensor whatever the degree
it was saved at.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from . import tensors
from .layout import METADATA, Layout, read_metadata
from .lazy import LazyFile
from .ranks import shard_name
from .tags import Complete

SHARD = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")


class Reader:
    """Reads one checkpoint, this library's or the vendor's. Every file is checked against its
    digest before its first use.

    Args:
        checkpoint: as `tags.latest` and `tags.find` give it.
        check: False leaves the check of the digests to somebody else.

    Raises:
        FileNotFoundError, ValueError: a shard or the metadata is missing or broken, with the file's
            name.
    """

    def __init__(self, checkpoint: Complete, check: bool = True):
        self._checkpoint, self._check, self._checked = checkpoint, check, set()
        self.path = checkpoint.path
        if self.has(METADATA):
            checkpoint.check(self.path / METADATA)  # all that follows goes by it
        self.metadata = read_metadata(self.path)
        found = sorted(self._shards("model")) or sorted(self._shards("optim"))
        if not found and self.metadata is None:
            raise FileNotFoundError(f"{self.path} holds no shard, neither in model/ nor in optim/")
        self.mesh = checkpoint.mesh or (
            {axis: 1 + max(shard[i] for shard in found) for axis, i in (("tp", 1), ("pp", 2))}
            if self.metadata is None
            else self.metadata["mesh"]
        )
        self.tp, self.pp = self.mesh["tp"], self.mesh["pp"]
        self.zero_degree = 1 + max((dp for dp, _, _ in self._shards("optim")), default=0)
        self._lazy: dict[Path, LazyFile] = {}

    def _shards(self, part: str) -> Iterator[tuple[int, int, int]]:
        """`(dp, tp, pp)` of each shard. As numbers: rank 10 comes after 9."""
        folder = self.path / part
        for file in folder.iterdir() if folder.is_dir() else ():
            if match := SHARD.fullmatch(file.name):
                yield tuple(int(n) for n in match.groups())

    def verify_all(self) -> None:
        """Checks every file against its digest; for a caller that reads with `check=False`.

        Raises:
            FileNotFoundError, ValueError: as `tags.Complete.check`.
        """
        for name in self._checkpoint.files:
            self._checkpoint.check(self.path / name)

    def _verify(self, file: Path) -> None:
        if self._check and file not in self._checked:
            self._checkpoint.check(file)
            self._checked.add(file)

    def _ready(self, file: Path) -> Path:
        """The file, once all that belongs to it is as it was written."""
        if file not in self._checked:
            names = {
                self.path / name
                for name in self._checkpoint.files
                if name.startswith(str(file.relative_to(self.path)))
            }
            for each in sorted(names | set(tensors.files_of(file))):
                self._verify(each)
            self._checked.add(file)
        return file

    def has(self, name: str) -> bool:
        return name in self._checkpoint.files or (self.path / name).is_file()

    def object(self, name: str):
        """What the file of that name holds."""
        return tensors.load(self._ready(self.path / name))

    @property
    def step(self) -> int | None:
        return self._checkpoint.step

    @property
    def has_optimizer(self) -> bool:
        return any(self._shards("optim"))

    def files(self) -> list[Path]:
        """The file of each shard, of the model first."""
        return [
            self.path / part / shard_name(dp, tp, pp)
            for part in ("model", "optim")
            for dp, tp, pp in sorted(self._shards(part))
        ]

    def missing(self) -> list[Path]:
        """The shards that are not there, of those that the others go with."""
        tps, pps = range(self.tp), range(self.pp)
        wanted = [self.model_file(t, p) for t in tps for p in pps if any(self._shards("model"))]
        if self.has_optimizer:
            dps = range(self.zero_degree)
            wanted += [self.optimizer_file(d, t, p) for d in dps for t in tps for p in pps]
        return [file for file in wanted if not file.is_file()]

    def model_file(self, tp: int, pp: int = 0) -> Path:
        return self.path / "model" / shard_name(0, tp, pp)

    def optimizer_file(self, dp: int, tp: int, pp: int = 0) -> Path:
        return self.path / "optim" / shard_name(dp, tp, pp)

    def model_shard(self, tp: int, pp: int = 0) -> dict:
        """The state dict of one rank. Its tensors lie in the file until they are used."""
        return tensors.load(self._ready(self.model_file(tp, pp)), mmap=True)

    def optimizer_shard(self, dp: int, tp: int, pp: int = 0) -> dict:
        return tensors.load(self._ready(self.optimizer_file(dp, tp, pp)))

    @cached_property
    def zero1(self) -> bool:
        """True if the optimizer's state is cut over the data-parallel ranks."""
        if self.metadata is not None:
            return bool((self.metadata["optimizer"] or {}).get("zero1"))
        return self.zero_degree > 1 or "base_state" in self.lazy(self.optimizer_file(0, 0)).value

    def lazy(self, file: Path) -> LazyFile:
        """A shard whose tensors are read one by one."""
        if file not in self._lazy:
            self._lazy[file] = LazyFile(self._ready(file))
        return self._lazy[file]

    @cached_property
    def layouts(self) -> dict[str, Layout] | None:
        """How each tensor of the model is cut; None where whoever saved does not say: another
        library, or here a dict of tensors that are no parameters.
        """
        return None if self.metadata is None else self.metadata["model"]

    def full(self, name: str, layout: Layout) -> torch.Tensor:
        """The full tensor, without padding, from shards that are cut by `layout`."""
        result = None
        for rank in layout.sources():
            file, entry = self.entry(name, rank, layout)
            if result is None:
                result = torch.empty(layout.shape, dtype=entry.dtype, device="cpu")
            layout.fill(result, file.read(entry), rank)
        return result

    def entry(self, name: str, rank: int, layout: Layout) -> tuple[LazyFile, torch.Tensor]:
        """The file that holds a rank's shard of a tensor, and the shard without its data.

        Raises:
            ValueError: it is not there, or has not the shape that `layout` gives it.
        """
        file = self.lazy(self.model_file(rank))
        if name not in file.index:
            raise ValueError(f"{file.path} holds no tensor {name}: it is of another model")
        entry = file.index[name]
        if tuple(entry.shape) != layout.local_shape():
            raise ValueError(
                f"{file.path}: {name} has shape {tuple(entry.shape)}, "
                f"{layout.local_shape()} was expected"
            )
        return file, entry

    def differing_parts(self, name: str, layout: Layout) -> Iterator[tuple[int, int]]:
        """`(rank, where in the full tensor)` of parts that ranks share and do not have alike."""
        held: dict[tuple[int, int], torch.Tensor] = {}
        for rank in range(self.tp):
            file, entry = self.entry(name, rank, layout)
            shard = file.read(entry)
            for start, local, length in layout.partition.pieces(rank):
                part = shard.narrow(layout.partition.dim, local, length)
                if not torch.equal(held.setdefault((start, length), part), part):
                    yield rank, start

    def resharded(
        self, targets: dict[str, Layout], ties: list[list[str]], rank: int, strict: bool
    ) -> dict:
        """The state dict of `rank` of a model with the layouts `targets`, from shards of another
        degree.

        Raises:
            ValueError: the checkpoint is of another model, or cannot be cut so; with both degrees.
        """
        saved = self.layouts or self.guess(targets)
        tied = {name: group for group in ties for name in group}
        result = {}
        for name, target in targets.items():
            source = (
                name if name in saved else next((n for n in tied.get(name, ()) if n in saved), None)
            )
            if source is None:
                if strict:
                    raise ValueError(f"{self.path} is of another model: it lacks {name}")
                continue
            if saved[source].shape != target.shape:
                raise ValueError(
                    f"{self.path} (tensor-parallel size {self.tp}): {name} has full shape "
                    f"{saved[source].shape}, {target.shape} here"
                )
            result[name] = target.cut(self.full(source, saved[source]), rank)
        if strict and (
            excess := [
                n for n in saved if n not in targets and not set(tied.get(n, ())) & targets.keys()
            ]
        ):
            raise ValueError(
                f"{self.path} is of another model: it has {', '.join(sorted(excess)[:3])} in excess"
            )
        return result

    def guess(self, targets: dict[str, Layout]) -> dict[str, Layout]:
        """How a checkpoint that does not say so cuts its tensors: as this model does, at the saved
        degree.

        Raises:
            ValueError: they cannot be cut so; with the tensor and the degree.
        """
        saved = {}
        for name, target in targets.items():
            try:
                saved[name] = target.at(self.tp, pad=True)
            except ValueError as error:
                raise ValueError(
                    f"{self.path} was saved with tensor-parallel size {self.tp} and does not say "
                    f"how {name} is cut: {error}"
                ) from error
        return saved
