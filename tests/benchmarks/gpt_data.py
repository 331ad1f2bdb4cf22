"""Speed of the GPT data: `python -m tests.benchmarks.gpt_data`, everything in one run.

Tokens a second of `preprocess_data` at one and two workers, beside megatron-core's builder fed by
the same tokenizer the way Megatron-LM's own script does it (a pool of processes, one line a task,
one `add_document` a line); seconds and memory for the index of ten million documents; time to load
a batch, with and without a worker of the data loader, beside a step of GPT `small`. Seconds are of
the clock; CPU seconds, of all processes together, say less of what else the machine did.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data_scripts.byte_pair import END_OF_DOCUMENT, load_byte_pair, train_byte_pair
from data_scripts.corpus import prepare_corpus
from data_scripts.json_lines import texts
from data_scripts.preprocess_data import preprocess
from tutorial_lib.data.indexed_dataset import IndexedDataset, bin_path, idx_path, token_dtype

COPIES = 8  # of the default corpus: the start of the processes should not be what is measured


def megatron_line(line: str) -> list[int]:
    """What a worker of Megatron-LM's script does with a line."""
    text = json.loads(line)["text"]
    ids = megatron_line.tokenizer.encode(text, add_special_tokens=False).ids
    if ids:
        ids.append(megatron_line.tokenizer.token_to_id(END_OF_DOCUMENT))
    return ids


def start_megatron_worker(vocab: Path, merges: Path) -> None:
    megatron_line.tokenizer = load_byte_pair(vocab, merges)


def megatron_preprocess(lines: Path, prefix: Path, vocab: Path, merges: Path, workers: int) -> None:
    """Megatron-LM's tools/preprocess_data.py in its main lines, on megatron-core's builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    start_megatron_worker(vocab, merges)
    dtype = token_dtype(megatron_line.tokenizer.get_vocab_size()).type
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype)
    with open(lines, encoding="utf-8") as file:
        with multiprocessing.get_context("spawn").Pool(
            workers, start_megatron_worker, (vocab, merges)
        ) as pool:
            for ids in pool.imap(megatron_line, file, 32):
                if ids:
                    builder.add_document(ids, [len(ids)])
    builder.finalize(str(idx_path(prefix)))


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_mb() -> int:
    """Of this process since it began; `ru_maxrss` would include that of its parent."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) // 1024


def measure_preprocessing(folder: Path, repeats: int) -> dict:
    corpus = prepare_corpus(folder / "data", workers=2, progress=False)
    articles = corpus.folder / "articles.jsonl"
    files = folder / "vocab.json", folder / "merges.txt"
    train_byte_pair(texts(articles, ("text",)), *files, 8192)
    lines = folder / "lines.jsonl"
    lines.write_bytes(COPIES * articles.read_bytes())
    import megatron.core.datasets.indexed_dataset  # noqa: F401  its import is not measured

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seconds: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, function, *args, **options):
        clock, cpu = time.perf_counter(), cpu_seconds()
        result = function(*args, **options)
        spent = time.perf_counter() - clock, cpu_seconds() - cpu
        seconds.setdefault(name, []).append(spent)
        return result

    for _ in range(repeats):
        for workers in (1, 2):  # in turn, so that noise meets all
            options = {"append_eod": True, "workers": workers, "progress": False}
            name = f"{workers} workers, ours"
            counts = timed(name, preprocess, lines, folder / "ours", *files, **options)
            name = f"{workers} workers, megatron-core"
            timed(name, megatron_preprocess, lines, folder / "theirs", *files, workers)
            for path in (bin_path, idx_path):
                ours, theirs = path(folder / "ours_text_document"), path(folder / "theirs")
                if ours.read_bytes() != theirs.read_bytes():
                    raise RuntimeError(f"{ours} and {theirs} differ: nothing to compare")
    tokens = counts["text"]["tokens"]
    rates = {
        name: {
            "median_tokens_a_second": round(tokens / statistics.median(c for c, _ in times)),
            "best_tokens_a_second": round(tokens / min(c for c, _ in times)),
            "tokens_a_cpu_second": round(tokens / statistics.median(c for _, c in times)),
        }
        for name, times in seconds.items()
    }
    return {"tokens": tokens} | rates


