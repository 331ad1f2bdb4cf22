"""The batch file for an unattended run on several nodes of a SLURM cluster, such as a trn1
ParallelCluster.

    python -m tutorial_lib.lab.plan.batch_script --nodes 16 --ranks-per-node 32 --precompile -- \\
        -m tutorial_lib.training.pretrain_gpt --distributed-backend xla … > pretrain.sbatch
    sbatch pretrain.sbatch

One `torchrun` on each node starts its ranks. Five minutes before the job's time is over SLURM sends
them SIGUSR1, upon which they save and stop; the same file, submitted again, goes on from there. A
notebook needs no such file: `Mesh(launcher="slurm")` submits a job by itself.
"""

import argparse
import shlex
import sys

from tutorial_lib.parallel_layers.utils import ensure_positive

TEMPLATE = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@300
{options}set -euo pipefail

# Ranks meet on the first node, where this file runs. Its port follows from the job's number, so
# jobs do not collide.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=1
# torchrun itself ignores the signal to save; the ranks handle it.
run='trap "" USR1; exec torchrun --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \\
  --nproc-per-node={ranks} \\
  --master-addr="$SLURM_LAUNCH_NODE_IPADDR" --master-port="$MASTER_PORT" \\
  {command}'
{precompile}
srun --kill-on-bad-exit=1 bash -c "$run"
"""
PRECOMPILE = """
# Compiles what the first steps need on all nodes at once, and trains nothing; then the run starts
# at full speed.
compile="${{run/exec torchrun/exec neuron_parallel_compile torchrun}}"
srun --kill-on-bad-exit=1 bash -c "$compile {changes}"
"""


def shell_lines(words: list[str]) -> str:
    """A command for a shell, each option on a line of its own."""
    shown = shlex.quote(words[0])
    for word in words[1:]:
        shown += (" \\\n  " if word.startswith("-") else " ") + shlex.quote(word)
    return shown


def batch_script(
    command: list[str],
    nodes: int,
    ranks_per_node: int,
    *,
    name: str = "train",
    options: list[str] = (),
    precompile: list[str] = (),
) -> str:
    """The text of the file.

    Args:
        command: what every rank runs: what `torchrun` takes after its own options, `["-m", module,
            …]` or a script.
        nodes, ranks_per_node: at least 1; a trn1.32xlarge has 32 NeuronCores, and so ranks.
        name: of the job and its log.
        options: further ones of `sbatch`, such as `["--partition=trn1", "--time=81:00:00",
            "--exclusive"]`.
        precompile: compile first, with these words behind the command, `["--exit-interval", "2"]`.

    Raises:
        ValueError: nothing to run, a number that is not a positive integer, or a name or an option
            that is not one line.
    """
    if not command:
        raise ValueError("there is no command to run")
    ensure_positive(nodes=nodes, ranks_per_node=ranks_per_node)
    for line in (name, *options):
        if len(line.splitlines()) != 1:
            raise ValueError(f"{line!r} is not one line of a batch file")
    return TEMPLATE.format(
        name=shlex.quote(name),
        nodes=nodes,
        ranks=ranks_per_node,
        options="".join(f"#SBATCH {option}\n" for option in options),
        command=shell_lines(command).replace("'", "'\\''"),  # within the quotes of `run`
        precompile=PRECOMPILE.format(changes=shlex.join(precompile)) if precompile else "",
    )


def main(words: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_lib.lab.plan.batch_script",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="of the job")
    add("--ranks-per-node", type=int, required=True, help="one for each core or GPU")
    add("--name", default="train", help="of the job, and of its log file (default train)")
    add("--sbatch", default="", help="further options of sbatch, in one word")
    add("--precompile", action="store_true", help="compile with two steps of the command first")
    add("command", nargs="+", help="after --: what each rank runs")
    given = parser.parse_args(words)
    options = {"name": given.name, "options": shlex.split(given.sbatch)}
    if given.precompile:
        options["precompile"] = ["--exit-interval", "2"]
    try:
        text = batch_script(given.command, given.nodes, given.ranks_per_node, **options)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
