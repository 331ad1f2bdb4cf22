"""`python -m tutorial_lib.lab.plan`: a plan on the terminal."""

import argparse
from dataclasses import fields
from pathlib import Path

import torch
from transformers import AutoConfig

from tutorial_lib.lab.plan.runs import TUTORIALS, Run

from . import INSTANCES, Plan, custom, report, scaled

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_lib.lab.plan",
        description="Memory, operations, traffic and bounds on the speed of a training run. What "
        "is "
        "not given is as published.",
    )
    yes_or_no = argparse.BooleanOptionalAction
    add = parser.add_argument
    add(
        "model",
        help=f"one of {', '.join(TUTORIALS)} as published, or the folder of a Hugging Face "
        "config.json",
    )
    add(
        "--instance", default="trn1.32xlarge", help=f"{', '.join(INSTANCES)}, or cores=…,memory=…,…"
    )
    add("--backend", default="xla", choices=("cpu", "cuda", "xla"), help="default: xla")
    add("--nodes", type=int, help="sets --dp to as many replicas as they hold")
    add("--tp", type=int, help="tensor-parallel size")
    add("--dp", type=int, help="data-parallel size")
    add("--micro-batch", type=int, help="sequences in a micro-batch of one rank")
    add("--sequence", type=int, help="tokens in a sequence")
    add("--accumulation", type=int, help="micro-batches of one rank in a step")
    add(
        "--sequence-parallel", action=yes_or_no, help="shard norms and residuals along the sequence"
    )
    add("--zero", action=yes_or_no, help="ZeRO-1: shard the optimizer over data-parallel ranks")
    add("--float32-gradients", action=yes_or_no, help="add gradients up in float32; needs --zero")
    add(
        "--checkpointing", help="what runs again: none, full or, by model, selective, selective+mlp"
    )
    add("--dtype", choices=DTYPES, help="of weights and activations")
    chosen = parser.parse_args(arguments)
    try:
        chosen.plan = _plan(chosen)
        chosen.report = report(chosen.plan)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return chosen


def _plan(chosen: argparse.Namespace) -> Plan:
    instance = INSTANCES.get(chosen.instance) or custom(chosen.instance)
    if chosen.model in TUTORIALS:
        run = TUTORIALS[chosen.model]
    elif Path(chosen.model).exists():
        run = Run(AutoConfig.from_pretrained(chosen.model, local_files_only=True))
    else:
        raise ValueError(f"{chosen.model!r} is neither a folder nor one of {', '.join(TUTORIALS)}")
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    changes = {f.name: given[f.name] for f in fields(Run) if f.name in given}
    if chosen.dtype:
        changes["dtype"] = DTYPES[chosen.dtype]
    if chosen.nodes is not None:
        if chosen.dp is not None:
            raise ValueError(
                f"--nodes {chosen.nodes} and --dp {chosen.dp} both set the data-parallel size: "
                f"give one"
            )
        one = Plan(run.change(**changes, dp=1), instance, chosen.backend)
        return scaled(one, [chosen.nodes])[0]
    return Plan(run.change(**changes), instance, chosen.backend)


if __name__ == "__main__":
    print(parse().report)
