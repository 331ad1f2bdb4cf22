"""A training run as far as its cost depends on it, and the runs that the tutorials describe.

The same description can be trained on a mesh (`build`), dry-run (`dry_run`) or planned (`Plan`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend `fake`
from transformers import PretrainedConfig

from tutorial_lib.checkpoint.architectures import MODELS
from tutorial_lib.models import bert, gpt, gpt_neox, llama2
from tutorial_lib.models.configs import check_config, feed_forward_size
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams, get_param_groups_by_weight_decay
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed
from tutorial_lib.parallel_layers.utils import ensure_divisibility, ensure_positive
from tutorial_lib.trainer import (
    NxDOptimizer,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)
from tutorial_lib.utils.activation_checkpoint import apply_activation_checkpointing


@dataclass(frozen=True)
class Run:
    """A model, the mesh it is sharded over, and how it is trained with AdamW.

    Args:
        config: of Hugging Face; its `model_type` is a key of `MODELS`.
        tp, dp: tensor- and data-parallel size.
        micro_batch, sequence: B and S of a micro-batch of one rank.
        accumulation: micro-batches of one rank in a step.
        sequence_parallel: cut norms and residuals along the sequence.
        checkpointing: what runs again in backward, a key of the model's `checkpointed`.
        zero: ZeRO-1, which keeps float32 masters of its shards; and a step is clipped with and
            without it.
        dtype: of weights and activations. Moments are float32.
        float32_gradients: accumulate in float32; needs `zero`.
        options: further keywords of the model, such as BERT's `shard_mlp`.

    Raises:
        ValueError: values that contradict each other, with the numbers.
    """

    config: PretrainedConfig
    tp: int = 1
    dp: int = 1
    micro_batch: int = 1
    sequence: int = 2048
    accumulation: int = 1
    sequence_parallel: bool = False
    checkpointing: str = "none"
    zero: bool = False
    dtype: torch.dtype = torch.float32
    float32_gradients: bool = False
    options: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self):
        if self.family not in MODELS:
            raise ValueError(f"model_type {self.family!r} is not one of {', '.join(MODELS)}")
        ensure_positive(
            tp=self.tp, dp=self.dp, micro_batch=self.micro_batch, sequence=self.sequence,
            accumulation=self.accumulation,
        )  # fmt: skip
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype {self.dtype} is not a floating-point dtype")
        model = MODELS[self.family]
        known = set(model.options()) - {"sequence_parallel_enabled"}  # a field here
        if unknown := sorted(set(self.options) - known):
            takes = ", ".join(sorted(known)) or "none"
            raise ValueError(f"options {', '.join(unknown)} of {self.family}; it takes {takes}")
        if self.checkpointing not in model.checkpointed:
            kinds = ", ".join(model.checkpointed)
            raise ValueError(
                f"checkpointing {self.checkpointing!r} of {self.family} is not one of {kinds}"
            )
        if self.float32_gradients and not self.zero:
            raise ValueError("float32_gradients needs zero: ZeRO-1 is what accumulates them")
        check_config(self.config, self.tp, self.shards("mlp"))
        if self.sequence_parallel:
            if self.family == "bert":
                raise ValueError("sequence_parallel is not available for bert")
            ensure_divisibility(self.sequence, self.tp, "sequence over tensor-parallel ranks")
        if self.sequence > self.config.max_position_embeddings:
            raise ValueError(
                f"sequence {self.sequence} is above the model's "
                f"{self.config.max_position_embeddings} positions"
            )

    @property
    def family(self) -> str:
        return self.config.model_type

    def shards(self, what: str) -> bool:
        """Whether tensor parallelism shards the `mlp` or the `vocabulary`; BERT alone has the
        choice.
        """
        return self.family != "bert" or self.options.get(f"shard_{what}", False)

    @property
    def features(self) -> int:
        """F of a rank's feed-forward layers."""
        return feed_forward_size(self.config) // (self.tp if self.shards("mlp") else 1)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch of one rank."""
        return self.micro_batch * self.sequence

    @property
    def wide(self) -> torch.dtype:
        """What sums and states are kept in: float32, or more if the weights are."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def uses_sdpa(self) -> bool:
        """Attention is PyTorch's `scaled_dot_product_attention`, not written out."""
        return self.family in ("bert", "gpt_neox") or self.options.get("use_flash_attention", False)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.micro_batch * self.accumulation * self.dp

    def change(self, **changes) -> "Run":
        """The same run with other choices."""
        return replace(self, **changes)

    def model(self) -> nn.Module:
        """This rank's model on torch's default device; the mesh is up."""
        options = dict(self.options)
        if self.sequence_parallel and self.tp > 1:
            options["sequence_parallel_enabled"] = True
        return MODELS[self.family](self.config, **options)

    def build(self) -> tuple[nn.Module, NxDOptimizer]:
        """Model and optimizer of this rank on torch's default device; sets up the mesh too, unless
        it is up.
        """
        nxd_config = neuronx_distributed_config(
            tensor_parallel_size=self.tp,
            sequence_parallel=self.sequence_parallel,
            optimizer_config={"zero_one_enabled": self.zero},
            mixed_precision_config={"use_fp32_grad_acc": self.float32_gradients},
        )
        model_parallel_xla_manual_seed(0)
        model = self.model().to(self.dtype)
        classes = model.checkpointed[self.checkpointing]
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))
        groups = get_param_groups_by_weight_decay(model, weight_decay=0.01)
        return model.train(), initialize_parallel_optimizer(
            nxd_config, AdamW_FP32OptimParams, groups, lr=1e-4
        )

    def batch(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """A micro-batch without content: every token is number 1, and with BERT the last one of a
        row is padding.
        """
        ids = torch.ones(self.micro_batch, self.sequence, dtype=torch.long, device=device)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if self.family == "bert":
            seen, segments = ids.clone(), torch.zeros_like(ids)
            seen[:, -1] = 0
            batch |= {"token_type_ids": segments, "attention_mask": seen}
            batch["next_sentence_label"] = torch.zeros_like(ids[:, 0])
        return batch


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
            "a dry run needs a process outside of any process group: torch.distributed is up here"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _tutorials() -> dict[str, Run]:
    half, whole = dict(dtype=torch.bfloat16), dict(zero=True, checkpointing="full")
    sharded = dict(half, zero=True, sequence_parallel=True)
    no_dropout = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    gpt_6_7b = Run(gpt.make_config("full", **no_dropout), 8, 4, 1, 2048, 16, **half)
    return {
        "bert-large": Run(bert.make_config("full"), 8, 4, 64, 128, 64, **half),
        "gpt-6.7b": gpt_6_7b,
        "gpt-6.7b-16-nodes": gpt_6_7b.change(dp=64),
        "gpt-neox-6.9b": Run(gpt_neox.make_config("6.9b"), 8, 16, 1, 2048, 16, **half, **whole),
        "gpt-neox-20b": Run(
            gpt_neox.make_config("full"), 32, 4, 1, 2048, 64, **sharded, checkpointing="full"
        ),
        "llama2-7b": Run(
            llama2.make_config("full"), 8, 16, 1, 4096, 64, **sharded,
            checkpointing="selective+mlp", float32_gradients=True,
        ),
    }  # fmt: skip


TUTORIALS = _tutorials()  # as they were published
# Sequences a second on trn1.32xlarge, by the tutorial on GPT: on 1 and on 16 of them.
PUBLISHED_THROUGHPUT = {"gpt-6.7b": 7.3, "gpt-6.7b-16-nodes": 98.0}
