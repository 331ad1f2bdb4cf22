"""Pretraining of GPT as Megatron-LM does it, from tokens to checkpoints.

    torchrun --nproc_per_node 4 -m tutorial_lib.training.pretrain_gpt --num-layers 2 …

`--help` lists the options, which are Megatron-LM's. A notebook calls `pretrain` on every rank with
the same `GPTArguments`. SIGTERM or Ctrl-C ends a run after the step under way, with a checkpoint,
and the same command with `--load` goes on as if nothing had happened, bit for bit.
"""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config

from tutorial_lib import backends, trainer
from tutorial_lib.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from tutorial_lib.data.sampler import ResumableBatchSampler
from tutorial_lib.models.attention import CoreAttention
from tutorial_lib.models.gpt import GPT2LMHeadModel
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams, get_param_groups_by_weight_decay
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed, separate_replicas
from tutorial_lib.parallel_layers.ranks import from_rank_zero, together

from .gpt_arguments import GPTArguments, parse_arguments
from .gpt_data import evaluate, gpt_batches, gpt_datasets, read_vocabulary
from .interruption import Interruption, end_with_parent
from .logger import GPTLogger
from .loop import Step, train
from .memory import require_memory
from .schedules import SampleScheduler
from .sole_run import sole_run


@dataclass
class Outcome:
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


def pretrain(arguments: GPTArguments, on_step: Callable[[Step], None] | None = None) -> Outcome:
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
    # What is computed while graphs are only compiled is worth no checkpoint.
    if backends.only_compiles():
        arguments = replace(arguments, save=None, save_xser=None, load=None, load_xser=None)
    with sole_run(arguments.save_dir):
        return _pretrain(arguments, nxd_config, on_step)


def _pretrain(
    arguments: GPTArguments, nxd_config: dict, on_step: Callable[[Step], None] | None
) -> Outcome:
    dp_size = parallel_state.get_data_parallel_size()
    batch = arguments.batch(dp_size)
    vocab_size, eod = together(read_vocabulary, arguments.vocab_file)
    config = together(arguments.config, vocab_size, eod)
    together(_require_memory, arguments, config, dp_size)
    training, validation = together(gpt_datasets, arguments, batch, vocab_size)
    model, optimizer = _model_and_optimizer(arguments, nxd_config, config)
    schedule, mismatch = arguments.schedule(batch), arguments.scheduler_mismatch
    scheduler = SampleScheduler(optimizer, schedule, batch, mismatch)
    sampler = ResumableBatchSampler(training, arguments.micro_batch_size, shuffle=False)
    saved = _load(arguments, model, optimizer, scheduler, sampler)
    logger = together(GPTLogger, arguments, saved, sampler.consumed_samples)
    outcome = Outcome([], model=model)

    def save(iteration: int) -> None:
        nonlocal saved
        if arguments.save_dir and saved != iteration:
            logger.flush()
            _save(arguments, iteration, model, optimizer, scheduler, sampler)
            saved = iteration

    def after(step: Step) -> bool:
        logger.log(step)
        if on_step is not None:
            on_step(step)
        outcome.stopped_by = interruption.agreed()
        if validation is not None and step.step % arguments.eval_interval == 0:
            outcome.validation[step.step] = evaluate(arguments, model, validation)
            logger.log_validation(step, outcome.validation[step.step])
        if arguments.save_dir and step.step % arguments.save_interval == 0:
            save(step.step)
        if outcome.stopped_by and dist.get_rank() == 0:
            print(f" {outcome.stopped_by}: ending after iteration {step.step}", flush=True)
        last = arguments.exit_interval is not None and step.step % arguments.exit_interval == 0
        return bool(outcome.stopped_by) or last

    with closing(logger), Interruption() as interruption:
        outcome.steps = train(
            model,
            optimizer,
            gpt_batches(sampler, arguments.num_workers),
            steps=arguments.train_iters,
            gradient_accumulation_steps=arguments.accumulation(dp_size),
            scheduler=scheduler,
            sampler=sampler,
            start_step=saved,
            on_step=after,
        )
        if outcome.steps:
            save(outcome.steps[-1].step)
    return outcome


def _model_and_optimizer(arguments: GPTArguments, nxd_config: dict, config: GPT2Config):
    model_parallel_xla_manual_seed(arguments.seed)
    model = trainer.initialize_parallel_model(
        nxd_config,
        GPT2LMHeadModel,
        False,
        config,
        sequence_parallel_enabled=arguments.sequence_parallel,
        use_flash_attention=arguments.use_flash_attn,
    )
    if arguments.bf16:
        model = model.to(torch.bfloat16)
    return model, trainer.initialize_parallel_optimizer(
        nxd_config,
        AdamW_FP32OptimParams,
        get_param_groups_by_weight_decay(model.original_module(), arguments.weight_decay),
        lr=arguments.lr,
        betas=(0.9, arguments.adam_beta2),
        eps=1e-8,
    )


def _load(arguments: GPTArguments, model, optimizer, scheduler, sampler) -> int:
    """Loads the latest checkpoint, if there is one; the number of steps that are done.

    Raises:
        ValueError: samples would come in another order than those that were trained on.
    """
    folder, loud = arguments.load_dir, dist.get_rank() == 0
    if folder is None or not from_rank_zero(lambda: has_checkpoint(folder)):
        if folder is not None and loud:
            print(f" no checkpoint in {Path(folder).name}: starting anew", flush=True)
        return 0
    separate_replicas()  # where the checkpoint is of another mesh, its random states do not fit
    content = load_checkpoint(folder, None, model, optimizer, scheduler)
    together(sampler.load_state_dict, content["sampler"])
    for name, saved in content.get("data_order", {}).items():  # earlier checkpoints lack it
        if saved != (mine := sampler.dataset.order.get(name)):
            raise ValueError(
                f"the checkpoint's data order has {name} {saved}, this run's {mine}: resume with "
                "its --data-path, --split, --seq-length, --seed and --train-iters"
            )
    if loud:
        print(f" loaded iteration {content['iteration']} of {Path(folder).name}", flush=True)
    return content["iteration"]


def _save(arguments: GPTArguments, iteration: int, model, optimizer, scheduler, sampler) -> None:
    content = {
        "iteration": iteration,
        "consumed_train_samples": sampler.consumed_samples,
        "sampler": sampler.state_dict(),
        "data_order": sampler.dataset.order,
        "arguments": vars(arguments),
    }
    save_checkpoint(
        arguments.save_dir,
        f"iter_{iteration:07d}",
        model,
        optimizer,
        scheduler,
        content,
        use_xser=arguments.save_xser is not None,
        num_kept_ckpts=1 if arguments.keep_last_checkpoint_only else None,
        step=iteration,
    )


def _nxd_config(arguments: GPTArguments) -> dict:
    return trainer.neuronx_distributed_config(
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


def _complete_environment(backend: str) -> None:
    """What `torchrun` leaves open, before anything imports torch-xla."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    if missing := sorted({*names, "MASTER_ADDR"} - os.environ.keys()):
        raise SystemExit(f"error: {', '.join(missing)} not set: start the ranks with torchrun")
    *place, port = (int(os.environ[n]) for n in names)
    # On one node over the loopback, as a laptop's own name often does not resolve.
    address = "127.0.0.1" if place[1] == place[3] else os.environ["MASTER_ADDR"]
    needed = backends.rank_environment(backend, *place, master_addr=address, master_port=port)
    os.environ |= needed | dict(os.environ) | {"MASTER_ADDR": address}


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
