"""What a layer of `llama2` keeps for backward, in bytes: the table of Korthikanti et al. (2022,
section 4) for this layer.
"""

from torch import nn
from transformers import LlamaConfig

from tutorial_lib.utils.activation_checkpoint import apply_activation_checkpointing

from .attention import CoreAttention
from .llama2 import GatedActivation, ParallelDecoderLayer, kv_multiplier

# Which modules run their forward again in backward.
CHECKPOINTED: dict[str, tuple[type[nn.Module], ...]] = {
    "none": (),
    "selective": (CoreAttention,),
    "selective+mlp": (CoreAttention, GatedActivation),
    "full": (ParallelDecoderLayer,),
}


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """Applies one of the kinds of activation checkpointing to a Llama, in place.

    Raises:
        ValueError: `mode` is no key of `CHECKPOINTED`.
    """
    classes = _classes(mode)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))


def _classes(mode: str) -> tuple[type[nn.Module], ...]:
    if mode not in CHECKPOINTED:
        raise ValueError(
            f"activation checkpointing {mode!r} is not one of {', '.join(CHECKPOINTED)}"
        )
    return CHECKPOINTED[mode]


def saved_bytes(
    config: LlamaConfig,
    batch: int,
    length: int,
    tp_size: int,
    sequence_parallel: bool,
    mode: str,
    itemsize: int = 2,
) -> dict[str, int]:
    """Bytes that one rank keeps of one layer in training, without the fused attention kernel.

    Args:
        batch, length: B and S of a micro-batch.
        mode: a key of `CHECKPOINTED`.
        itemsize: bytes of an element of the activations.

    Returns:
        By what it is: every item is a tensor that the next operation's gradient needs. Rotary tables and the mask are
        the same for all layers and not in it.
    """
    classes = _classes(mode)
    tokens, chunks = batch * length, tp_size if sequence_parallel else 1
    stream = tokens * config.hidden_size * itemsize // chunks
    if ParallelDecoderLayer in classes:
        return {"input of the layer": stream}
    heads = config.num_attention_heads // tp_size
    kv_heads = config.num_key_value_heads * kv_multiplier(config, tp_size) // tp_size
    head, features = (
        tokens * config.head_dim * itemsize,
        tokens * config.intermediate_size // tp_size * itemsize,
    )
    matrix = heads * batch * length * length  # elements of the attention matrices
    found = {
        "inputs of the norms": 2 * stream,
        "their scales": 2 * tokens * max(4, itemsize) // chunks,
        "inputs of qkv and of gate, up": 2 * stream,
        "query, key, value": (heads + 2 * kv_heads) * head,
        "input of the output projection": heads * head,
        "gate and up": 2 * features,
        "input of down": features,
    }
    if GatedActivation not in classes:
        found["act(gate)"] = features
    if CoreAttention not in classes:
        found["attention probabilities"] = matrix * itemsize
        if config.attention_dropout:
            found["dropout's mask and result"] = matrix * (1 + itemsize)
    return found
