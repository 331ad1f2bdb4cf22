"""What the sharded models change of Hugging Face's base class, so that what they inherit is right."""

from collections.abc import Callable

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.random import checkpoint

KERNELS = ("eager", "sdpa")  # the attention of Hugging Face that takes the masks made here


class ShardedModel:
    """To stand before the Hugging Face class among the bases of a model."""

    gives_cache = False  # whether forward keeps keys and values for generation

    def check_kernel(self) -> None:
        """Raises ValueError unless Hugging Face's attention takes the masks that are made here."""
        kernel = self.config._attn_implementation
        if kernel not in KERNELS:
            raise ValueError(f"attn_implementation {kernel!r} is not one of {', '.join(KERNELS)}")

    def check_outputs(self) -> None:
        """Raises ValueError for a configuration that asks for what forward does not give."""
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(self.config, name):
                raise ValueError(f"{name}=True is not supported: {type(self).__name__} gives logits")

    def generate(self, *args, **kwargs):
        """Hugging Face's, where a rank has the logits of the whole vocabulary and the model a cache.

        Raises:
            ValueError: elsewhere.
        """
        tp_size = parallel_state.get_tensor_model_parallel_size()
        if not self.gives_cache or tp_size > 1 or self.sequence_parallel_enabled:
            raise ValueError(
                f"{type(self).__name__} over {tp_size} ranks is for training: to generate, put its "
                "`full_tensors` into Hugging Face's model"
            )
        return super().generate(*args, **kwargs)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable | None = None, **kwargs
    ) -> None:
        """Hugging Face's switch, with the checkpointing that replays every random stream.

        torch's own, which is given here, would drop out other attention probabilities in backward.

        Raises:
            ValueError: options of torch's checkpointing that ours does not have.
        """
        asked = getattr(gradient_checkpointing_func, "keywords", {})
        if {**asked, "use_reentrant": asked.get("use_reentrant", False)} != {"use_reentrant": False}:
            raise ValueError(
                f"gradient checkpointing with {asked}: only use_reentrant=False is supported"
            )
        super()._set_gradient_checkpointing(enable, checkpoint, **kwargs)
