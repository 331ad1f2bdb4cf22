"""Starts the ranks, and runs the script in each: see the package."""

import argparse
import os
import runpy
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.nn.modules.module import register_module_forward_pre_hook

from tutorial_lib.backends import rank_environment
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.consistency import find_drift


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_lib.lab.run_vendor",
        description="Runs a training script that was written for neuronx_distributed.",
    )
    parser.add_argument("--backend", choices=("cpu", "xla"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4, help="processes, one for each rank")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the script")
    options = parser.parse_args()
    if not options.script.is_file():
        parser.error(f"{options.script} is not a file")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # this is a rank
        run(options.backend, options.script, options.arguments)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The loopback address: a laptop's own name often does not resolve.
    launch = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={options.ranks}"]
    torchrun.main([*launch, "-m", __spec__.parent, *sys.argv[1:]])


def run(backend: str, script: Path, arguments: list[str]) -> None:
    """Runs the script in this rank, then checks that what ranks share is bitwise equal on them.

    Raises:
        RuntimeError: a parameter differs, with its name and the ranks.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    os.environ |= rank_environment("xla", rank, world_size, master_port=port)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from . import devices, names

    devices.install(backend)
    names.install()
    models = []

    def keep(module: torch.nn.Module, inputs) -> None:
        models.append(module)
        first_call.remove()

    first_call = register_module_forward_pre_hook(keep)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
    if models:
        check(models[0])
        if rank == 0:
            count = len(list(models[0].parameters()))
            print(f"run_vendor: {count} parameters, bitwise equal on the ranks that share them")


def check(model: torch.nn.Module) -> None:
    if megatron := sys.modules.get("megatron.mpu"):  # has groups of its own
        size = megatron.get_tensor_model_parallel_world_size()
        parallel_state.initialize_model_parallel(size)
    sys.modules["torch_xla"].sync()
    if drifted := find_drift(model):
        raise RuntimeError("parameters differ on the ranks that share them:\n" + "\n".join(drifted))


if __name__ == "__main__":
    main()
