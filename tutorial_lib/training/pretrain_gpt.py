"""Pretraining of GPT as Megatron-LM does it, from tokens to checkpoints.

    torchrun --nproc_per_node 4 -m tutorial_lib.training.pretrain_gpt --num-layers 2 …

`--help` lists the options, which are Megatron-LM's. A notebook calls `pretrain` on every rank with
the same `GPTArguments`. SIGTERM or Ctrl-C ends a run after the step under way, with a checkpoint,
and the same command with `--load` goes on as if nothing had happened, bit for bit.
"""

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tutorial_lib import backends
from tutorial_lib.data.gpt_batches import gpt_batches
from tutorial_lib.data.gpt_dataset import GPTDataset, build_gpt_datasets, split_weights
from tutorial_lib.data.sampler import ResumableBatchSampler
from tutorial_lib.models.attention import CoreAttention
from tutorial_lib.models.gpt import GPT2LMHeadModel
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams, get_param_groups_by_weight_decay
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed
from tutorial_lib.parallel_layers.ranks import together
from tutorial_lib.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)
from tutorial_lib.xla_model import xla_device

from . import gpt_checkpoint
from .gpt_arguments import GPTArguments, parse_arguments
from .interruption import Interruption, end_with_parent
from .logger import GPTLogger
from .loop import Step, train
from .memory import require_memory
from .schedules import SampleScheduler
from .sole_run import sole_run

END_OF_DOCUMENT = "<|endoftext|>"


@dataclass
class Run:
    """What `pretrain` did; equal on every rank but for the model.

    Attributes:
        steps: those of this run.
        validation: iteration → loss.
        stopped_by: the name of the signal that ended the run, or None.
        model: this rank's shards, trained.
    """

    steps: list[Step]
    validation: dict[int, float] = field(default_factory=dict)
    stopped_by: str | None = None
    model: torch.nn.Module | None = None


def pretrain(arguments: GPTArguments, on_step: Callable[[Step], None] | None = None) -> Run:
    """Trains up to step `train_iters`, from a checkpoint if there is one to load.

    Every rank of an initialised process group calls it with the same arguments.

    Args:
        arguments: see `GPTArguments`.
        on_step: called after each step, on every rank, before it is validated and saved.

    Raises:
        ValueError: arguments that do not fit together, the ranks, the data or the machine, or
            another run that saves into the same folder; on all.
    """
    arguments.check(dist.get_world_size())  # the same on every rank, and there is no mesh yet
    nxd_config = _nxd_config(arguments)  # and the mesh
    with sole_run(None if backends.only_compiles() else arguments.save_dir):
        return _pretrain(arguments, nxd_config, on_step)


def _pretrain(
    arguments: GPTArguments, nxd_config: dict, on_step: Callable[[Step], None] | None
) -> Run:
    dp_size = parallel_state.get_data_parallel_size()
    batch, accumulation = arguments.batch(dp_size), arguments.accumulation(dp_size)
    vocab_size, eod = together(read_vocabulary, arguments.vocab_file)
    config = together(arguments.config, vocab_size, eod)
    together(_require_memory, arguments, config, dp_size)
    training, validation = together(_datasets, arguments, batch, vocab_size)
    if validation is not None:  # before anything is trained
        together(_validation_sampler, arguments, validation)

    model_parallel_xla_manual_seed(arguments.seed)
    model = initialize_parallel_model(
        nxd_config,
        GPT2LMHeadModel,
        False,
        config,
        sequence_parallel_enabled=arguments.sequence_parallel,
        use_flash_attention=arguments.use_flash_attn,
    )
    if arguments.bf16:
        model = model.to(torch.bfloat16)
    optimizer = initialize_parallel_optimizer(
        nxd_config,
        AdamW_FP32OptimParams,
        get_param_groups_by_weight_decay(model.original_module(), arguments.weight_decay),
        lr=arguments.lr,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_eps,
    )
    scheduler = SampleScheduler(
        optimizer, arguments.schedule(batch), batch, arguments.scheduler_mismatch
    )
    sampler = ResumableBatchSampler(training, arguments.micro_batch_size, shuffle=False)
    iteration, compiling = 0, backends.only_compiles()
    if not compiling:  # what is computed then is worth no checkpoint
        iteration = gpt_checkpoint.load(arguments, model, optimizer, scheduler, sampler)

    run = Run([], model=model)
    logger = together(GPTLogger, arguments, batch, iteration, sampler.consumed_samples)
    saved = iteration

    def save(iteration: int) -> None:
        nonlocal saved
        if arguments.save_dir and saved != iteration and not compiling:
            logger.flush()
            gpt_checkpoint.save(arguments, iteration, model, optimizer, scheduler, sampler)
            saved = iteration

    def after(step: Step) -> bool:
        logger.log(step)
        if on_step is not None:
            on_step(step)
        run.stopped_by = interruption.agreed()
        if validation is not None and step.step % arguments.eval_interval == 0:
            run.validation[step.step] = evaluate(arguments, model, validation)
            logger.log_validation(step, run.validation[step.step])
        if arguments.save_dir and step.step % arguments.save_interval == 0:
            save(step.step)
        if run.stopped_by and dist.get_rank() == 0:
            print(f" {run.stopped_by}: ending after iteration {step.step}", flush=True)
        asked = arguments.exit_interval
        return bool(run.stopped_by) or (asked is not None and step.step % asked == 0)

    batches = gpt_batches(training, sampler, xla_device(), num_workers=arguments.num_workers)
    with closing(logger), Interruption() as interruption:
        run.steps = train(
            model,
            optimizer,
            batches,
            steps=arguments.train_iters,
            gradient_accumulation_steps=accumulation,
            scheduler=scheduler,
            sampler=sampler,
            start_step=iteration,
            stop=after,
        )
        if run.steps:
            save(run.steps[-1].step)
        logger.finish()
    return run


