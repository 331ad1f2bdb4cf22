"""One training step of one rank of any mesh, in one process and without memory.

The real model, loss and optimizer run on the meta device: every tensor has a shape and no values,
and `comm` records each collective and answers with the right shape. So a run over 128 cores can be
looked at on a laptop, to the byte.

    python -m tutorial_lib.lab.plan.dry_run llama2-7b --rank 5
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend `fake`
from torch.utils.flop_counter import FlopCounterMode

from tutorial_lib.backends import BACKENDS
from tutorial_lib.checkpoint import layout
from tutorial_lib.lab.plan.runs import TUTORIALS, Run
from tutorial_lib.lab.show import tables
from tutorial_lib.parallel_layers import comm, parallel_state, ranks
from tutorial_lib.parallel_layers.buckets import meta_stands_for_host
from tutorial_lib.training import memory
from tutorial_lib.training.loop import accumulate_gradients


@dataclass(frozen=True)
class StateFile:
    """What a file of a checkpoint holds."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by place
    nbytes: int  # of the tensors; one with several names counts once

    @classmethod
    def of(cls, state: dict) -> "StateFile":
        tensors = dict(_tensors(state))
        memory = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()
        }
        return cls(
            {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, sum(memory.values())
        )


def _tensors(value, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested dicts and lists, by their place."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{prefix}.{key}" if prefix else str(key))


@dataclass(frozen=True)
class DryRun:
    """What one rank holds, says and computes in a step."""

    rank: int
    mesh: dict[str, int]  # sizes by axis
    parameters: int  # of this rank
    model_parameters: int  # of the whole model, without padding
    nbytes: dict[str, int]  # held at the end of the last micro-batch, by kind
    saved: list[memory.Saved]  # by autograd for the backward pass of a micro-batch
    # Of matrix multiplications and attention in a step, two for each multiply and add.
    operations: int
    collectives: list[comm.Collective]  # of a step, in order
    files: dict[str, StateFile]  # that a checkpoint has of this rank

    def traffic(self) -> dict[tuple[str, str, int], tuple[int, float]]:
        """By `(axis, kind, group size)`: how many collectives, and the bytes that a rank sends in
        them.
        """
        count, sent = Counter(), Counter()
        for c in self.collectives:
            count[c.axis, c.kind, c.group_size] += 1
            sent[c.axis, c.kind, c.group_size] += c.bytes_sent
        return {key: (count[key], sent[key]) for key in count}

    def tables(self) -> list[tables.Table]:
        """The whole of it, to be read."""
        held = [
            {"what": kind, "bytes": size, "": tables.size(size)}
            for kind, size in self.nbytes.items()
        ]
        total = sum(self.nbytes.values())
        held.append({"what": "together", "bytes": total, "": tables.size(total)})
        where = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        said = [
            {
                "axis": axis,
                "collective": kind,
                "ranks": size,
                "times": count,
                "bytes sent": round(sent),
            }
            for (axis, kind, size), (count, sent) in sorted(self.traffic().items())
        ]
        files = [
            {"file": name, "tensors": len(file.tensors), "bytes": file.nbytes}
            for name, file in self.files.items()
        ]
        share = f"{self.parameters:,} of {self.model_parameters:,} parameters"
        title = f"Rank {self.rank} of {where}: {share}"
        return [
            tables.table(held, title),
            tables.table(said, "Collectives of a step"),
            tables.table(files, "Its files in a checkpoint"),
        ]

    def __str__(self) -> str:
        return "\n\n".join(map(repr, self.tables()))


@contextmanager
def dry_world(rank: int, world_size: int) -> Iterator[None]:
    """Inside the block this process is one rank of a world whose other ranks do not exist.

    On the meta device collectives work as ever. What the ranks' hosts exchange comes back as if
    every rank were this one.

    Raises:
        ValueError: no such rank.
        RuntimeError: the process is in a world already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in [0, {world_size})")
    if dist.is_initialized():
        raise RuntimeError(
            "a dry run needs a process that is no rank of anything: torch.distributed is up here"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _FusedAttention(TorchFunctionMode):
    """On meta, PyTorch writes attention out; this calls the fused kernel wherever the CPU would."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is torch.Tensor.backward:
            return self._backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _backward(self, tensor, gradient=None, **options):
        with self:  # what is computed again attends too
            torch.autograd.backward(tensor, gradient, **options)

    @staticmethod
    def _attend(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        if dropout_p or enable_gqa:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@contextmanager
def _as_on(backend: str) -> Iterator[None]:
    """What differs between backends beside where a tensor is: the attention kernel, and the size of
    buckets.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    fused = nullcontext() if backend == "xla" else _FusedAttention()
    with fused, meta_stands_for_host() if backend == "cpu" else nullcontext():
        yield


def dry_run(run: Run, rank: int = 0, backend: str = "xla") -> DryRun:
    """One step of `run` as `rank` would do it.

    Two micro-batches are run, and seen to say the same; further ones are counted like them.

    Args:
        backend: what to be like. `xla` has no fused attention, so attention matrices are saved
            unless they are checkpointed; `cpu` has small buckets of gradients.

    Raises:
        ValueError: no such rank or backend, sizes that do not fit each other, or rotary embeddings
            that depend on the positions' values.
        RuntimeError: this process is a rank of something.
    """
    rope = getattr(run.config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type {kind!r} reads the values of the positions, which a dry run does not have"
        )
    with dry_world(rank, run.world_size), _as_on(backend):
        with torch.device("meta"):
            model, optimizer = run.build()
        batch = run.batch("meta")
        targets = model.count_targets(batch)
        with comm.record() as micro_batch, FlopCounterMode(display=False) as counter:
            with memory.SavedActivations(model, batch.values()) as saved:
                loss = model(**batch, num_items_in_batch=targets).loss
            loss.backward()
        optimizer.zero_grad()

        ran = min(run.accumulation, 2)
        with comm.record() as collectives:
            accumulate_gradients(model, [batch] * ran)
            before_the_step = len(collectives)
            gradients = memory.gradient_bytes(model)
            optimizer.step()
        start = len(collectives[:before_the_step]) - ran * len(micro_batch) - (run.dp > 1)
        end = start + ran * len(micro_batch)
        assert collectives[start:end] == micro_batch * ran, "micro-batches differ in what they say"
        collectives[end:end] = micro_batch * (run.accumulation - ran)

        return DryRun(
            rank=rank,
            mesh=ranks.mesh(),
            parameters=sum(p.numel() for p in model.parameters()),
            model_parameters=sum(math.prod(layout.layout_of(p).shape) for p in model.parameters()),
            nbytes={
                "weights": memory.weight_bytes(model),
                "gradients": gradients,
                "optimizer": memory.optimizer_bytes(optimizer),
                "saved activations": saved.nbytes,
            },
            saved=saved.tensors,
            operations=counter.get_total_flops() * run.accumulation,
            collectives=collectives,
            files=_files(model, optimizer, run.zero),
        )


def _files(model, optimizer, zero: bool) -> dict[str, StateFile]:
    """The files that `save_checkpoint` keeps of this rank's state."""
    place = ranks.my_place()
    weights, state = (layout.shard_name(dp, place.tp) for dp in (0, place.dp if zero else 0))
    return {
        f"model/{weights}": StateFile.of(model.state_dict()),
        f"optim/{state}": StateFile.of(optimizer.state_dict()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_lib.lab.plan.dry_run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", choices=TUTORIALS, help="a run as it was published")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument(
        "--backend", choices=BACKENDS, default="xla", help="what the ranks compute with"
    )
    chosen = parser.parse_args(arguments)
    try:
        print(dry_run(TUTORIALS[chosen.run], chosen.rank, chosen.backend))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
