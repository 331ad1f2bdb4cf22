"""One device against the CPU: layers, a step of each model, and the cost of recomputation.

    python -m tests.benchmarks.gpu_check [--backend cuda]

Layers and models compute in float64 on both; the table has the largest difference of losses,
gradients and weights after a step, over the largest number. Recomputation is measured on 4 layers
of Llama 2 7B in bfloat16, sequence 4096, batch 1, with attention written out and fused, beside
Hugging Face's own model. The models take turns; medians count. Saved bytes come from saved-tensor
hooks, peaks from torch. On a CPU add `--small`, which shows only that the code works.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
import transformers
from torch import nn

from tests.benchmarks.command import parser
from tests.tiny_models import LENGTH, TINY, VOCABULARY, Samples
from tutorial_lib import backends
from tutorial_lib.lab.show.tables import table
from tutorial_lib.models.llama2 import LlamaForCausalLM, make_config
from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.modules.rms_norm import RMSNorm
from tutorial_lib.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_state,
)
from tutorial_lib.parallel_layers.layer_norm import LayerNorm
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.marks import move_model_to_device
from tutorial_lib.trainer.model import checkpoint_modules
from tutorial_lib.training.memory import SavedActivations

LAYERS = {
    "ColumnParallelLinear": lambda: ColumnParallelLinear(32, 64),
    "RowParallelLinear": lambda: RowParallelLinear(32, 64),
    "GQAQKVColumnParallelLinear": lambda: GQAQKVColumnParallelLinear(32, [32, 16]),
    "LayerNorm": lambda: LayerNorm(32),
    "RMSNorm": lambda: RMSNorm(32),
    "ParallelEmbedding": lambda: ParallelEmbedding(VOCABULARY, 32),
    "parallel_cross_entropy": lambda: ColumnParallelLinear(32, VOCABULARY, gather_output=False),
}


def layer_loss(name: str, layer: nn.Module, device: torch.device) -> torch.Tensor:
    ids = torch.arange(4 * LENGTH, device=device).view(4, LENGTH) % VOCABULARY
    if name == "ParallelEmbedding":
        return layer(ids).square().mean()
    out = layer(torch.linspace(-1, 1, ids.numel() * 32, device=device).view(4, LENGTH, 32).double())
    if name == "parallel_cross_entropy":
        return parallel_cross_entropy(out, ids).mean()
    return sum(part.square().mean() for part in (out if isinstance(out, tuple) else (out,)))


def model_loss(name: str, model: nn.Module, device: torch.device) -> torch.Tensor:
    batch = torch.utils.data.default_collate([Samples(name, 4)[i] for i in range(4)])
    return model(**{key: value.to(device) for key, value in batch.items()}).loss


def step(build, loss_of, name: str, device: torch.device) -> list[torch.Tensor]:
    """The loss, the gradients and the weights after one step of AdamW."""
    torch.manual_seed(0)
    model = move_model_to_device(build().double(), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = loss_of(name, model, device)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return [t.detach().cpu() for t in (loss, *gradients, *model.parameters())]


def differences(device: torch.device) -> list[dict]:
    cases = [(name, build, layer_loss) for name, build in LAYERS.items()]
    for name, tiny in TINY.items():
        config = tiny.config(**dict.fromkeys(tiny.dropout, 0.0))
        cases.append((name, lambda tiny=tiny, config=config: tiny.build(config), model_loss))
    rows = []
    for name, build, loss_of in cases:
        here, there = (step(build, loss_of, name, torch.device(d)) for d in (device, "cpu"))
        gap = max((a - b).abs().max().item() for a, b in zip(here, there, strict=True))
        largest = max(tensor.abs().max().item() for tensor in there)
        rows.append({"float64": name, "tensors": len(there), "difference": gap / largest})
    return rows


def checkpointing(backend: str, steps: int, full: bool) -> list[dict]:
    """Milliseconds, saved and peak MiB of each way, a layer."""
    device, module = backends.get_device(backend), getattr(torch, backend)
    length, dtype = (4096, torch.bfloat16) if full else (512, torch.float32)
    preset = "full" if full else "small"
    config = make_config(preset, num_hidden_layers=4, vocab_size=256, use_cache=False)
    ids = torch.arange(length, device=device)[None] % 256
    rows = []
    for attention in ("eager", "sdpa"):
        for mode in ("none", "selective", "full"):
            config._attn_implementation = attention
            ours = LlamaForCausalLM(config, use_flash_attention=attention == "sdpa")
            if mode != "none":
                checkpoint_modules(ours, LlamaForCausalLM.checkpointed[mode])
            ways = {"ours": ours}
            if mode != "selective":  # which Hugging Face does not have
                ways["Hugging Face"] = transformers.LlamaForCausalLM(config)
            if mode == "full":
                ways["Hugging Face"].gradient_checkpointing_enable({"use_reentrant": False})
            for model in ways.values():
                move_model_to_device(model.to(dtype).train(), device)
            seconds, peaks = {way: [] for way in ways}, {}
            for taken in range(steps + 2):
                for way, model in ways.items():
                    model.zero_grad(set_to_none=True)
                    module.synchronize()
                    if measured := hasattr(module, "max_memory_allocated"):
                        module.reset_peak_memory_stats()
                        held = module.memory_allocated()
                    begun = time.perf_counter()
                    model(input_ids=ids, labels=ids).loss.backward()
                    module.synchronize()
                    if taken >= 2:  # the first ones fill the allocator and choose kernels
                        seconds[way].append(time.perf_counter() - begun)
                    if measured:
                        peaks[way] = (module.max_memory_allocated() - held) / 2**20 / 4
            for way, model in ways.items():
                with SavedActivations(model, [ids]) as saved:
                    model(input_ids=ids, labels=ids)
                rows.append({
                    "attention": {"eager": "written out", "sdpa": "fused"}[attention],
                    "recomputed": mode, "model": way,
                    "ms": 1e3 * statistics.median(seconds[way]) / 4,
                    "saved MiB": saved.nbytes / 2**20 / 4, "peak MiB": peaks.get(way),
                })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    given = parser(__doc__, backend="auto", steps=10)
    given.add_argument("--small", action="store_true", help="not the size of Llama 2 7B")
    chosen = given.parse_args(arguments)
    backend = backends.check_backend(chosen.backend)
    os.environ |= backends.rank_environment(backend, 0, 1, master_port=0)
    backends.init_distributed(backend, store=dist.HashStore())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    print(f"{backend}, torch {torch.__version__}")
    print(table(differences(backends.get_device(backend)), "One step, here and on the CPU"))
    rows = checkpointing(backend, chosen.steps, not chosen.small)
    print(table(rows, "A layer of Llama 2, forward and backward"))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
