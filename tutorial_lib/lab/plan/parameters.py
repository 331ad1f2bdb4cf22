"""The parameters of one rank, in closed form and in the order of the model's modules."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from tutorial_lib.models.configs import kv_multiplier
from tutorial_lib.parallel_layers.utils import padding_of

from .runs import MODELS, Run


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank holds it."""

    shape: tuple[int, ...]
    decayed: bool  # by the optimizer: neither a bias nor of a norm
    is_share: bool = False  # its gradient is summed over tensor parallelism after backward

    @property
    def numel(self) -> int:
        rows, columns = (*self.shape, 1)[:2]
        return rows * columns


def parameter_count(config: PretrainedConfig, tp: int = 1, **options: bool) -> int:
    """Parameters of one rank, padding included.

    Args:
        options: further keywords of the model, such as BERT's `shard_mlp`.

    Raises:
        ValueError: sizes that `tp` does not divide.
    """
    return sum(p.numel for p in parameters(Run(config, tp, sequence=tp, options=options)))


def parameters(run: Run) -> list[Parameter]:
    """In the order in which the optimizer has them: those that it decays first."""
    found = list(_bert(run) if run.family == "bert" else _causal(run))
    return [p for p in found if p.decayed] + [p for p in found if not p.decayed]


def vocabulary(run: Run) -> int:
    """Rows of the vocabulary on a rank, padding included."""
    if run.family == "bert" and not run.options.get("shard_vocabulary"):
        return run.config.vocab_size
    whole, multiple = run.config.vocab_size, MODELS[run.family].vocabulary_multiple
    return (whole + padding_of(whole, run.tp, multiple)) // run.tp


def qkv_features(run: Run) -> tuple[int, int]:
    """Features of the queries, and of the keys (and so the values), on a rank."""
    config, tp = run.config, run.tp
    if run.family != "llama":
        return config.hidden_size // tp, config.hidden_size // tp
    head, copies = config.head_dim, kv_multiplier(config, tp)
    return config.num_attention_heads // tp * head, config.num_key_value_heads * copies // tp * head


def _linear(inputs: int, outputs: int, bias: bool = True, share: bool = False) -> list[Parameter]:
    """A layer of this rank's sizes; `share`: it ends in a reduce-scatter, and its bias comes
    after.
    """
    weight = Parameter((outputs, inputs), True)
    return [weight, Parameter((outputs,), False, share)] if bias else [weight]


def _causal(run: Run) -> Iterator[Parameter]:
    config, share, hidden = run.config, run.sequence_parallel, run.config.hidden_size
    llama, (queries, keys) = run.family == "llama", qkv_features(run)
    features = run.features // run.tp
    table = Parameter((vocabulary(run), hidden), True)
    norm = [Parameter((hidden,), False, share)] * (1 if llama else 2)
    bias = getattr(config, "attention_bias", True)
    attention = _linear(hidden, queries + 2 * keys, bias)
    attention += _linear(queries, hidden, bias, share)
    bias = getattr(config, "mlp_bias", True)
    mlp = _linear(hidden, 2 * features if llama else features, bias)
    mlp += _linear(features, hidden, bias, share)
    layer = {
        "gpt2": norm + attention + norm + mlp,
        "gpt_neox": norm + norm + attention + mlp,
        "llama": attention + mlp + norm + norm,
    }
    yield table
    if run.family == "gpt2":
        yield Parameter((config.max_position_embeddings, hidden), True, share)
    yield from layer[run.family] * config.num_hidden_layers
    yield from norm
    if not config.tie_word_embeddings:
        yield table


def _bert(run: Run) -> Iterator[Parameter]:
    config, hidden, rows = run.config, run.config.hidden_size, vocabulary(run)
    heads = hidden // run.tp
    features = run.features // (run.tp if run.options.get("shard_mlp") else 1)
    norm = [Parameter((hidden,), False)] * 2
    for count in (rows, config.max_position_embeddings, config.type_vocab_size):
        yield Parameter((count, hidden), True)
    yield from norm
    layer = _linear(hidden, heads) * 3 + _linear(heads, hidden) + norm
    layer += _linear(hidden, features) + _linear(features, hidden) + norm
    yield from layer * config.num_hidden_layers
    yield from _linear(hidden, hidden)  # pooler
    if config.tie_word_embeddings:  # the head's weight is the word embeddings'
        yield Parameter((rows,), False)
    else:  # Hugging Face's head then has two biases, and uses one
        yield Parameter((config.vocab_size,), False)
        yield from _linear(hidden, rows)
    yield from _linear(hidden, hidden) + norm  # transform
    yield from _linear(hidden, 2)  # next sentence
