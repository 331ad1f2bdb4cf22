"""Configurations of Hugging Face: made from a preset, and checked for what the sharded models
do.
"""

from transformers import PretrainedConfig
from transformers.activations import ACT2CLS, ACT2FN

from tutorial_lib.parallel_layers.utils import ensure_divisibility

# What the small presets of all models have in common.
SIZES = {
    "tiny": dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=8192),
    "small": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192),
}
# Fields that ask for what no model here does.
UNSUPPORTED = (
    "add_cross_attention",
    "is_decoder",
    "output_attentions",
    "output_hidden_states",
    "reorder_and_upcast_attn",
)


def from_preset(
    config_class: type[PretrainedConfig],
    presets: dict[str, dict],
    preset: str,
    tp_size: int,
    shard_mlp: bool = True,
    **changes,
) -> PretrainedConfig:
    """The configuration of a preset, checked as by `check_config`.

    Args:
        presets: by the preset's name, fields beside those of `SIZES`.
        changes: fields to set otherwise.

    Raises:
        ValueError: an unknown preset, or what `check_config` refuses.
    """
    if preset not in presets:
        raise ValueError(f"preset {preset!r} is not one of {', '.join(presets)}")
    fields = SIZES.get(preset, {}) | presets[preset] | changes
    names = config_class.attribute_map  # GPT-2's hidden_size is n_embd
    config = config_class(**{names.get(name, name): value for name, value in fields.items()})
    check_config(config, tp_size, shard_mlp)
    return config


def check_config(config: PretrainedConfig, tp_size: int, shard_mlp: bool = True) -> None:
    """Checks that a configuration can be sharded over `tp_size` ranks.

    Raises:
        ValueError: heads or a feed-forward size that the ranks do not divide, an activation
            function with parameters, or a field that asks for what the models do not do; with its
            name.
    """
    heads = config.num_attention_heads
    ensure_divisibility(heads, tp_size, "attention heads over tensor-parallel ranks")
    if config.model_type == "llama":
        kv_multiplier(config, tp_size)
    else:
        ensure_divisibility(config.hidden_size, heads, "hidden size over attention heads")
    if shard_mlp:
        features = feed_forward_size(config)
        ensure_divisibility(features, tp_size, "feed-forward size over tensor-parallel ranks")
    for name in UNSUPPORTED:
        if value := getattr(config, name, False):
            raise ValueError(f"{name}={value} of a {config.model_type} is not supported")
    act = activation_name(config)
    if act not in ACT2CLS:
        raise ValueError(f"activation function {act!r} is not one of {', '.join(ACT2CLS)}")
    if any(True for _ in ACT2FN[act].parameters()):
        raise ValueError(
            f"activation function {act!r} has parameters of its own, which are not supported"
        )


def activation_name(config: PretrainedConfig) -> str:
    """The name of the feed-forward layers' activation function."""
    return config.activation_function if config.model_type == "gpt2" else config.hidden_act


def feed_forward_size(config: PretrainedConfig) -> int:
    """F of the whole model."""
    if config.model_type != "gpt2":
        return config.intermediate_size
    return 4 * config.n_embd if config.n_inner is None else config.n_inner


def kv_multiplier(config: PretrainedConfig, tp_size: int) -> int:
    """How many ranks hold each key and value head: 1 unless there are fewer of them than ranks.

    Raises:
        ValueError: neither the heads nor the ranks divide the other, or the query heads are not a
            multiple of the key and value heads.
    """
    heads = config.num_key_value_heads
    ensure_divisibility(config.num_attention_heads, heads, "attention heads over key/value heads")
    if heads >= tp_size:
        ensure_divisibility(heads, tp_size, "key/value heads over tensor-parallel ranks")
        return 1
    ensure_divisibility(tp_size, heads, "tensor-parallel ranks over key/value heads")
    return tp_size // heads
