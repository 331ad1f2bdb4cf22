"""`python -m tutorial_lib.lab.plan`: a plan or a dry run on the terminal."""

import argparse
from dataclasses import fields
from pathlib import Path

import torch
from transformers import AutoConfig

from tutorial_lib.backends import BACKENDS
from tutorial_lib.lab.plan.runs import TUTORIALS, Run

from . import INSTANCES, Plan, report, scaled
from .dry_run import dry_run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIONS = {  # the fields of a run that it can be asked to change
    "tp": "tensor-parallel size",
    "dp": "data-parallel size",
    "micro_batch": "sequences in a micro-batch of one rank",
    "sequence": "tokens in a sequence",
    "accumulation": "micro-batches of one rank in a step",
    "sequence_parallel": "shard norms and residuals along the sequence",
    "zero": "ZeRO-1: shard the optimizer over data-parallel ranks",
    "float32_gradients": "add gradients up in float32; needs --zero",
    "checkpointing": "what runs again: none, full or, by model, selective, selective+mlp",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_lib.lab.plan",
        description="Memory, FLOPs, communication and bounds on the speed of a training run. What "
        "is not given is as published.",
    )
    names = ", ".join(TUTORIALS)
    parser.add_argument("model", help=f"{names}, or the folder of a Hugging Face config.json")
    parser.add_argument("--instance", default="trn1.32xlarge", choices=INSTANCES)
    parser.add_argument("--backend", default="xla", choices=BACKENDS)
    parser.add_argument("--nodes", type=int, help="sets --dp to as many replicas as they hold")
    parser.add_argument(
        "--dry-run", type=int, metavar="RANK", help="a step of this rank, in place of the plan"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations")
    for field in fields(Run):
        if field.name in OPTIONS:
            flag = field.type is bool
            kind = {"action": argparse.BooleanOptionalAction} if flag else {"type": field.type}
            words = field.name.replace("_", "-")
            parser.add_argument(f"--{words}", help=OPTIONS[field.name], **kind)
    chosen = parser.parse_args(arguments)
    try:
        chosen.plan = _plan(chosen)
        if chosen.dry_run is None:
            chosen.report = report(chosen.plan)
        else:
            chosen.report = str(dry_run(chosen.plan.run, chosen.dry_run, chosen.backend))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return chosen


def _plan(chosen: argparse.Namespace) -> Plan:
    if chosen.model in TUTORIALS:
        run = TUTORIALS[chosen.model]
    elif Path(chosen.model).exists():
        run = Run(AutoConfig.from_pretrained(chosen.model, local_files_only=True))
    else:
        raise ValueError(f"{chosen.model!r} is neither a folder nor one of {', '.join(TUTORIALS)}")
    given = {name: getattr(chosen, name) for name in OPTIONS}
    changes = {name: value for name, value in given.items() if value is not None}
    if chosen.dtype:
        changes["dtype"] = DTYPES[chosen.dtype]
    if chosen.nodes is not None:
        if chosen.dp is not None:
            raise ValueError("--nodes and --dp both set the data-parallel size: give one")
        changes["dp"] = 1
    plan = Plan(run.change(**changes), INSTANCES[chosen.instance], chosen.backend)
    return plan if chosen.nodes is None else scaled(plan, [chosen.nodes])[0]


if __name__ == "__main__":
    print(parse().report)
