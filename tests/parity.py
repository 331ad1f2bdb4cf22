"""What the models' tests share: training over ranks and in one process, to be compared; errors
on every rank.
"""

import importlib

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tutorial_lib.backends import mark_step
from tutorial_lib.models.bert import model_inputs
from tutorial_lib.models.full_weights import full_tensors
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.sharding import partition_of
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.training.loop import train


def noise(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers, the same in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def train_alone(
    model, loss_of, micro_batch, micro_batches: int, steps: int, lr: float, max_norm: float
):
    """Training by hand: torch's AdamW, and one batch that holds all micro-batches of a step.

    Returns:
        Losses, gradient norms, gradients of the first step by name, and the weights at the end by
        name.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    losses, gradients, norms = [], None, []
    for step in range(steps):
        parts = [micro_batch(step * micro_batches + index) for index in range(micro_batches)]
        loss = loss_of(model, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
        loss.backward()
        if step == 0:
            gradients = {name: gradient_of(p).clone() for name, p in model.named_parameters()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def whole(tensor: torch.Tensor, marked: torch.Tensor | None = None) -> torch.Tensor:
    """The full tensor of the shards of all ranks, sharded as it is or as `marked` is."""
    partition = partition_of(tensor if marked is None else marked)
    if partition is None:
        return tensor
    return partition.merge(comm.all_gather(tensor[None], 0).unbind(0))


def whole_gradients(model) -> dict[str, torch.Tensor]:
    """The gradients of full weights, averaged over the replicas."""
    size, group = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_group()

    def reduced(parameter: torch.Tensor) -> torch.Tensor:
        grad = comm.all_reduce("sum", gradient_of(parameter), group) / size
        shared = getattr(parameter, "sequence_parallel_enabled", False)
        return comm.all_reduce("sum", grad) if shared else grad

    return full_tensors(model, {name: reduced(p) for name, p in model.named_parameters()})


def train_together(
    model, micro_batch, zero: bool, accumulation: int, steps: int, lr: float, max_norm: float,
    sequence_parallel: bool = False
):  # fmt: skip
    """The same over the ranks of the mesh, with the library's loop and optimizer; the same results,
    on every rank.
    """
    precision = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")
    nxd_config = neuronx_distributed_config(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_size(),
        optimizer_config=dict(zero_one_enabled=zero, grad_clipping=True, max_grad_norm=max_norm),
        mixed_precision_config=dict.fromkeys(precision, False),
        sequence_parallel=sequence_parallel,
    )
    optimizer = initialize_parallel_optimizer(
        nxd_config, torch.optim.AdamW, model.parameters(), lr=lr, weight_decay=0.01
    )
    dp_size, device = parallel_state.get_data_parallel_size(), next(model.parameters()).device
    mine = range(parallel_state.get_data_parallel_rank(), steps * accumulation * dp_size, dp_size)
    batches = ({k: t.to(device) for k, t in micro_batch(index).items()} for index in mine)
    first, original = {}, optimizer.step

    def step():
        if not first:
            first.update(whole_gradients(model))
        return original()

    optimizer.step = step
    done = train(model, optimizer, batches, steps=steps, gradient_accumulation_steps=accumulation)
    final = full_tensors(model)
    mark_step()
    first, final = ({k: t.cpu() for k, t in tensors.items()} for tensors in (first, final))
    return [s.loss for s in done], [s.grad_norm for s in done], first, final


def assert_same(found, expected, tolerance: float = 1e-10) -> None:
    """That two results of training agree."""
    for numbers, right in zip(found[:2], expected[:2], strict=True):
        assert numbers == pytest.approx(right, abs=tolerance)
    for tensors, right in zip(found[2:], expected[2:], strict=True):
        assert tensors.keys() == right.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(
                value, right[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def next_token_batch(
    index: int, batch: int = 2, length: int = 16, vocabulary: int = 96, kind: str = "whole"
) -> dict:
    """Ids and labels `[B, S]` for a model that shifts them itself.

    Predicted tokens differ in number from one micro-batch to the next, so a mean of means would
    show. Kinds: "whole", padded "left" or "right", "packed" documents, and Megatron-LM's "targets".
    """
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    labels, mask, cut = ids.clone(), torch.ones_like(ids), length - 1 - index % 5
    if kind == "left":
        mask[0, : length - cut] = 0
        labels[0, : length - cut + 1] = -100  # the first token too: padding would predict it
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
    labels[0, cut:] = -100
    if kind == "right":
        mask[0, cut:] = 0
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if kind == "packed":
        positions = torch.arange(length).repeat(batch, 1)
        positions[0, cut // 2 :] -= cut // 2
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    if kind == "targets":
        return {"input_ids": ids, "targets": F.pad(labels[:, 1:], (0, 1), value=-100)}
    return {"input_ids": ids, "labels": labels}


def bert_batch(index: int, batch: int = 2, length: int = 16, vocabulary: int = 96) -> dict:
    """The same for BERT, with padding, and segments of two sentences."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, vocabulary, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 1 - index % 5 :] = 0
    labels = torch.full_like(ids, -100)
    for row in range(batch):
        positions = torch.randperm(length // 2, generator=generator)[: 1 + (index + row) % 4]
        labels[row, positions] = ids[row, positions]
    segments = (torch.arange(length) >= length // 2).long().expand_as(ids)
    return model_inputs([ids, segments, mask, labels, torch.arange(batch) % 2])


def micro_batch(name: str, kind: str, index: int) -> dict:
    """A batch for a model of `TINY`."""
    return bert_batch(index) if name == "bert" else next_token_batch(index, kind=kind)


def hugging_face_loss(model, batch: dict) -> torch.Tensor:
    """The loss of Hugging Face's model; its own one is of float32 logits in a causal model."""
    if "next_sentence_label" in batch:
        return model(**batch).loss
    batch = dict(batch)
    targets = batch.pop("targets", None)
    if targets is None:
        targets = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    logits = model(**batch, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return losses / (targets != -100).sum()


def reference(tiny, config, dtype: torch.dtype = torch.float64):
    """Hugging Face's model with the initial weights that ours has, and no float32 inside."""
    return precise(hugging_face_reference(tiny.theirs, config).to(dtype))


def precise(model):
    """The same model, without norms that compute in float32 whatever their input is."""
    for norm in model.modules():
        if isinstance(norm, LlamaRMSNorm):

            def forward(x, norm=norm):
                mean = x.square().mean(-1, keepdim=True)
                return norm.weight * (x * (mean + norm.variance_epsilon).rsqrt())

            norm.forward = forward
    return model


def messages(module: str, tables: tuple[str, ...]) -> dict[str, str]:
    """What each case in tables of a test's module raises: on every rank by itself, so that none is
    left waiting for another.
    """
    found = {}
    for table in tables:
        for name, (case, _) in getattr(importlib.import_module(module), table).items():
            try:
                case()
            except ValueError as error:
                found[name] = str(error)
    return found


def assert_messages(ranks, module: str, *tables: str, size: int) -> None:
    """That each case, `name: (function, words)`, raises ValueError with these words on every one of
    `size` ranks.
    """
    for found in ranks(messages, module, tables, world_size=size, tp=size):
        for table in tables:
            for name, (_, words) in getattr(importlib.import_module(module), table).items():
                assert name in found, f"{name} is not refused"
                assert all(word in found[name] for word in words), (name, found[name])
