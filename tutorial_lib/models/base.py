"""What the sharded models change of Hugging Face's base class, so that what they inherit is right."""

import inspect
from collections.abc import Callable
from typing import ClassVar

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.recompute import checkpoint

KERNELS = ("eager", "sdpa")  # the attention of Hugging Face that takes the masks made here


class ShardedModel:
    """To stand before the Hugging Face class among the bases of a model."""

    # The part of a name for fused matrices, and Hugging Face's parts for each, in their order.
    fused: ClassVar[dict[str, tuple[str, ...]]] = {}
    # By the end of a module's name: the configuration's fields for the number of attention heads in
    # each of its matrices, of which none is divided.
    heads: ClassVar[dict[str, tuple[str, ...]]] = {}
    whole_at_size_1 = False  # whether it then is Hugging Face's model: a cache, and the same names

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

    def check_kernel(self) -> None:
        """Raises ValueError unless Hugging Face's attention takes the masks that are made here."""
        kernel = self.config._attn_implementation
        if kernel not in KERNELS:
            raise ValueError(f"attn_implementation {kernel!r} is not one of {', '.join(KERNELS)}")

    def check_outputs(self) -> None:
        """Raises ValueError for a configuration that asks for what forward does not give."""
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(self.config, name):
                raise ValueError(
                    f"{name}=True is not supported: {type(self).__name__} gives logits"
                )

    def _check_whole(self, what: str) -> None:
        tp_size = parallel_state.get_tensor_model_parallel_size()
        if tp_size > 1 or not self.whole_at_size_1:
            raise ValueError(
                f"{type(self).__name__} over {tp_size} ranks is for training: to {what}, put its "
                "`full_tensors` into Hugging Face's model"
            )

    def generate(self, *args, **kwargs):
        """Hugging Face's, where a rank has the logits of the whole vocabulary and the model a cache.

        Raises:
            ValueError: elsewhere.
        """
        self._check_whole("generate")
        return super().generate(*args, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        """Hugging Face's, where a rank has the whole model under Hugging Face's names.

        Raises:
            ValueError: elsewhere.
        """
        self._check_whole("save it")
        return super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Raises ValueError: Hugging Face's leaves out fused weights, and marks of sharded ones."""
        raise ValueError(
            f"{cls.__name__} is built from a configuration and takes the weights of Hugging Face's "
            "model by `load_full_tensors`, or from a checkpoint that was split"
        )

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable | None = None, **kwargs
    ) -> None:
        """Hugging Face's switch, with the checkpointing that replays every random stream.

        torch's own, which is given here, would drop out other attention probabilities in backward.

        Raises:
            ValueError: options of torch's checkpointing that ours does not have.
        """
        asked = getattr(gradient_checkpointing_func, "keywords", {})
        if {**asked, "use_reentrant": asked.get("use_reentrant", False)} != {
            "use_reentrant": False
        }:
            raise ValueError(
                f"gradient checkpointing with {asked}: only use_reentrant=False is supported"
            )
        super()._set_gradient_checkpointing(enable, checkpoint, **kwargs)
