"""Bytes that one rank keeps of a micro-batch for its backward pass, in closed form.

Of a layer as Korthikanti et al. (2022, section 4) count them; of what lies around the layers
likewise.
"""

from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.models import llama2_activations
from tutorial_lib.models.gpt_neox import layer_activation_bytes

from .parameters import qkv_features, vocabulary

ID = 8  # bytes of a token's number


def saved_bytes(run: Run, backend: str = "xla") -> dict[str, float]:
    """By where: `layers`, and `ends` (embedding, last norm, head and loss).

    Args:
        backend: `cpu` and `cuda` have a fused attention kernel; and on the host ids are checked at
            once, where a device keeps masks.

    Raises:
        ValueError: a model whose closed form is not here: another activation function than its
            family's own, or dropout in a causal model.
    """
    family = {"bert": _bert, "gpt2": _gpt, "gpt_neox": _gpt_neox, "llama": _llama}[run.family]
    layer, ends = family(run, backend)
    return {"layers": run.config.num_hidden_layers * layer, "ends": ends}


def _sdpa(run: Run, backend: str, masked: bool = False, dropout: bool = False) -> float:
    """Of PyTorch's attention between query, key, value and the output, on a rank."""
    tokens, length, element = run.micro_batch * run.sequence, run.sequence, run.dtype.itemsize
    heads = run.config.num_attention_heads // run.tp
    queries, keys = qkv_features(run)
    if backend != "xla" and not dropout:
        mask = run.micro_batch * length**2 * element if masked else 0
        return tokens * ((2 * queries + 2 * keys) * element + 4 * heads) + mask
    wide = max(4, element)  # written out, it computes in float32
    matrices = heads * tokens * length * wide * (3 if dropout else 1)
    return tokens * ((queries + 2 * keys) * wide + queries * element) + matrices


def _causal_ends(run: Run, backend: str, norm: int) -> float:
    """Embedding, last norm (`norm` bytes of statistics a token), head and cross entropy."""
    config, element, tokens = run.config, run.dtype.itemsize, run.micro_batch * run.sequence
    stream = (
        tokens
        * (2 * config.hidden_size * element + norm)
        / (run.tp if run.sequence_parallel else 1)
    )
    return stream + tokens * vocabulary(run) * element + _ids(run, backend) + ID


def _ids(run: Run, backend: str) -> float:
    """What a cut vocabulary keeps: numbers of the tokens and targets in its part, masks, and each
    token's sum.
    """
    on_device = backend != "cpu"
    masks = 2 + on_device  # whose target is here, which count, which are outside
    embedding = 0
    if run.tp > 1 or on_device:
        embedding = ID + (run.tp > 1) + on_device
    return run.micro_batch * run.sequence * (embedding + ID + masks + max(4, run.dtype.itemsize))


def _statistics(run: Run, backend: str) -> int:
    """Mean and deviation of a token in a LayerNorm: on a device in float32 at least."""
    return 2 * (run.dtype.itemsize if backend == "cpu" else max(4, run.dtype.itemsize))


def _gpt_neox(run: Run, backend: str) -> tuple[float, float]:
    config, element, tokens = run.config, run.dtype.itemsize, run.micro_batch * run.sequence
    cut = run.tp if run.sequence_parallel else 1
    statistics = _statistics(run, backend)
    ends = _causal_ends(run, backend, statistics)
    if run.checkpointing == "full":
        return tokens * config.hidden_size * element / cut, ends
    if config.hidden_act != "gelu" or config.hidden_dropout or config.attention_dropout:
        raise ValueError(
            f"no closed form for hidden_act {config.hidden_act!r}, dropout {config.hidden_dropout} "
            f"and {config.attention_dropout}: only for 'gelu' without dropout, or with "
            "checkpointing 'full'"
        )
    layer = layer_activation_bytes(
        config, run.micro_batch, run.sequence, run.tp, run.sequence_parallel, element
    )
    fused = tokens * (4 * config.hidden_size * element + 4 * config.num_attention_heads) / run.tp
    rotary = (
        2
        * run.sequence
        * int(config.rope_parameters["partial_rotary_factor"] * _head(config))
        * element
    )
    layer += tokens * 2 * (statistics - 8) / cut  # which it has in float32
    return layer - fused + _sdpa(run, backend), ends + rotary


