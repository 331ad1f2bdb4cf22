"""Bytes that one rank keeps of a micro-batch for its backward pass, in closed form.

A layer is counted as by Korthikanti et al. (2022, section 4), and so is what lies around the
layers. For activation functions, Hugging Face's own code is run and counted.
"""

from functools import lru_cache

import torch
from torch import nn
from transformers.activations import ACT2FN

from tutorial_lib.models.configs import activation_name
from tutorial_lib.models.llama2 import GatedActivation
from tutorial_lib.training.memory import SavedActivations

from .parameters import qkv_features, vocabulary
from .runs import Run

ID = 8  # bytes of a token's number


def saved_bytes(run: Run, backend: str = "xla") -> float:
    """Of all layers and of what surrounds them: embedding, last norm, head and loss.

    Args:
        backend: `cpu` and `cuda` have a fused attention kernel; and on the host ids are checked at
            once, where a device keeps masks.

    Raises:
        ValueError: a configuration without a closed form, with its name.
    """
    layers = run.config.num_hidden_layers * sum(layer_bytes(run, backend).values())
    ends = _bert_ends(run, backend) if run.family == "bert" else _causal_ends(run, backend)
    return layers + ends


def layer_bytes(run: Run, backend: str = "xla") -> dict[str, float]:
    """What one layer keeps, by what it is: each item is needed by the next operation's gradient.

    Angles of rotary embeddings and the mask are the same for all layers and not among them.

    Raises:
        ValueError: a configuration without a closed form, with its name.
    """
    _check(run)
    stream = _stream(run)
    if run.checkpointing == "full":
        return {"input of the layer": stream}
    norms = 1 if getattr(run.config, "use_parallel_residual", False) else 2
    kept = {
        "inputs of the norms": norms * stream,
        "their statistics": 2 * _statistics(run, backend),
        "inputs of query, key, value and of the feed-forward layer": 2 * stream,
    }
    if rate(run, "resid_pdrop", "hidden_dropout", "hidden_dropout_prob"):
        kept["masks of dropout"] = 2 * stream
    return kept | _attention(run, backend) | _feed_forward(run)


def _check(run: Run) -> None:
    config = run.config
    if config._attn_implementation == "eager" and run.family == "bert":
        raise ValueError("no closed form for attn_implementation 'eager' of bert, only for 'sdpa'")
    if config.chunk_size_feed_forward and run.family == "bert":
        raise ValueError(
            f"no closed form for chunk_size_feed_forward {config.chunk_size_feed_forward}"
        )
    grouped = run.family == "llama" and config.num_key_value_heads != config.num_attention_heads
    if grouped and run.options.get("use_flash_attention") and run.checkpointing != "full":
        raise ValueError(
            f"no closed form for use_flash_attention with {config.num_key_value_heads} key and "
            f"value heads, only with {config.num_attention_heads}"
        )


def rate(run: Run, *names: str) -> float:
    """A rate of dropout, by its name in any family."""
    return next((getattr(run.config, name) for name in names if hasattr(run.config, name)), 0.0)


def _chunk(run: Run) -> float:
    """The tokens between the tensor-parallel layers on a rank."""
    return run.tokens / (run.tp if run.sequence_parallel else 1)


def _stream(run: Run) -> float:
    return _chunk(run) * run.config.hidden_size * run.dtype.itemsize


def _statistics(run: Run, backend: str) -> float:
    """A norm's numbers for each token: Llama's scale; else mean and deviation, as the kernel has
    them.
    """
    wide = run.wide.itemsize
    if run.family == "llama":
        return _chunk(run) * wide
    return _chunk(run) * 2 * (run.dtype.itemsize if backend == "cpu" else wide)


