"""`reshard`: a checkpoint at another tensor-parallel and data-parallel degree, optimizer state and
masters with it; for the vendor's library too, which cuts ZeRO-1's state in a way of its own.
"""

from pathlib import Path

import torch

from ..optimizer.shards import shard_length
from ..parallel_layers.utils import TENSOR_PARALLEL_ATTRIBUTES, ensure_positive
from .architectures import layout_at
from .blocks import full_blocks, shard_blocks
from .layout import METADATA, Layout, to_json, write_metadata
from .optimizer_state import MASTER, SavedOptimizer
from .ranks import shard_name
from .reader import Reader
from .stream import close_all, form, sink
from .tensors import Digests, is_xser, map_tensors
from .tools import (
    check_output,
    copy_objects,
    described,
    open_checkpoint,
    progress,
    write_checkpoint,
)


def reshard(
    source: str | Path,
    output: str | Path,
    tp: int,
    dp: int | None = None,
    xser: bool | None = None,
    pad: bool = False,
    vendor: bool = False,
) -> None:
    """Writes a checkpoint at other degrees.

    Random states belong to ranks that are no more, and are left out unless the mesh is the same.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size.
        dp: data-parallel size, which matters for the shards of ZeRO-1; by default as before.
        xser: tensor by tensor; by default as before.
        pad: pad a vocabulary that `tp` does not divide and that was not padded before.
        vendor: cut the state of ZeRO-1 as the vendor's library (torch-xla's
            `ZeroRedundancyOptimizer`) loads it: along dim 0, with rows of zeros at the end. Such a
            checkpoint loads here too; without this option it is cut as this library does.

    Raises:
        ValueError: a degree that does not fit, with the tensor and the numbers. For others see
            `tools`.
    """
    reader = described(open_checkpoint(source))
    output = check_output(output, source, reader.path)
    dp = reader.mesh["dp"] if dp is None else dp
    ensure_positive(tp=tp, dp=dp)
    xser = is_xser(reader.model_file(0)) if xser is None else xser
    config = reader.metadata["config"]
    targets = {
        name: layout_at(name, layout, tp, config, pad) for name, layout in reader.layouts.items()
    }
    mesh = {"world": tp * dp, "tp": tp, "dp": dp, "pp": 1, "cp": 1}

    def write(aside: Path) -> Digests:
        written = {aside / METADATA: _metadata(reader, aside, targets, mesh)}
        written |= _weights(reader, targets, aside, tp, xser)
        if (reader.path / "optim").is_dir():
            written |= _Optimizer(reader, targets, tp, dp, vendor).write(aside, xser)
        names = ["scheduler.pt", "user_content.pt"] + (
            ["random_state.pt"] if mesh == reader.mesh else []
        )
        return written | copy_objects(reader, aside, names)

    write_checkpoint(output, reader.step, mesh, lambda aside: reader.sound(write, aside))


def _metadata(reader: Reader, aside: Path, targets: dict[str, Layout], mesh: dict):
    return write_metadata(aside, {**reader.metadata, "mesh": mesh, "model": to_json(targets)})


def _weights(
    reader: Reader, targets: dict[str, Layout], aside: Path, tp: int, xser: bool
) -> Digests:
    first = {name: group[0] for group in reader.metadata["tied"] for name in group}
    forms, sinks = [], []
    for rank in range(tp):
        mine = {
            n: form(t.local_shape(), t.dtype) for n, t in targets.items() if first.get(n, n) == n
        }
        forms.append(mine)
        value = {name: mine[first.get(name, name)] for name in targets}
        sinks.append(sink(value, aside / "model" / shard_name(0, rank), xser))
    for name in progress(forms[0], "weights"):
        for block in full_blocks(reader, name, reader.layouts[name]):
            for rank in range(tp):
                for row, part in shard_blocks(targets[name], rank, block):
                    sinks[rank].put_rows(forms[rank][name], row, part)
    return close_all(sinks)


