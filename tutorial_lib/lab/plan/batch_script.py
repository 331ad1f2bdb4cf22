"""The batch file for an unattended run on several nodes of a SLURM cluster, such as a trn1
ParallelCluster.

    python -m tutorial_lib.lab.plan.batch_script --nodes 16 --ranks-per-node 32 --precompile -- \\
        -m tutorial_lib.training.pretrain_gpt --distributed-backend xla … > pretrain.sbatch
    sbatch pretrain.sbatch

One `torchrun` on each node starts its ranks. Some minutes before the job's time is over SLURM sends
them SIGUSR1, upon which they save and stop; the same file, submitted again, goes on from there. A
notebook needs no such file: `Mesh(launcher="slurm")` submits a job by itself.
"""

import argparse
import shlex
import sys

SAVE_SECONDS = 300  # that the ranks get to save before the job's time is over
LINE = 96  # characters of the command on a line
TEMPLATE = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@{save_seconds}
{options}set -euo pipefail

# Ranks meet on the first node, where this file runs. Its port follows from the job's number, so
# jobs do not collide.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS={threads}
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
    """A command for a shell, on lines that begin with an option where they can."""
    options: list[str] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append(shlex.quote(word))
        else:
            options[-1] += f" {shlex.quote(word)}"
    lines = options[:1]
    for option in options[1:]:
        if len(lines[-1]) + len(option) > LINE:
            lines.append(option)
        else:
            lines[-1] += f" {option}"
    return " \\\n  ".join(lines)


def batch_script(
    command: list[str],
    nodes: int,
    ranks_per_node: int,
    *,
    name: str = "train",
    threads: int = 1,
    options: list[str] = (),
    precompile: list[str] | None = None,
) -> str:
    """The text of the file.

    Args:
        command: what every rank runs: what `torchrun` takes after its own options, `["-m", module,
            …]` or a script.
        nodes, ranks_per_node: at least 1; a trn1.32xlarge has 32 NeuronCores, and so ranks.
        name: of the job and its log.
        threads: that each rank computes with on the host.
        options: further ones of `sbatch`, such as `["--partition=trn1", "--time=81:00:00",
            "--exclusive"]`.
        precompile: compile first, with these words behind the command, `["--exit-interval", "2"]`;
            None does not.

    Raises:
        ValueError: nothing to run, a number that is not whole or is below 1, or a name or an
            option that is not one line.
    """
    if not command:
        raise ValueError("there is no command to run")
    for what, number in (
        ("nodes", nodes),
        ("ranks_per_node", ranks_per_node),
        ("threads", threads),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{what} is {number!r}, must be a whole number from 1 on")
    for line in (name, *options):
        if len(line.splitlines()) != 1:
            raise ValueError(f"{line!r} is not one line of a batch file")
    compiling = (
        ""
        if precompile is None
        else PRECOMPILE.format(changes=shlex.join(precompile)).replace(' "\n', '"\n')
    )
    return TEMPLATE.format(
        name=shlex.quote(name),
        nodes=nodes,
        ranks=ranks_per_node,
        threads=threads,
        save_seconds=SAVE_SECONDS,
        options="".join(f"#SBATCH {option}\n" for option in options),
        command=shell_lines(command).replace("'", "'\\''"),  # within the quotes of `run`
        precompile=compiling,
    )


def main(words: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_lib.lab.plan.batch_script",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, required=True, help="of the job")
    parser.add_argument(
        "--ranks-per-node", type=int, required=True, help="one for each core or GPU"
    )
    parser.add_argument(
        "--name", default="train", help="of the job, and of its log file (default train)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the CPU (default 1)")
    parser.add_argument("--sbatch", default="", help="further options of sbatch, in one word")
    parser.add_argument(
        "--precompile", action="store_true", help="compile with two steps of the command first"
    )
    parser.add_argument("command", nargs="+", help="after --: what each rank runs")
    given = parser.parse_args(words)
    try:
        text = batch_script(
            given.command, given.nodes, given.ranks_per_node, name=given.name,
            threads=given.threads, options=shlex.split(given.sbatch),
            precompile=["--exit-interval", "2"] if given.precompile else None,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
