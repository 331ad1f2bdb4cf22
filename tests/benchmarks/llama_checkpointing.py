"""A layer of Llama 2, forward and backward, by what it recomputes: ours beside Hugging Face's
layers.

    python -m tests.benchmarks.llama_checkpointing [--backend cuda]

On a GPU: bfloat16, 4 layers of the 7B model, sequence 4096, batch 1. On the CPU the same code runs
in float32 at a small size, which shows that it works and says nothing about the GPU. Attention is
written out (`eager`) in both, as a fused kernel keeps no probabilities that selective checkpointing
could drop. All take turns within one run; medians count. Saved bytes come from saved-tensor hooks,
peak memory from the allocator. Prints JSON.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama import modeling_llama as hf

from tests.pool import RankPool
from tutorial_lib.backends import get_device
from tutorial_lib.models.attention import CoreAttention, causal_mask
from tutorial_lib.models.llama2 import LlamaForCausalLM, ParallelDecoderLayer, make_config
from tutorial_lib.trainer.model import checkpoint_modules
from tutorial_lib.training.memory import SavedActivations

MODES = {"none": None, "selective": CoreAttention, "full": ParallelDecoderLayer}


def eager_checkpointed(module, query, key, value, attention_mask, **options):
    """Hugging Face's written-out attention, run again in backward."""
    return checkpoint(
        hf.eager_attention_forward, module, query, key, value, attention_mask,
        use_reentrant=False, **options,
    )  # fmt: skip


AttentionInterface.register("eager_checkpointed", eager_checkpointed)


class PlainLayers(nn.Module):
    """Hugging Face's decoder layers."""

    def __init__(self, config: LlamaConfig, mode: str, device: torch.device):
        super().__init__()
        config = LlamaConfig(**config.to_dict())
        config._attn_implementation = "eager_checkpointed" if mode == "selective" else "eager"
        self.full = mode == "full"
        with device:
            self.layers = nn.ModuleList(
                hf.LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
            )
            self.rotary = hf.LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.size(1)
        positions = self.rotary(hidden, torch.arange(length, device=hidden.device)[None])
        mask = torch.full(
            (length, length),
            torch.finfo(hidden.dtype).min,
            dtype=hidden.dtype,
            device=hidden.device,
        )
        keywords = dict(attention_mask=mask.triu(1)[None, None], position_embeddings=positions)
        for layer in self.layers:
            if self.full:
                hidden = checkpoint(layer, hidden, use_reentrant=False, **keywords)
            else:
                hidden = layer(hidden, **keywords)
        return hidden


class OurLayers(nn.Module):
    """The sharded decoder layers of `tutorial_lib.models.llama2`."""

    def __init__(self, config: LlamaConfig, mode: str, device: torch.device):
        super().__init__()
        with device:
            self.model = LlamaForCausalLM(config).model
        if MODES[mode] is not None:
            checkpoint_modules(self.model, MODES[mode])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.size(1)
        positions = self.model.rotary_emb(hidden, torch.arange(length, device=hidden.device)[None])
        mask = causal_mask(length, hidden.device)
        for layer in self.model.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=positions)
        return hidden


def measure(backend: str, sizes: dict, length: int, dtype: torch.dtype, steps: int) -> dict:
    """Milliseconds, saved and peak MiB of each way, per layer."""
    device = get_device(backend)
    config = make_config("full", **sizes)
    hidden = torch.randn(
        1, length, config.hidden_size, dtype=dtype, device=device, requires_grad=True
    )
    layers = config.num_hidden_layers

    def synchronize() -> None:
        if backend == "cuda":
            torch.cuda.synchronize()

    results = {}
    for mode in MODES:
        # Two models of this size at a time fit every GPU that is asked for; all six would not.
        ways = {"plain": PlainLayers(config, mode, device), "ours": OurLayers(config, mode, device)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        peaks = {}
        for model in ways.values():
            model.to(dtype).train()
        for step in range(steps + 2):
            for name, model in ways.items():
                for parameter in model.parameters():
                    parameter.grad = None
                hidden.grad = None
                synchronize()
                if backend == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                begin = time.perf_counter()
                model(hidden).sum().backward()
                synchronize()
                if step >= 2:  # the first ones fill the allocator and choose kernels
                    seconds[name].append(time.perf_counter() - begin)
                if backend == "cuda":
                    peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**20 / layers
        for name, model in ways.items():
            with SavedActivations(model, [hidden]) as saved:
                model(hidden)
            results[f"{name}, {mode}"] = {
                "ms": round(1e3 * statistics.median(seconds[name]) / layers, 2),
                "saved_MiB": round(saved.nbytes / 2**20 / layers, 1),
                "peak_MiB": round(peaks[name], 1) if peaks else None,
            }
        del ways, model
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    sizes: dict = {"num_hidden_layers": 4}
    length, dtype = 4096, torch.bfloat16
    if arguments.backend == "cpu":
        sizes |= {
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 32,
        }
        length, dtype = 512, torch.float32
    pool = RankPool(1, arguments.backend)
    (results,) = pool.run(
        measure, arguments.backend, sizes, length, dtype, arguments.steps, timeout=600
    )
    pool.stop()
    report = {
        "backend": arguments.backend,
        "dtype": str(dtype),
        "sequence": length,
        "per_layer": results,
    }
    report["ours_over_plain"] = {
        m: round(results[f"ours, {m}"]["ms"] / results[f"plain, {m}"]["ms"], 3) for m in MODES
    }
    report["ours_over_no_checkpointing"] = {
        m: round(results[f"ours, {m}"]["ms"] / results["ours, none"]["ms"], 3) for m in MODES
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
