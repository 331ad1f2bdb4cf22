"""BERT pretraining samples from tokenised documents: sentence pairs, then masks.

Source: Devlin et al. (2019), section 3.1 and appendix A.2. One rule differs from the code that was
published with it: a pair is only cut from two sentences or more, so that the coin alone decides
whether the second half is replaced, and half of the pairs are random, not more.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

Document = list[list[int]]  # sentences of token ids

SHORT_PAIR_PROBABILITY = 0.1  # pairs that aim at a random length, so that short input is seen too
MASKED_FRACTION = 0.15


@dataclass(frozen=True)
class Vocabulary:
    """The ids that samples are made of."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    special: frozenset[int]


def sentence_pairs(
    documents: list[Document], max_tokens: int, rng: random.Random
) -> Iterator[tuple[list[int], list[int], bool]]:
    """One pass over the documents as pairs (first, second, second is random).

    Args:
        documents: at least two, of at least two sentences each; a random second half comes from
            another document.
        max_tokens: most tokens of both halves together.
        rng: drawn from in a fixed order.
    """
    for index, document in enumerate(documents):
        start = 0
        while start + 2 <= len(document):
            target = max_tokens
            if rng.random() < SHORT_PAIR_PROBABILITY:
                target = rng.randint(2, max_tokens)
            end, length = start, 0
            while end < len(document) and (length < target or end < start + 2):
                length += len(document[end])
                end += 1
            cut = rng.randint(start + 1, end - 1)
            first = _concatenate(document[start:cut])
            is_random = rng.random() < 0.5
            if is_random:
                other = rng.randrange(len(documents) - 1)
                other_document = documents[other + (other >= index)]
                second = []
                for sentence in other_document[rng.randrange(len(other_document)) :]:
                    second += sentence
                    if len(first) + len(second) >= target:
                        break
                start = cut  # the sentences that were replaced begin the next pair
            else:
                second = _concatenate(document[cut:end])
                start = end
            _truncate(first, second, max_tokens, rng)
            yield first, second, is_random


def mask_tokens(
    input_ids: list[int], max_predictions: int, vocabulary: Vocabulary, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Mask 15 % of the tokens in place: 80 % of them become [MASK], 10 % random, 10 % stay.

    Returns:
        Positions in ascending order, none of a special token, and the ids that were there.
    """
    candidates = [p for p, token in enumerate(input_ids) if token not in vocabulary.special]
    count = min(max_predictions, max(1, round(MASKED_FRACTION * len(input_ids))), len(candidates))
    positions = sorted(rng.sample(candidates, count))
    labels = [input_ids[position] for position in positions]
    for position in positions:
        draw = rng.random()
        if draw < 0.8:
            input_ids[position] = vocabulary.mask
        elif draw < 0.9:
            token = rng.randrange(vocabulary.size)
            while token in vocabulary.special:
                token = rng.randrange(vocabulary.size)
            input_ids[position] = token
    return positions, labels


def _concatenate(sentences: list[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _truncate(first: list[int], second: list[int], max_tokens: int, rng: random.Random) -> None:
    """Drop tokens from the longer half, at either end by chance, until both fit."""
    while len(first) + len(second) > max_tokens:
        longer = first if len(first) > len(second) else second
        del longer[0 if rng.random() < 0.5 else -1]