def _attention(run: Run, backend: str) -> dict[str, float]:
    """From query, key and value to the input of the output projection, on a rank."""
    tokens, element = run.tokens, run.dtype.itemsize
    heads, (queries, keys) = run.config.num_attention_heads // run.tp, qkv_features(run)
    dropout = rate(run, "attn_pdrop", "attention_dropout", "attention_probs_dropout_prob") > 0
    matrix = heads * tokens * run.sequence  # elements of the attention matrices
    around = {
        "query, key, value": tokens * (queries + 2 * keys) * element,
        "input of the output projection": tokens * queries * element,
    }
    if run.checkpointing in ("selective", "selective+mlp"):
        return around
    if run.uses_sdpa and backend != "xla" and not dropout:
        wide = run.wide.itemsize if backend == "cpu" else 4
        numbers = wide * heads * tokens  # one of each row of the attention matrix
        if run.family == "bert":
            numbers += run.micro_batch * run.sequence**2 * element  # its mask
        return around | {"numbers of the fused kernel": numbers}
    if not run.uses_sdpa:
        around["attention probabilities"] = matrix * element
        if dropout:
            around["dropout's mask and result"] = matrix * (1 + element)
        return around
    wide = run.wide.itemsize  # written out, the fused kernel computes in float32
    if run.family == "gpt2" and wide == element and 1 in (heads, run.micro_batch):
        # It copies query and key; the values remain a view of all three.
        around["query, key, value"] += 2 * tokens * queries * element
    around["query, key, value"] *= wide / element
    around["attention probabilities"] = matrix * wide
    if dropout:
        around["dropout's mask and result"] = 2 * matrix * wide
    return around


def _feed_forward(run: Run) -> dict[str, float]:
    """Between the first and the second multiplication."""
    features, element = run.tokens * run.features, run.dtype.itemsize
    gated = run.family == "llama"
    each = activation_bytes(activation_name(run.config), run.dtype, gated)
    kept = {"input of the last multiplication": features * element}
    if gated:
        kept["gate and up"] = 2 * features * element
    if run.checkpointing != "selective+mlp":
        kept["activation function"] = features * each - sum(kept.values())
    return kept


@lru_cache
def activation_bytes(name: str, dtype: torch.dtype, gated: bool = False) -> float:
    """What backward needs of one feature of `down(act(x))`, or of `down(act(gate) · up)`.

    Args:
        name: of an activation function of Hugging Face.
    """
    count, act = 64, ACT2FN[name]
    down = torch.empty(count, count, dtype=dtype, device="meta", requires_grad=True)
    x = torch.empty(1, (1 + gated) * count, dtype=dtype, device="meta", requires_grad=True)
    with SavedActivations(nn.Module(), [down]) as saved:
        x = x * 1  # as the multiplication in front of it, it needs nothing of its own result
        _ = (GatedActivation(act) if gated else act)(x) @ down
    return saved.nbytes / count


def _ids(run: Run, backend: str) -> float:
    """What a sharded vocabulary keeps.

    They are the numbers of the tokens and targets in its shard, masks, and each token's sum.
    """
    on_device = backend != "cpu"
    masks = 2 + on_device  # whose target is here, which count, which are outside
    embedding = ID + 1 + on_device if run.tp > 1 or on_device else 0
    return run.tokens * (embedding + ID + masks + run.wide.itemsize)


def _causal_ends(run: Run, backend: str) -> float:
    """Embedding, positions, last norm, head and cross entropy."""
    config, element = run.config, run.dtype.itemsize
    ends = 2 * _stream(run) + _statistics(run, backend)  # the norm's input and output
    ends += run.tokens * vocabulary(run) * element + _ids(run, backend) + ID
    if rate(run, "embd_pdrop", "hidden_dropout"):
        ends += _stream(run)  # its mask
    if run.family == "gpt2":
        ends += ID * run.sequence  # positions
    if run.checkpointing == "full":
        return ends
    if run.family != "gpt2":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * config.rope_parameters.get("partial_rotary_factor", 1))
        ends += 2 * run.sequence * size * element  # cosines and sines
    return ends + (0 if run.uses_sdpa else run.sequence**2)  # the mask


def _bert_ends(run: Run, backend: str) -> float:
    """Embeddings, pooler, transform, head and both losses."""
    config, element, batch = run.config, run.dtype.itemsize, run.micro_batch
    wide, hidden = run.wide.itemsize, config.hidden_size
    dropout = config.hidden_dropout_prob > 0
    ends = (3 + dropout) * _stream(run) + 2 * _statistics(run, backend)
    ends += run.tokens * hidden * activation_bytes(config.hidden_act, run.dtype)
    ends += batch * hidden * element + batch * 2 * element  # pooled, next sentence
    ends += run.tokens * vocabulary(run) * element + 2 * wide + element
    ends += _ids(run, backend) if run.shards("vocabulary") else element
    return ends + (run.tokens if run.checkpointing == "full" else 0)  # the mask, as bytes