def _gpt(run: Run, backend: str) -> tuple[float, float]:
    config, element, tokens = run.config, run.dtype.itemsize, run.micro_batch * run.sequence
    hidden, tp = config.hidden_size, run.tp
    cut = tp if run.sequence_parallel else 1
    statistics = _statistics(run, backend)
    ends = _causal_ends(run, backend, statistics) + ID * run.sequence  # and the positions
    if config.embd_pdrop:
        ends += tokens * hidden * element / cut  # its mask
    if run.checkpointing == "full":
        return tokens * hidden * element / cut, ends
    rates = config.attn_pdrop, config.resid_pdrop
    if config.activation_function != "gelu_new" or any(rates):
        raise ValueError(
            f"no closed form for activation_function {config.activation_function!r} and dropout "
            f"{rates}: only for "
            "'gelu_new' without dropout, or with checkpointing 'full'"
        )
    flash = run.options.get("use_flash_attention")
    around = tokens * 4 * hidden * element / tp  # query, key, value, output
    if run.checkpointing == "selective":
        attention = around
    elif flash:
        attention = _sdpa(run, backend)
    else:
        attention = around + config.num_attention_heads // tp * tokens * run.sequence * element
    # Each its input and output; mean and deviation.
    norms = tokens * (4 * hidden * element + 2 * statistics) / cut
    mlp = tokens * 5 * run.features * element / tp  # gelu_new is written out
    return norms + attention + mlp, ends + (0 if flash else run.sequence**2)


def _head(config) -> int:
    return config.hidden_size // config.num_attention_heads


def _llama(run: Run, backend: str) -> tuple[float, float]:
    config, element, length = run.config, run.dtype.itemsize, run.sequence
    ends = _causal_ends(run, backend, max(4, element))
    parts = llama2_activations.saved_bytes(
        config, run.micro_batch, length, run.tp, run.sequence_parallel, run.checkpointing, element
    )
    if run.checkpointing == "full":
        return sum(parts.values()), ends
    flash = run.options.get("use_flash_attention")
    ends += 2 * length * config.head_dim * element + (0 if flash else length**2)  # angles, mask
    if flash:
        if config.num_key_value_heads != config.num_attention_heads or config.attention_dropout:
            raise ValueError("no closed form for use_flash_attention with grouped heads or dropout")
        probabilities = parts.pop("attention probabilities", None)
        if probabilities is not None:
            del parts["query, key, value"], parts["input of the output projection"]
            parts["attention"] = _sdpa(run, backend)
    return sum(parts.values()), ends


def _bert(run: Run, backend: str) -> tuple[float, float]:
    config, element, batch = run.config, run.dtype.itemsize, run.micro_batch
    tokens, hidden = batch * run.sequence, config.hidden_size
    stream, statistics = tokens * hidden * element, tokens * _statistics(run, backend)
    dropout = config.hidden_dropout_prob > 0
    ends = (5 + dropout) * stream + 2 * statistics  # embeddings, pooler, transform
    ends += batch * hidden * element + batch * 2 * element  # pooled, next sentence
    rows = tokens * vocabulary(run) * element
    if run.options.get("shard_vocabulary"):
        ends += rows + _ids(run, backend) + 2 * max(4, element) + element
    else:
        ends += rows + 2 * element + 2 * max(4, element)
    if run.checkpointing == "full":
        return stream, ends + tokens
    features = tokens * run.features * element / (run.tp if run.options.get("shard_mlp") else 1)
    attention = _sdpa(run, backend, masked=True, dropout=config.attention_probs_dropout_prob > 0)
    return (4 + 2 * dropout) * stream + 2 * statistics + attention + 2 * features, ends