class _Optimizer:
    """The optimizer's state of a checkpoint on its way to other degrees."""

    def __init__(self, reader: Reader, targets: dict[str, Layout], tp: int, dp: int, vendor: bool):
        self._saved, self._targets, self._tp = SavedOptimizer(reader), targets, tp
        self._places = dp if self._saved.zero1 else 1
        self._by_rows = vendor or not self._saved.zero1
        self._head = self._saved.head

    def write(self, aside: Path, xser: bool) -> Digests:
        forms, sinks = {}, {}
        for tp in range(self._tp):
            for dp in range(self._places):
                value, forms[tp, dp] = self._lay_out(dp)
                each = sinks[tp, dp] = sink(value, aside / "optim" / shard_name(dp, tp), xser)
                map_tensors(value, lambda t: None if t.is_meta else each.put(t, t))  # of a group
        for name in progress(self._saved.names, "optimizer"):
            for field in self._saved.fields(name):
                full = self._saved.full(name, field)
                for (tp, dp), each in sinks.items():
                    if (name, field) in forms[tp, dp]:
                        expected = forms[tp, dp][name, field]
                        each.put_rows(expected, 0, self._part(full, name, tp, dp, expected))
                del full  # before the next one is read
        return close_all(sinks.values())

    def _part(
        self, full: torch.Tensor, name: str, tp: int, dp: int, expected: torch.Tensor
    ) -> torch.Tensor:
        """What of a field the file has room for, without padding: that is there already."""
        if expected.dim() == 0:
            return full
        part, rows = self._targets[name].cut(full, tp), len(expected)
        return part.reshape(self._what_is_cut(name))[dp * rows : (dp + 1) * rows]

    def _form(self, name: str, entry: torch.Tensor) -> torch.Tensor:
        if entry.dim() == 0:  # a step count and the like
            return form((), entry.dtype)
        length, *row = self._what_is_cut(name)
        return form((shard_length(length, self._places), *row), entry.dtype)

    def _what_is_cut(self, name: str) -> tuple[int, ...]:
        """The shape in which the places share a rank's part; a scalar is a row of one element."""
        local = self._targets[name].local_shape() or (1,)
        return local if self._by_rows else (torch.Size(local).numel(),)

    def _lay_out(self, dp: int) -> tuple[dict, dict[tuple[str, str], torch.Tensor]]:
        """One shard's state dict with forms for tensors, and these forms by parameter and field."""
        forms, state, masters = {}, {}, {}
        for number, name in enumerate(self._saved.names):
            for field in self._saved.fields(name):
                entry = self._saved.entry(name, field)
                if isinstance(entry, torch.Tensor):
                    entry = forms[name, field] = self._form(name, entry)
                if field == MASTER:
                    masters[number] = entry
                else:
                    state.setdefault(number, {})[field] = entry
        if not self._saved.zero1:
            return {**self._head, "state": state}, forms
        value = {
            "state": {},
            "param_groups": self._head["param_groups"],
            "base_state": state,
            **self._shape_info(),
        }
        if not self._by_rows:
            value["sharding"] = {"rank": dp, "size": self._places}
        return value | ({MASTER: masters} if masters else {}), forms

    def _shape_info(self) -> dict[str, dict]:
        """What the state says of each parameter, see `zero1_state`; the vendor's says its shape."""
        layouts = [self._targets[name] for name in self._saved.names]
        if self._by_rows:
            shapes = [torch.Size(layout.local_shape()) for layout in layouts]
            return {"shape_info": dict(enumerate(shapes))}
        groups = self._head["param_groups"]
        names = [n for g in groups for n in g.get("param_names", [None] * len(g["params"]))]
        infos = (_info(*each, self._places) for each in zip(names, layouts, strict=True))
        return {"shape_info": dict(enumerate(infos))}


def _info(name: str | None, layout: Layout, places: int) -> dict:
    """What the state of ZeRO-1 says of one parameter, by the marks that layers give it."""
    shape, cut = list(layout.local_shape()), layout.partition
    numel = torch.Size(shape).numel()
    marks = dict(TENSOR_PARALLEL_ATTRIBUTES)
    if cut is not None:
        fused = set(cut.replicas) == {1} and len(set(cut.sizes)) == 1
        marks |= {
            "tensor_model_parallel": True,
            "partition_dim": cut.dim,
            "partition_stride": len(cut.sizes) if fused else 1,
            "num_partitions": cut.parts,
            "rank_ordering": None if cut.order is None else list(cut.order),
        }
    return {
        "name": name,
        "shape": shape,
        "padding": shard_length(numel, places) * places - numel,
        "dtype": str(layout.dtype).removeprefix("torch."),
        **marks,
    }
