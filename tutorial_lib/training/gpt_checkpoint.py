"""A GPT run into a checkpoint and out of it, with schedule, random states and data position."""

from pathlib import Path

import torch.distributed as dist

from tutorial_lib.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from tutorial_lib.parallel_layers.random import separate_replicas
from tutorial_lib.parallel_layers.ranks import from_rank_zero, together

from .gpt_arguments import GPTArguments


def load(arguments: GPTArguments, model, optimizer, scheduler, sampler) -> int:
    """Loads the latest checkpoint, if there is one; the number of steps that are done."""
    folder = arguments.load_dir
    if folder is None or not from_rank_zero(lambda: has_checkpoint(folder)):
        if folder is not None and dist.get_rank() == 0:
            print(f" no checkpoint in {Path(folder).name}: starting anew", flush=True)
        return 0
    separate_replicas()  # where the checkpoint is of another mesh, its random states do not fit
    content = load_checkpoint(folder, None, model, optimizer, scheduler)
    together(_go_on, sampler, content)
    if dist.get_rank() == 0:
        print(f" loaded iteration {content['iteration']} of {Path(folder).name}", flush=True)
    return content["iteration"]


def _go_on(sampler, content: dict) -> None:
    """Moves the sampler to the checkpoint's place in the data.

    Raises:
        ValueError: samples would come in another order than those that were trained on.
    """
    sampler.load_state_dict(content["sampler"])
    for name, saved in content.get("data_order", {}).items():  # earlier checkpoints lack it
        if saved != (mine := sampler.dataset.order.get(name)):
            raise ValueError(
                f"the checkpoint's data are in the order for {name} {saved}, not {mine}: go on "
                f"with its --data-path, --split, --seq-length, --seed and --train-iters"
            )


def save(arguments: GPTArguments, iteration: int, model, optimizer, scheduler, sampler) -> None:
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
