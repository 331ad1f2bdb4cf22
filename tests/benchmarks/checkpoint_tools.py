"""`merge` and `reshard` of a checkpoint beside a copy of its bytes: seconds, speed, peak memory
that cannot be reclaimed.

    python -m tests.benchmarks.checkpoint_tools [--gigabytes 2] [--repeats 3] [--folder /tmp]

The copy flushes to the disk as the tools do; the time of one that does not is printed too. Every
measurement is a process of its own, so that its peak memory is its own. The folder needs four times
the size.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.benchmarks.command import parser
from tutorial_lib.checkpoint.__main__ import main as checkpoint_command

TP = 4
CHILD = """
import json, sys, threading, time
action, source, target = sys.argv[1:]
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.01):
        with open("/proc/self/status") as file:  # maps of files are not counted: they can go
            found = [int(line.split()[1]) for line in file if line.startswith("RssAnon")]
            peak = max([peak, *found])
if action.startswith("copy"):
    import os, shutil
    def work():
        shutil.copytree(source, target)
        for folder, _, files in os.walk(target if action == "copy" else ""):
            for name in files:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
else:
    from tutorial_lib.checkpoint import merge, reshard  # loaded before the clock starts
    from tutorial_lib.checkpoint.__main__ import main
    command = ["merge"] if action == "merge" else ["reshard", "--tp", action]
    def work():
        assert main([*command, source, target]) == 0
threading.Thread(target=watch, daemon=True).start()
start, began = time.perf_counter(), time.process_time()
work()
seconds, cpu = time.perf_counter() - start, time.process_time()
over.set()
print(json.dumps([seconds, peak * 1024 / 1e6, cpu - began]))
"""


def make(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Writes a Llama's checkpoint of about that size at degree `TP`; bytes in all and in the
    largest tensor.
    """
    layer, ends = 4 * (4 * 2048**2 + 3 * 2048 * 5504), 8 * 32000 * 2048
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5504, vocab_size=32000, num_attention_heads=16,
        num_hidden_layers=max(round((gigabytes * 1e9 - ends) / layer), 1), dtype=torch.float32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "whole")
    split = ["split", str(folder / "whole"), str(folder / "step_1"), "--tp", str(TP)]
    assert checkpoint_command(split) == 0
    shutil.rmtree(folder / "whole")
    sizes = [p.nbytes for p in model.parameters()]
    return sum(sizes), max(sizes)


def measure(action: str, source: Path, target: Path) -> tuple[float, float, float]:
    """Seconds, peak anonymous memory in MB and CPU seconds of one action, in a process of its
    own.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, action, str(source), str(target)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, check=True
    )
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    given = parser(__doc__, gigabytes=2.0, repeats=3, folder=tempfile.gettempdir())
    args = given.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        total, largest = make(folder, args.gigabytes)
        limit = 2 * largest / 1e6 + 700
        print(
            f"{total / 1e9:.2f} GB over {TP} ranks, largest tensor {largest / 1e6:.0f} MB, limit "
            f"{limit:.0f} MB"
        )
        source = folder / "step_1"
        actions = {
            "copy": folder / "copy",
            "copy, not flushed": folder / "copy",
            "merge": folder / "merged.safetensors",
            "2": folder / "two" / "t",
            "8": folder / "eight" / "t",
        }
        found = {action: [] for action in actions}
        for _ in range(args.repeats):  # in turn, so that a change of the machine's pace meets all
            for action, target in actions.items():
                found[action].append(measure(action, source, target))
        best = {action: min(run[0] for run in runs) for action, runs in found.items()}
        for action, runs in found.items():
            peak, speed = max(run[1] for run in runs), total / 1e6 / best[action]
            what = f"reshard {TP} → {action}" if action.isdigit() else action
            print(
                f"{what:18} {best[action]:6.2f} s  {speed:7.0f} MB/s  "
                f"{best['copy'] / best[action]:5.2f} × the copy  "
                f"peak {peak:5.0f} MB  CPU {min(run[2] for run in runs):5.2f} s"
            )


if __name__ == "__main__":
    main()
