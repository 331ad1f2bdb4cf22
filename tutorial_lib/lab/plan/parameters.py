"""The parameters of one rank, in closed form and in the order of the model's modules."""

from collections.abc import Iterator
from dataclasses import dataclass

from tutorial_lib.lab.plan.runs import Run
from tutorial_lib.models import llama2
from tutorial_lib.models.gpt_config import padded_vocabulary


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


def parameters(run: Run) -> list[Parameter]:
    """In the order in which the optimizer has them: those that it decays first.

    Raises:
        ValueError: a BERT with a head of its own, which has a bias without a gradient.
    """
    found = list(_FAMILIES[run.family](run))
    return [p for p in found if p.decayed] + [p for p in found if not p.decayed]


def _linear(
    inside: int, outside: int, bias: bool = True, share: bool = False
) -> Iterator[Parameter]:
    """A layer of this rank's sizes; `share`: it ends in a reduce-scatter, and its bias comes after."""
    yield Parameter((outside, inside), True)
    if bias:
        yield Parameter((outside,), False, share)


def _norm(hidden: int, run: Run, bias: bool = True) -> Iterator[Parameter]:
    for _ in range(2 if bias else 1):
        yield Parameter((hidden,), False, run.sequence_parallel)


def vocabulary(run: Run) -> int:
    """Rows of the vocabulary on a rank, padding included."""
    if run.family == "gpt2":
        return padded_vocabulary(run.config.vocab_size, run.tp) // run.tp
    whole = run.family == "bert" and not run.options.get("shard_vocabulary")
    return run.config.vocab_size if whole else -(-run.config.vocab_size // run.tp)


def qkv_features(run: Run) -> tuple[int, int]:
    """Features of the queries, and of the keys (and so the values), on a rank."""
    config, tp = run.config, run.tp
    if run.family != "llama":
        return config.hidden_size // tp, config.hidden_size // tp
    head, copies = config.head_dim, llama2.kv_multiplier(config, tp)
    return config.num_attention_heads // tp * head, config.num_key_value_heads * copies // tp * head


def _attention(run: Run, bias: bool = True) -> Iterator[Parameter]:
    """Query, key and value in one, and the projection behind them."""
    hidden = run.config.hidden_size
    yield from _linear(hidden, 3 * hidden // run.tp, bias)
    yield from _linear(hidden // run.tp, hidden, bias, run.sequence_parallel)


def _feed_forward(run: Run) -> Iterator[Parameter]:
    hidden, features = run.config.hidden_size, run.features // run.tp
    yield from _linear(hidden, features)
    yield from _linear(features, hidden, share=run.sequence_parallel)


def _gpt(run: Run) -> Iterator[Parameter]:
    config, hidden = run.config, run.config.hidden_size
    table = Parameter((vocabulary(run), hidden), True)
    yield table
    yield Parameter((config.max_position_embeddings, hidden), True, run.sequence_parallel)
    for _ in range(config.num_hidden_layers):
        yield from _norm(hidden, run)
        yield from _attention(run)
        yield from _norm(hidden, run)
        yield from _feed_forward(run)
    yield from _norm(hidden, run)
    if not config.tie_word_embeddings:
        yield table


def _gpt_neox(run: Run) -> Iterator[Parameter]:
    config, hidden = run.config, run.config.hidden_size
    table = Parameter((vocabulary(run), hidden), True)
    yield table
    for _ in range(config.num_hidden_layers):
        yield from _norm(hidden, run)
        yield from _norm(hidden, run)
        yield from _attention(run, config.attention_bias)
        yield from _feed_forward(run)
    yield from _norm(hidden, run)
    if not config.tie_word_embeddings:
        yield table


def _llama(run: Run) -> Iterator[Parameter]:
    config, share = run.config, run.sequence_parallel
    hidden, features = config.hidden_size, config.intermediate_size // run.tp
    queries, keys = qkv_features(run)
    table = Parameter((vocabulary(run), hidden), True)
    yield table
    for _ in range(config.num_hidden_layers):
        yield from _linear(hidden, queries + 2 * keys, config.attention_bias)
        yield from _linear(queries, hidden, config.attention_bias, share)
        yield from _linear(hidden, 2 * features, config.mlp_bias)
        yield from _linear(features, hidden, config.mlp_bias, share)
        yield from _norm(hidden, run, bias=False)
        yield from _norm(hidden, run, bias=False)
    yield from _norm(hidden, run, bias=False)
    if not config.tie_word_embeddings:
        yield table


def _bert(run: Run) -> Iterator[Parameter]:
    config, tp = run.config, run.tp
    if not config.tie_word_embeddings:
        raise ValueError("no closed form for tie_word_embeddings=False of bert")
    hidden, rows = config.hidden_size, vocabulary(run)
    features = config.intermediate_size // (tp if run.options.get("shard_mlp") else 1)
    for count in (rows, config.max_position_embeddings, config.type_vocab_size):
        yield Parameter((count, hidden), True)
    yield from _norm(hidden, run)
    for _ in range(config.num_hidden_layers):
        for _ in range(3):
            yield from _linear(hidden, hidden // tp)
        yield from _linear(hidden // tp, hidden)
        yield from _norm(hidden, run)
        yield from _linear(hidden, features)
        yield from _linear(features, hidden)
        yield from _norm(hidden, run)
    yield from _linear(hidden, hidden)  # pooler
    yield Parameter((rows,), False)  # bias of the head, whose weight is the word embeddings'
    yield from _linear(hidden, hidden)
    yield from _norm(hidden, run)
    yield from _linear(hidden, 2)


_FAMILIES = {"bert": _bert, "gpt2": _gpt, "gpt_neox": _gpt_neox, "llama": _llama}
