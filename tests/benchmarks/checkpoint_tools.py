"""`merge` and `reshard` of a checkpoint beside a copy of its bytes: seconds, speed, peak memory
that cannot be reclaimed.

    python -m tests.benchmarks.checkpoint_tools [--gigabytes 2] [--repeats 3] [--folder /tmp]

The copy flushes to the disk as the tools do; the time of one that does not is printed too. Every
measurement is a process of its own, so that its peak memory is its own. The folder needs four times
the size.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

TP = 4
HIDDEN, FEED_FORWARD, VOCABULARY = 2048, 5504, 32000
CHILD = """
import json, sys, threading, time
action, *arguments = sys.argv[1:]
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.01):
        with open("/proc/self/status") as file:  # maps of files are not counted: they can go
            found = [int(line.split()[1]) for line in file if line.startswith("RssAnon")]
            peak = max([peak, *found])
if action.startswith("copy"):
    import os, shutil
    def work(source, target):
        shutil.copytree(source, target)
        for folder, _, files in os.walk(target if action == "copy" else ""):
            for name in files:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
else:
    from tutorial_lib.checkpoint import merge, reshard  # loaded before the clock starts
    def work(source, target):
        if action == "merge":
            merge.merge(source, target)
        else:
            reshard.reshard(source, target, int(action))
threading.Thread(target=watch, daemon=True).start()
start, began = time.perf_counter(), time.process_time()
work(*arguments)
seconds, cpu = time.perf_counter() - start, time.process_time()
over.set()
print(json.dumps([seconds, peak * 1024 / 1e6, cpu - began]))
"""


def make(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Writes a Llama-shaped checkpoint of about that size at degree `TP`; bytes in all and in the
    largest tensor.
    """
    from tutorial_lib.checkpoint.layout import Layout, shard_name, to_json
    from tutorial_lib.checkpoint.tools import mesh_of, write_checkpoint
    from tutorial_lib.parallel_layers.sharding import Partition

    def cut(shape: tuple[int, int], dim: int, matrices: int = 1) -> Layout:
        sizes = (shape[dim] // matrices,) * matrices
        return Layout(shape, torch.float32, Partition(dim, sizes, TP))

    layouts = {"embed": cut((VOCABULARY, HIDDEN), 0)}
    layer = {
        "qkv": cut((3 * HIDDEN, HIDDEN), 0, 3),
        "o": cut((HIDDEN, HIDDEN), 1),
        "gate_up": cut((2 * FEED_FORWARD, HIDDEN), 0, 2),
        "down": cut((HIDDEN, FEED_FORWARD), 1),
        "norm": Layout((HIDDEN,), torch.float32),
    }
    count = 0
    while 4 * sum(torch.Size(x.shape).numel() for x in layouts.values()) < gigabytes * 1e9:
        layouts |= {f"layers.{count}.{name}": layout for name, layout in layer.items()}
        count += 1

    def tensor(layout: Layout) -> torch.Tensor:
        make = torch.rand if layout.partition else torch.ones
        return make(layout.local_shape())

    def files(_: Path) -> Iterator[tuple]:
        for rank in range(TP):
            weights = {name: tensor(layout) for name, layout in layouts.items()}
            yield f"model/{shard_name(0, rank)}", weights

    metadata = {"architecture": "benchmark", "config": None, "tied": [], "optimizer": None}
    metadata |= {"mesh": mesh_of(TP, 1), "model": to_json(layouts)}
    write_checkpoint(folder / "step_1", 1, metadata, files)
    sizes = [4 * torch.Size(x.shape).numel() for x in layouts.values()]
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
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
