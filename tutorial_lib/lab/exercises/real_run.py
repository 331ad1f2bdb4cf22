"""Notebook 07: the weights of a rank, and the days of a training."""

from .judge import Exercise


def weights_of_rank(namespace) -> Exercise:
    """`weights_of_rank(H, F, L, V, T)`."""

    def count(H, F, L, V, T, matrices=3, attention=4, vocabularies=2, norms=1.0):
        layer = (attention * H * H + matrices * H * F) / T + 2 * H * norms
        return round(vocabularies * V * H / T + L * layer + H * norms)

    def variant(**switches):
        return lambda *sizes: count(*sizes, **switches)

    return Exercise(
        right=count,
        wrong={
            "norms are whole on every rank": lambda H, F, L, V, T: count(
                H, F, L, V, T, norms=1 / T
            ),
            "the norms have weights too: two in a layer and one behind the last": variant(norms=0),
            "the head is a matrix of its own, besides the embedding": variant(vocabularies=1),
            "the feed-forward part has three matrices: gate, up and down": variant(matrices=2),
            "attention has four matrices: query, key, value and output": variant(attention=3),
            "that is all ranks together": lambda H, F, L, V, T: count(H, F, L, V, 1),
            "embedding and head are sharded too": lambda H, F, L, V, T: round(
                count(H, F, L, 0, T) + 2 * V * H
            ),
        },
        inputs=[(4096, 11008, 32, 32000, 8), (128, 384, 2, 8192, 2), (64, 192, 1, 512, 1)],
    )


def training_days(namespace) -> Exercise:
    """`training_days(parameters, tokens, cores, peak, busy)`."""

    def days(parameters, tokens, cores, peak, busy, each=6, seconds=86400):
        return each * parameters * tokens / (cores * peak * busy) / seconds

    def variant(**switches):
        return lambda *numbers: days(*numbers, **switches)

    return Exercise(
        right=days,
        wrong={
            "2 is the forward pass; the backward pass takes 4 more": variant(each=2),
            "4 is the backward pass; the forward pass takes 2 more": variant(each=4),
            "those are seconds": variant(seconds=1),
            "those are hours": variant(seconds=3600),
            "the cores share the work": lambda parameters, tokens, cores, peak, busy: days(
                parameters, tokens, 1, peak, busy
            ),
            "a core that is busy for a share of the time takes longer": (
                lambda parameters, tokens, cores, peak, busy: days(
                    parameters, tokens, cores, peak, 1 / busy
                )
            ),
            "no core reaches its peak: only a share of it": (
                lambda parameters, tokens, cores, peak, busy: days(
                    parameters, tokens, cores, peak, 1
                )
            ),
        },
        inputs=[
            (6.7e9, 1.3e9, 32, 95e12, 0.2),
            (13e9, 2e12, 2048, 95e12, 0.4),
            (1e9, 2e10, 8, 4e14, 0.5),
        ],
    )