def measure_index(documents: int, seq_length: int) -> dict:
    """In a process of its own, for its peak of memory."""
    command = [sys.executable, "-m", "tests.benchmarks.gpt_data", "--index", str(documents)]
    command += ["--seq-length", str(seq_length)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def index_alone(documents: int, seq_length: int) -> dict:
    from tutorial_lib.data.gpt_index import build_indices, cached_indices

    lengths = np.random.default_rng(0).lognormal(6, 1, documents).clip(1, 1e6).astype(np.int32)
    samples = int(lengths.sum(dtype=np.int64) - 1) // seq_length
    before = peak_mb()
    start, cpu = time.perf_counter(), cpu_seconds()
    build_indices(lengths, 0, samples, seq_length, 1234)
    build, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    peak = peak_mb()
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder), "train", lengths, 0, samples, seq_length, 1234
        start = time.perf_counter()
        cached_indices(*arguments)
        write = time.perf_counter() - start
        start = time.perf_counter()
        cached_indices(*arguments)
        open_again = time.perf_counter() - start
    return {
        "documents": len(lengths),
        "seq_length": seq_length,
        "samples": samples,
        "build_seconds": round(build, 2),
        "build_cpu_seconds": round(cpu, 2),
        "build_and_write_seconds": round(write, 2),
        "open_again_seconds": round(open_again, 3),
        "peak_mb": peak,
        "peak_before_mb": before,
    }


def measure_loading(prefix: Path, seq_length: int, batch_size: int) -> dict:
    from tutorial_lib.data.gpt_dataset import GPTDataset
    from tutorial_lib.data.sampler import ResumableBatchSampler, data_loader

    indexed = IndexedDataset(prefix)
    documents = range(len(indexed))
    data = GPTDataset(indexed, "train", documents, 4000, seq_length, 1234, vocab_size=8192)
    result = {"seq_length": seq_length, "batch_size": batch_size}
    for workers in (0, 1):
        sampler = ResumableBatchSampler(data, batch_size, num_replicas=1, rank=0, shuffle=False)
        batches = iter(data_loader(data, sampler, num_workers=workers))
        next(batches)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            next(batches)
            times.append(time.perf_counter() - start)
        result[f"ms_a_batch_{workers}_workers"] = round(1000 * statistics.median(times), 3)
    step = 1000 * small_step(next(batches)["text"])
    result["ms_a_small_step"] = round(step, 1)
    result["percent_of_a_small_step"] = round(100 * result["ms_a_batch_0_workers"] / step, 3)
    return result


def small_step(text) -> float:
    """Seconds of a step of GPT `small` on this batch `[B, S + 1]`, in this process alone."""
    from tutorial_lib.models.gpt import GPT2LMHeadModel, make_config
    from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
    from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed

    model = GPT2LMHeadModel(make_config("small", n_positions=text.size(1) - 1)).train()
    model_parallel_xla_manual_seed(0)
    optimizer = AdamW_FP32OptimParams(model.parameters(), lr=1e-3)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        model(input_ids=text[:, :-1], targets=text[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.gpt_data", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--index", type=int, help="only the index of so many documents")
    parser.add_argument("--seq-length", type=int, default=2048)
    arguments = parser.parse_args()
    if arguments.index:
        print(json.dumps(index_alone(arguments.index, arguments.seq_length)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "preprocess": measure_preprocessing(Path(folder), arguments.repeats),
            "index": [measure_index(10_000_000, seq_length) for seq_length in (2048, 128)],
            "loading": measure_loading(Path(folder) / "ours_text_document", 512, 8),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
