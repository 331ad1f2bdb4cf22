"""One training step of one rank of any mesh, in one process and without memory.

The real model, loss and optimizer run on the meta device: every tensor has a shape and no values,
and `comm` records each collective and answers with the right shape. So a run over 128 cores can be
looked at on a laptop, to the byte.

    python -m tutorial_lib.lab.plan llama2-7b --dry-run 5
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tutorial_lib.backends import BACKENDS
from tutorial_lib.checkpoint import layout
from tutorial_lib.lab.plan.runs import Run, dry_world
from tutorial_lib.lab.show.tables import Table, table
from tutorial_lib.parallel_layers import comm, ranks
from tutorial_lib.parallel_layers.buckets import meta_stands_for_host
from tutorial_lib.training import memory
from tutorial_lib.training.loop import accumulate_gradients

from .overview import held, sent


@dataclass(frozen=True)
class DryRun:
    """What one rank holds, sends and computes in a step."""

    rank: int
    mesh: dict[str, int]  # sizes by axis
    parameters: int  # of this rank
    model_parameters: int  # of the whole model, without padding
    nbytes: dict[str, int]  # held at the end of the last micro-batch, by kind
    # Of matrix multiplications and attention in a step, two for each multiply and add.
    operations: int
    collectives: list[comm.Collective]  # of a step, in order
    files: dict[str, list[torch.Tensor]]  # that a checkpoint has of this rank

    def tables(self) -> list[Table]:
        """The whole of it, to be read."""
        where = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        share = f"{self.parameters:,} of {self.model_parameters:,} parameters"
        files = [
            {"file": name, "tensors": len(tensors), "bytes": memory.tensor_bytes(tensors)}
            for name, tensors in self.files.items()
        ]
        return [
            held(self.nbytes, f"Rank {self.rank} of {where}: {share}"),
            sent(self.collectives),
            table(files, "Its files in a checkpoint"),
        ]

    def __str__(self) -> str:
        return "\n\n".join(map(repr, self.tables()))


_attend = F.scaled_dot_product_attention


def _attend_fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """On meta, PyTorch writes attention out; this calls the fused kernel wherever the CPU would."""
    if dropout_p or options.get("enable_gqa"):
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    options = {"attn_mask": attn_mask, "scale": options.get("scale")}
    return kernel(query, key, value, dropout_p, is_causal, **options)[0]


@contextmanager
def _as_on(backend: str) -> Iterator[None]:
    """What differs between backends beside where a tensor is: the attention kernel, and the size of
    buckets.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    attend = _attend if backend == "xla" else _attend_fused
    # Not a TorchFunctionMode: autograd leaves it for what is computed again, from torch 2.13 on.
    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        with meta_stands_for_host() if backend == "cpu" else nullcontext():
            yield


def dry_run(run: Run, rank: int = 0, backend: str = "xla") -> DryRun:
    """One step of `run` as `rank` would do it.

    Runs two micro-batches and checks that their collectives agree; counts further ones like them.

    Args:
        backend: what to be like. `xla` has no fused attention, so attention matrices are saved
            unless they are checkpointed; `cpu` has small buckets of gradients.

    Raises:
        ValueError: no such rank or backend, sizes that do not fit each other, or rotary embeddings
            that depend on the positions' values.
        RuntimeError: this process is in a process group already.
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
            end = len(collectives) - (run.dp > 1)  # with others the loss is reduced last
            gradients = memory.gradient_bytes(model)
            optimizer.step()
        start = end - ran * len(micro_batch)
        assert collectives[start:end] == micro_batch * ran, "micro-batches differ in collectives"
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
            operations=counter.get_total_flops() * run.accumulation,
            collectives=collectives,
            files=_files(model, optimizer, run.zero),
        )


def _files(model, optimizer, zero: bool) -> dict[str, list[torch.Tensor]]:
    """The tensors in each file that `save_checkpoint` keeps of this rank's state."""
    place = ranks.my_place()
    weights, state = (layout.shard_name(dp, place.tp) for dp in (0, place.dp if zero else 0))
    kept = {
        f"model/{weights}": model.state_dict(keep_vars=True),
        f"optim/{state}": optimizer.state_dict(),
    }
    return {
        name: [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
        for name, content in kept.items()
    }
