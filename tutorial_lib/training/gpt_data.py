"""What a GPT run reads: vocabulary, data sets, micro-batches on the model's device; and the loss of
the validation data.
"""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from tutorial_lib.backends import mark_step
from tutorial_lib.data.gpt_dataset import GPTDataset, build_gpt_datasets, split_weights
from tutorial_lib.data.sampler import ResumableBatchSampler, data_loader
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.ranks import together
from tutorial_lib.storage import read_json
from tutorial_lib.xla_model import xla_device

from .gpt_arguments import GPTArguments

END_OF_DOCUMENT = "<|endoftext|>"


def read_vocabulary(vocab_file: str) -> tuple[int, int]:
    """The size of a tokenizer's vocabulary, and the id that ends a document.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a JSON object of ids from 0 to its size - 1 with `<|endoftext|>`.
    """
    try:
        vocabulary = read_json(vocab_file)
        if sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise ValueError(f"its ids are not 0 to {len(vocabulary) - 1}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{vocab_file} is not a vocabulary in JSON: {error}") from error
    if END_OF_DOCUMENT not in vocabulary:
        raise ValueError(f"{vocab_file} has no {END_OF_DOCUMENT} among {len(vocabulary)} tokens")
    return len(vocabulary), vocabulary[END_OF_DOCUMENT]


def gpt_datasets(
    arguments: GPTArguments, batch: int, vocab_size: int
) -> tuple[GPTDataset, GPTDataset | None]:
    validated = arguments.eval_iters if split_weights(arguments.split)["valid"] else 0
    if validated < arguments.eval_iters and dist.get_rank() == 0:
        print(f" no validation: --split {arguments.split} gives it no document", flush=True)
    training, validation, _ = build_gpt_datasets(
        arguments.data_path,
        arguments.split,
        (arguments.train_iters * batch, validated * batch, 0),
        arguments.seq_length,
        arguments.seed,
        vocab_size=vocab_size,
        cache_dir=arguments.data_cache_path,
    )
    if validation is not None:  # refuses too few samples before anything is trained
        ResumableBatchSampler(validation, arguments.micro_batch_size)
    return training, validation


def gpt_batches(
    sampler: ResumableBatchSampler, num_workers: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """An endless stream of `{"input_ids", "targets"}` on the device, each int64 `[B, S]`, from the
    sampler's position on.

    Each rank of a tensor-parallel group reads the same samples, which costs no communication.

    Args:
        sampler: of a `GPTDataset`.
        num_workers: processes that read ahead, for each rank.

    Raises:
        Exception: what a rank met while reading, on every rank.
    """
    stream = iter(data_loader(sampler.dataset, sampler, num_workers=num_workers))
    while True:
        text = together(next, stream)["text"].to(xla_device())
        yield {"input_ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


@torch.no_grad()
def evaluate(arguments: GPTArguments, model: torch.nn.Module, dataset: GPTDataset) -> float:
    """The mean loss of a token over the first `eval_iters` global batches, without dropout.

    Always the same samples, so that one validation can be compared with the next. (Megatron-LM
    takes others each time.)
    """
    sampler = ResumableBatchSampler(dataset, arguments.micro_batch_size, shuffle=False)
    accumulation = arguments.accumulation(parallel_state.get_data_parallel_size())
    dp_group, one = parallel_state.get_data_parallel_group(), torch.ones((), device=xla_device())
    loss = count = torch.zeros_like(one)
    model.eval()
    for micro_batch in islice(gpt_batches(sampler), arguments.eval_iters * accumulation):
        loss = loss + model(**micro_batch, num_items_in_batch=one).loss.float()
        count = count + model.count_targets(micro_batch)
        mark_step()
    loss, count = (comm.all_reduce("sum", value, dp_group) for value in (loss, count))
    mark_step()
    model.train()
    return float(loss) / float(count)