@torch.no_grad()
def evaluate(arguments: GPTArguments, model: torch.nn.Module, dataset: GPTDataset) -> float:
    """The mean loss of a token over the first `eval_iters` global batches, without dropout.

    Always the same samples, so that one validation can be compared with the next. (Megatron-LM
    takes others each time.)
    """
    sampler = _validation_sampler(arguments, dataset)
    device, dp_group = xla_device(), parallel_state.get_data_parallel_group()
    batches = gpt_batches(dataset, sampler, device)
    one = torch.ones((), device=device)
    accumulation = arguments.accumulation(parallel_state.get_data_parallel_size())
    loss = count = torch.zeros((), device=device)
    model.eval()
    for _ in range(arguments.eval_iters * accumulation):
        micro_batch = next(batches)
        loss = loss + model(**micro_batch, num_items_in_batch=one).loss.float()
        count = count + model.count_targets(micro_batch)
        backends.mark_step()
    loss, count = (comm.all_reduce("sum", value, dp_group) for value in (loss, count))
    backends.mark_step()
    model.train()
    return float(loss) / float(count)


def read_vocabulary(vocab_file: str) -> tuple[int, int]:
    """The size of a tokenizer's vocabulary, and the id that ends a document.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a JSON object of ids from 0 to its size - 1 with `<|endoftext|>`.
    """
    if not Path(vocab_file).is_file():
        raise FileNotFoundError(f"no vocabulary at {vocab_file}")
    try:
        vocabulary = json.loads(Path(vocab_file).read_bytes())
        if sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise ValueError(f"its ids are not 0 to {len(vocabulary) - 1}")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{vocab_file} is not a vocabulary in JSON: {error}") from error
    if END_OF_DOCUMENT not in vocabulary:
        raise ValueError(f"{vocab_file} has no {END_OF_DOCUMENT} among {len(vocabulary)} tokens")
    return len(vocabulary), vocabulary[END_OF_DOCUMENT]


def _nxd_config(arguments: GPTArguments) -> dict:
    return neuronx_distributed_config(
        tensor_parallel_size=arguments.tensor_model_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        optimizer_config={
            "zero_one_enabled": arguments.use_distributed_optimizer,
            "grad_clipping": arguments.clip_grad > 0,
            "max_grad_norm": arguments.clip_grad or 1.0,
        },
        activation_checkpoint_config=CoreAttention if arguments.recompute_activations else None,
    )


def _require_memory(arguments: GPTArguments, config, dp_size: int) -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT2LMHeadModel(config).parameters())
    each = 16.0  # weight, gradient and two moments in float32
    if arguments.use_distributed_optimizer:
        each = (2 if arguments.bf16 else 4) + 4 + 12 / dp_size  # master and moments are shared out
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    require_memory(int(parameters * each), local, arguments.distributed_backend)


def _datasets(
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
    return training, validation


def _validation_sampler(arguments: GPTArguments, dataset: GPTDataset) -> ResumableBatchSampler:
    return ResumableBatchSampler(dataset, arguments.micro_batch_size, shuffle=False)


def _complete_environment(backend: str) -> None:
    """What `torchrun` leaves open, before anything imports torch-xla."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if missing := sorted({*names, "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()):
        raise SystemExit(f"error: {', '.join(missing)} not set: start the ranks with torchrun")
    rank, local_rank, world, local_world = (int(os.environ[name]) for name in names)
    # On one node over the loopback, as a laptop's own name often does not resolve.
    address = "127.0.0.1" if local_world == world else os.environ["MASTER_ADDR"]
    needed = backends.rank_environment(
        backend,
        rank,
        world,
        master_addr=address,
        master_port=int(os.environ["MASTER_PORT"]),
        local_rank=local_rank,
        local_world_size=local_world,
    )
    for name, value in needed.items():
        os.environ.setdefault(name, value)


def main() -> None:
    """The command line, on each rank that `torchrun` or SLURM has started."""
    arguments = parse_arguments()
    _complete_environment(arguments.distributed_backend)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun; SLURM ends its ranks itself
        end_with_parent()
    backends.init_distributed(arguments.distributed_backend, timeout=600)
    try:
        pretrain(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
