"""Sizes of GPT: presets, what can be cut over the ranks, parameters in closed form."""

from transformers import GPT2Config

from tutorial_lib.parallel_layers.utils import ensure_divisibility, padding_of

VOCABULARY_MULTIPLE = 128  # of the rows of the vocabulary on each rank, as in Megatron-LM
PRESETS = {
    "tiny": dict(n_embd=128, n_layer=2, n_head=4, vocab_size=8192, n_positions=256),
    "small": dict(n_embd=256, n_layer=4, n_head=8, vocab_size=8192, n_positions=512),
    # GPT-3 6.7B
    "full": dict(n_embd=4096, n_layer=32, n_head=32, vocab_size=50257, n_positions=2048),
}


def make_config(preset: str, tp_size: int = 1, **changes) -> GPT2Config:
    """The configuration of a preset, checked against the tensor-parallel size.

    Args:
        preset: a key of `PRESETS`. The feed-forward size is 4H.
        changes: fields of `GPT2Config` to set otherwise. By default a document ends with the last
            token, as GPT-2's do.

    Raises:
        ValueError: an unknown preset, or sizes as for `check_config`.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    sizes = PRESETS[preset] | changes
    last = sizes["vocab_size"] - 1  # GPT-2's end of a document
    config = GPT2Config(**({"bos_token_id": last, "eos_token_id": last} | sizes))
    check_config(config, tp_size)
    return config


def check_config(config: GPT2Config, tp_size: int) -> None:
    """Whether a configuration can be cut over the ranks.

    Raises:
        ValueError: heads or a feed-forward size that `tp_size` does not divide, or what the model
            has not.
    """
    ensure_divisibility(config.n_embd, config.n_head, "hidden size over attention heads")
    ensure_divisibility(config.n_head, tp_size, "attention heads over tensor-parallel ranks")
    ensure_divisibility(
        feed_forward_size(config), tp_size, "feed-forward size over tensor-parallel ranks"
    )
    for name in ("add_cross_attention", "reorder_and_upcast_attn"):
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)} is not supported")


def feed_forward_size(config: GPT2Config) -> int:
    return 4 * config.n_embd if config.n_inner is None else config.n_inner


def padded_vocabulary(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding over all ranks: the next multiple of 128 on each."""
    return vocab_size + padding_of(vocab_size, tp_size, VOCABULARY_MULTIPLE)


def parameter_count(config: GPT2Config, tp_size: int) -> int:
    """Parameters of one rank, padding included, in closed form."""
    hidden, features, tp = config.n_embd, feed_forward_size(config), tp_size
    attention = 3 * (hidden + 1) * hidden // tp + hidden * hidden // tp + hidden
    mlp = (hidden + 1) * features // tp + features * hidden // tp + hidden
    layer = attention + mlp + 2 * 2 * hidden  # and two norms
    tables = 1 if config.tie_word_embeddings else 2
    tables *= padded_vocabulary(config.vocab_size, tp) // tp
    return config.n_layer * layer + (tables + config.n_positions + 2) * hidden
