"""Notebook 05: samples of a row of documents, and the order in which replicas read them."""

from .judge import Exercise


def make_samples(namespace) -> Exercise:
    """`make_samples(documents, order, S)`."""

    def samples(row, S, length=None, stride=None, last=False):
        length, end = length or S + 1, len(row) if last else len(row) - S
        return [row[start : start + length] for start in range(0, end, stride or S)]

    def row_of(documents, order):
        return [token for number in order for token in documents[number]]

    documents = [[1, 2, 3, 0], [4, 5, 0], [6, 7, 8, 9, 10, 11, 0], [12, 0]]
    return Exercise(
        right=lambda documents, order, S: samples(row_of(documents, order), S),
        wrong={
            "the last token of a sample begins the next one too": lambda documents, order, S: [
                sample
                for sample in samples(row_of(documents, order), S, stride=S + 1)
                if len(sample) == S + 1
            ],
            "a sample has S + 1 tokens: S to see, and the last one to predict": (
                lambda documents, order, S: samples(row_of(documents, order), S, length=S)
            ),
            "samples run on over the ends of documents": lambda documents, order, S: [
                sample for number in order for sample in samples(documents[number], S)
            ],
            "the last sample is incomplete": (
                lambda documents, order, S: samples(row_of(documents, order), S, last=True)
            ),
            "the documents come in the given order": (
                lambda documents, order, S: samples(row_of(documents, sorted(order)), S)
            ),
            "a document counts again in another epoch": (
                lambda documents, order, S: samples(row_of(documents, dict.fromkeys(order)), S)
            ),
        },
        inputs=[
            (documents, [2, 0, 3, 1], 3),
            (documents, [1, 3, 0, 2, 3, 2, 1, 0], 4),
            (documents[:2], [1, 0, 1], 2),
        ],
    )


def next_micro_batches(namespace) -> Exercise:
    """`next_micro_batches(consumed, micro_batch, replica, replicas, count)`."""

    def lists(start_of, step=1):
        def answer(consumed, micro_batch, d, D, count):
            starts = [start_of(consumed, micro_batch, d, D, count, i) for i in range(count)]
            stride = D if step is None else step
            return [list(range(s, s + micro_batch * stride, stride)) for s in starts]

        return answer

    def right(consumed, micro_batch, d, D, count, i):
        return consumed + (i * D + d) * micro_batch

    return Exercise(
        right=lists(right),
        wrong={
            "the samples of a micro-batch are consecutive": lists(
                lambda consumed, micro, d, D, count, i: consumed + i * D * micro + d, step=None
            ),
            "after its first micro-batch a replica goes on after those of all replicas": lists(
                lambda consumed, micro, d, D, count, i: consumed + (d * count + i) * micro
            ),
            "the run has consumed samples already": lists(
                lambda consumed, *others: right(0, *others)
            ),
            "every replica reads the same samples": lists(
                lambda consumed, micro, d, D, count, i: consumed + i * micro
            ),
            "consumed counts the samples of all replicas together": lists(
                lambda consumed, micro, d, D, *others: right(consumed * D, micro, d, D, *others)
            ),
        },
        inputs=[(0, 2, 0, 2, 2), (12, 2, 1, 3, 2), (7, 4, 1, 2, 3), (64, 1, 3, 4, 4)],
    )
