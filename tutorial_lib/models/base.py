"""What the sharded models change of Hugging Face's base class, so that what they inherit is
right.
"""

import inspect
from collections.abc import Callable
from typing import ClassVar

from torch import nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.recompute import checkpoint

from .configs import check_config
from .initialize import initialize_sharded


def _refused(what: str) -> Callable:
    """A method that raises ValueError: a rank has a shard of the weights and logits, and no
    cache.
    """

    def method(self, *args, **kwargs):
        raise ValueError(
            f"{type(self).__name__} is for training: {what}, load its `full_tensors` into Hugging "
            "Face's model, or merge a checkpoint"
        )

    return method


class ShardedModel:
    """Stands before the Hugging Face class among the bases of a model."""

    # The part of a name for fused matrices, and Hugging Face's parts for each, in their order.
    fused: ClassVar[dict[str, tuple[str, ...]]] = {}
    # By suffix of a module's name: the configuration's fields for the number of attention heads in
    # each of its matrices. No head is divided.
    heads: ClassVar[dict[str, tuple[str, ...]]] = {}
    kernels = ("eager", "sdpa")  # Hugging Face's attention kinds whose results are matched
    vocabulary_multiple = 1  # of the rows of the vocabulary on each rank

    def __init__(self, config: PretrainedConfig, shard_mlp: bool = True):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_fallback_parallel_state()
        check_config(config, parallel_state.get_tensor_model_parallel_size(), shard_mlp)
        super().__init__(config)
        if (kernel := config._attn_implementation) not in self.kernels:
            raise ValueError(
                f"attn_implementation {kernel!r} of a {config.model_type} is not one of "
                f"{', '.join(self.kernels)}"
            )

    @classmethod
    def hugging_face_names(cls, name: str) -> tuple[str, ...]:
        """Hugging Face's names of the tensor or tensors that are `name` here."""
        parts = name.split(".")
        theirs = next((cls.fused[part] for part in parts if part in cls.fused), None)
        if theirs is None:
            return (name,)
        *before, _, last = parts
        return tuple(".".join([*before, part, last.removesuffix("_qkv")]) for part in theirs)

    @classmethod
    def published_names(cls, name: str) -> tuple[str, ...]:
        """The same in the files that Hugging Face writes."""
        rules = get_checkpoint_conversion_mapping(cls.__name__) or []
        names = cls.hugging_face_names(name)
        for rule in reversed([rule for rule in rules if isinstance(rule, WeightRenaming)]):
            names = tuple(rule.reverse_transform().rename_source_key(each)[0] for each in names)
        return names

    @classmethod
    def heads_of(cls, name: str, config: dict) -> tuple[int, ...]:
        """The number of attention heads in each matrix of a tensor; empty if it has none."""
        module = name.rpartition(".")[0]
        fields = next((f for end, f in cls.heads.items() if module.endswith(end)), ())
        return tuple(config.get(field) or config["num_attention_heads"] for field in fields)

    @classmethod
    def options(cls) -> list[str]:
        """What the constructor takes beside the configuration."""
        return list(inspect.signature(cls).parameters)[1:]

    def _init_weights(self, module: nn.Module) -> None:
        if not initialize_sharded(module, self.config.initializer_range):
            super()._init_weights(module)

    generate = _refused("to generate")
    save_pretrained = _refused("to save it")

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Raises ValueError: Hugging Face's would lose fused weights, and the marks of shards."""
        raise ValueError(
            f"{cls.__name__} is built from a configuration and takes the weights of Hugging Face's "
            "model by `load_full_tensors`, or from a checkpoint that was split"
        )

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable | None = None, **kwargs
    ) -> None:
        """Hugging Face's switch, with the checkpointing that replays every random stream.

        torch's own, which is given here, would drop other attention probabilities in backward.

        Raises:
            ValueError: options of torch's checkpointing that ours does not have.
        """
        asked = getattr(gradient_checkpointing_func, "keywords", {})
        if {"use_reentrant": False} | asked != {"use_reentrant": False}:
            raise ValueError(
                f"gradient checkpointing with {asked}: only use_reentrant=False is supported"
            )
        super()._set_gradient_checkpointing(enable, checkpoint, **kwargs)
