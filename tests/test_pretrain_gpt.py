"""Pretraining GPT: resume without a seam, signals, validation, what is logged, command line."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from tests.slurm import wait_for
from tests.standin import refused, same
from tutorial_lib.checkpoint.__main__ import main as tools
from tutorial_lib.checkpoint.tags import complete, latest
from tutorial_lib.data.gpt_dataset import build_gpt_datasets
from tutorial_lib.data.indexed_dataset_builder import IndexedDatasetBuilder
from tutorial_lib.models.full_weights import full_tensors
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.training import pretrain_gpt
from tutorial_lib.training.gpt_arguments import GPTArguments, command_line, parse_arguments
from tutorial_lib.training.logger import read_events
from tutorial_lib.training.pretrain_gpt import pretrain

VOCABULARY = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """`{"data_path", "vocab_file"}` of 40 documents: walks through the vocabulary by 1 to 3."""
    folder = tmp_path_factory.mktemp("gpt")
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "walks", np.uint16, VOCABULARY) as builder:
        for length in rng.integers(20, 200, 40):
            walk = rng.integers(VOCABULARY) + rng.integers(1, 4, length).cumsum()
            walk %= VOCABULARY - 1
            builder.add_documents(np.append(walk, VOCABULARY - 1), [length + 1])
    names = [f"token {i}" for i in range(VOCABULARY - 1)] + ["<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    return {"data_path": str(folder / "walks"), "vocab_file": str(folder / "vocab.json")}


def arguments(data, **changes) -> GPTArguments:
    sizes = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16,
        max_position_embeddings=16, micro_batch_size=2, global_batch_size=8, train_iters=6,
        lr=1e-2, lr_decay_style="cosine", lr_warmup_fraction=0.2, split="80,20,0",
        eval_interval=2, eval_iters=2, log_interval=1,
    )  # fmt: skip
    return GPTArguments(**{**sizes, **data, **changes})


def run(given: GPTArguments):
    """Losses, norms, validation losses and full weights of a run."""
    found = pretrain(given)
    numbers = [(step.step, step.loss, step.learning_rate, step.grad_norm) for step in found.steps]
    return numbers, found.validation, full_tensors(found.model), found.stopped_by


TP2 = dict(tensor_model_parallel_size=2)
ZERO1 = dict(use_distributed_optimizer=True)
RESUMED = [
    (TP2 | ZERO1 | dict(sequence_parallel=True), "save_xser"),
    (ZERO1 | dict(bf16=True, use_flash_attn=True), "save"),
    (TP2 | dict(recompute_activations=True, num_workers=1), "save"),
]


@pytest.mark.parametrize("changes, save", RESUMED, ids=["sequence, zero1, xser", "bf16", "worker"])
def test_interrupted_and_resumed_equals_uninterrupted(ranks, data, tmp_path, changes, save):
    """With dropout: every random stream has to go on where it was."""
    tp, folder = changes.get("tensor_model_parallel_size", 1), str(tmp_path / "run")
    whole = arguments(data, **changes)
    places = {save: folder, save.replace("save", "load"): folder}
    parts = replace(whole, **places, save_interval=2)

    def go(given):
        return ranks(run, given, world_size=2 * tp, tp=tp, timeout=120)

    straight = go(whole)
    first, second = go(replace(parts, exit_interval=3)), go(parts)
    for (numbers, validation, weights, _), before, after in zip(straight, first, second):
        assert len(before[0]) == len(after[0]) == 3
        assert before[0] + after[0] == numbers and before[1] | after[1] == validation
        assert same(after[2], weights) and not same(before[2], weights)
    assert [one.step for one in complete(folder)] == [2, 3, 4, 6]
    numbers = straight[0][0]
    assert numbers[0][2] == 0 and numbers[-1][1] < numbers[0][1]
    assert sorted(straight[0][1]) == [2, 4, 6]


def test_the_degree_changes_nothing_without_dropout(ranks, data):
    still = arguments(data, hidden_dropout=0.0, attention_dropout=0.0)
    alone = ranks(run, still, world_size=1, tp=1)[0]
    cut = ranks(run, replace(still, tensor_model_parallel_size=2), world_size=4, tp=2)[0]
    for one, many in zip(alone[0], cut[0]):
        assert many == pytest.approx(one, abs=1e-5)
    assert cut[1] == pytest.approx(alone[1], abs=1e-5)
    for name, value in alone[2].items():
        torch.testing.assert_close(cut[2][name], value, rtol=0, atol=1e-5)


def test_validation_is_the_merged_models_loss(ranks, data, tmp_path):
    given = arguments(data, **TP2, save=str(tmp_path / "run"), save_interval=6)
    found = ranks(run, given, world_size=4, tp=2)[0]
    assert tools(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()
    assert same(dict(model.named_parameters()), found[2])
    _, validation, _ = build_gpt_datasets(data["data_path"], "80,20,0", (48, 16, 0), 16, 1234)
    text = torch.stack([validation[i]["text"] for i in range(16)])
    with torch.no_grad():
        logits = model(text[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item()
    assert found[1][6] == pytest.approx(expected, abs=1e-5)


def interrupted(given):
    def kill(step):
        if step.step == 2 and parallel_state.get_tensor_model_parallel_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    found = pretrain(given, kill)
    assert signal.getsignal(signal.SIGTERM) is before
    return [step.step for step in found.steps], found.stopped_by


def test_a_signal_on_one_rank_ends_all_after_the_step_with_a_checkpoint(ranks, data, tmp_path):
    saved = dict(save=str(tmp_path), save_interval=100, keep_last_checkpoint_only=True)
    given = arguments(data, **TP2, **saved)
    assert ranks(interrupted, given, world_size=2, tp=2) == [([1, 2], "SIGTERM")] * 2
    assert latest(tmp_path).step == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_token_that_the_model_has_not_ends_all_ranks(ranks, data, tmp_path, tp):
    """One of two replicas meets it first."""
    with IndexedDatasetBuilder(tmp_path / "wrong", np.uint16) as builder:
        builder.add_documents(np.append(np.zeros(999, np.int64), VOCABULARY), [1000])
    wrong = dict(data_path=str(tmp_path / "wrong"), split="1", eval_iters=0, train_iters=20)
    given = arguments(data, **wrong, tensor_model_parallel_size=tp)
    refused(ranks, ValueError, ["wrong.bin", str(VOCABULARY)], run, given, tp=tp)


def logged(given):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = pretrain(given)
    return text.getvalue(), [(step.loss, step.grad_norm) for step in found.steps], found.validation


def test_what_is_logged(ranks, data, tmp_path):
    given = arguments(data, tensorboard_dir=str(tmp_path / "tb"))
    (text, steps, validation), (silent, _, _) = ranks(logged, given, world_size=2, tp=1)
    assert silent == ""
    line = re.compile(
        r"^ iteration +(\d+)/ +6 \| consumed samples: +(\d+) \| elapsed time per iteration "
        r"\(ms\): [\d.]+ \| learning rate: (\S+) \| global batch size: +8 \| lm loss: (\S+) \| "
        r"grad norm: ([\d.]+) \| throughput: [\d.]+ \|$",
        re.M,
    )
    lines = line.findall(text)
    assert [(int(n), int(samples)) for n, samples, *_ in lines] == [(n, 8 * n) for n in range(1, 7)]
    assert lines[0][2] == "0.000E+00"
    for (*_, loss, norm), step in zip(lines, steps):
        assert (loss, norm) == (f"{step[0]:.6E}", f"{step[1]:.3f}")
    for iteration, loss in validation.items():
        value = f"lm loss value: {loss:.6E} | lm loss PPL: {np.exp(loss):.6E} |"
        assert f"validation loss at iteration {iteration} | {value}" in text
    events = read_events(str(tmp_path / "tb"))
    names = {"learning-rate", "batch-size", "lm loss", "grad-norm", "throughput"}
    validated = {"lm loss validation", "lm loss validation ppl"}
    names |= validated | {f"{name} vs samples" for name in names | validated}
    expected = names | {"iteration-time"}
    assert set(events.Tags()["scalars"]) == expected
    found = [event.value for event in events.Scalars("lm loss")]
    assert found == pytest.approx([loss for loss, _ in steps])
    by_samples = [event.step for event in events.Scalars("lm loss vs samples")]
    assert by_samples == [8 * n for n in range(1, 7)]


@pytest.mark.parametrize(
    "name, content, text",
    [
        ("tensorboard_dir", "", "File exists"),
        ("vocab_file", "[1]", "not a vocabulary in JSON"),
        ("vocab_file", '{"a": 0, "b": 7}', "ids are not 0 to 1"),
        ("vocab_file", '{"a": 0}', "no <|endoftext|>"),
        ("vocab_file", "{", "not a vocabulary in JSON"),
    ],
)
def test_a_file_that_does_not_fit_ends_all_ranks(ranks, data, tmp_path, name, content, text):
    path = tmp_path / "file"
    path.write_text(content)
    given = arguments(data, **{name: str(path)})
    refused(ranks, (ValueError, OSError), [text, str(path)], run, given, tp=1)
    assert path.read_text() == content


def test_another_order_of_the_data_or_schedule_is_refused(ranks, data, tmp_path):
    """54 steps need as many epochs as 30, but so much of the last that it is shuffled with them.
    Other batches of the same samples are the same data and schedule.
    """
    saved = dict(save=str(tmp_path), load=str(tmp_path), save_interval=2, exit_interval=2)
    given = arguments(data, train_iters=30, lr_decay_iters=6, eval_iters=0, **saved)
    ranks(run, given, world_size=1, tp=1)
    for changes, message in (
        (dict(lr=2e-2), "--override-lr-scheduler"),
        (dict(seed=5), "seed 1234, this run's 5"),
        (dict(train_iters=54), "last_epoch_by_itself True, this run's False"),
        (dict(train_iters=600), "dataset_size"),
    ):
        with pytest.raises(ValueError, match=message):
            ranks(run, replace(given, **changes), world_size=1, tp=1)
    halved = dict(global_batch_size=4, train_iters=60, lr_decay_iters=12, exit_interval=6)
    other = dict(lr=2e-2, override_lr_scheduler=True)
    ((text, _, _),) = ranks(logged, replace(given, **halved, **other), world_size=1)
    assert re.findall(r"consumed samples: +(\d+)", text) == ["20", "24", "28", "32"]


def test_no_validation_without_documents_for_it(ranks, data):
    """As in Megatron-LM, and so in the published command line."""
    given = arguments(data, split="100,0,0", train_iters=2)
    ((text, steps, validation),) = ranks(logged, given, world_size=1)
    assert len(steps) == 2 and validation == {}
    assert " no validation: --split 100,0,0 gives it no document\n" in text


PUBLISHED = """
--tensor-model-parallel-size 8 --num-layers 32 --hidden-size 4096 --num-attention-heads 32
--micro-batch-size 1 --global-batch-size 64 --seq-length 2048 --max-position-embeddings 2048
--train-iters 10000 --lr-decay-iters 320000 --data-path my-gpt2_text_document --vocab-file
gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 100,0,0
--distributed-backend xla --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay
1e-2 --clip-grad 1 --lr-warmup-fraction .01 --log-interval 1 --tensorboard-log-interval 1
--eval-interval 10000 --eval-iters 1000 --attention-dropout 0 --hidden-dropout 0
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--no-async-tensor-model-parallel-allreduce --no-contiguous-buffers-in-local-ddp --save-xser
checkpoints --save-interval 2000 --keep-last-checkpoint-only --use-cpu-initialization
--tensorboard-dir tb
"""


def test_the_published_command_line():
    found = parse_arguments(PUBLISHED.split())
    found.check(32)
    assert (found.accumulation(4), found.batch(4)) == (16, 64)
    assert found.schedule(64).warmup_samples == 3200 * 64 and found.save_dir == "checkpoints"
    assert parse_arguments(command_line(found)) == found
    config = found.config(50257, 50256)
    sizes = config.n_layer, config.n_embd, config.n_head, config.n_positions
    assert sizes == (32, 4096, 32, 2048)


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(tensor_model_parallel_size=3), "4 is not divisible by 3"),
        (dict(global_batch_size=9), "9 is not divisible by 8"),
        (dict(seq_length=17), "16 is below --seq-length 17"),
        (dict(save="a", save_xser="b", save_interval=1), "--save and --save-xser exclude"),
        (dict(save="a"), "need --save-interval"),
        (dict(keep_last_checkpoint_only=True), "needs --save"),
        (dict(bf16=True), "--use-distributed-optimizer"),
        (dict(lr_warmup_fraction=-0.1), "warm-up of -0.6"),
        (dict(lr_warmup_fraction=float("nan")), "--lr-warmup-fraction is nan"),
        (dict(seed=2**32), "--seed is 4294967296"),
        (dict(train_iters=0), "--train-iters is 0, must be at least 1"),
        (dict(attention_dropout=1.5), r"--attention-dropout is 1.5, must be in \[0, 1\)"),
        (dict(train_iters="6"), "--train-iters is '6', must be of type int"),
        (dict(num_layers=True), "--num-layers is True"),
        (dict(bf16=1), "--bf16 is 1, must be of type bool"),
        (dict(lr=None), "--lr is None"),
        (dict(lr_decay_style="Linear"), "'Linear', not one of"),
    ],
)
def test_arguments_that_do_not_fit_are_named(data, changes, text):
    with pytest.raises(ValueError, match=text):
        arguments(data, **changes).check(4)


def test_what_the_command_line_refuses(capsys):
    required = [one.name for one in fields(GPTArguments) if one.default is MISSING]
    flags = [f"--{name.replace('_', '-')}" for name in required]
    for words, messages in (
        ([], flags),
        ([*PUBLISHED.split(), "--no-such-option"], ["unrecognized arguments: --no-such-option"]),
        ([*PUBLISHED.split(), "--lr-decay-style", "square"], ["invalid choice: 'square'"]),
        ([*PUBLISHED.split(), "--num-layers", "two"], ["invalid int value: 'two'"]),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(words)
        found = capsys.readouterr().err
        assert all(message in found for message in messages), found


def test_without_torchrun_it_says_so(data, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *command_line(arguments(data))])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="RANK.* not set: start the ranks with torchrun"):
        pretrain_gpt.main()


def torchrun(given: GPTArguments, log: Path, ranks: int = 2) -> subprocess.Popen:
    """Ranks in processes of their own, as a terminal would start them."""
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()
    script = ["-m", "tutorial_lib.training.pretrain_gpt"]
    return subprocess.Popen(
        [sys.executable, *launcher, *script, *command_line(given)], stdout=log.open("w"),
        stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip


def losses(log: Path) -> list[tuple[str, str]]:
    return re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.grid)]
)
def test_new_processes_go_on_after_a_signal(data, tmp_path, number):
    whole, folder = tmp_path / "whole.log", str(tmp_path / "parts")
    saved = dict(save=str(tmp_path / "whole"), save_interval=1000)
    given = arguments(data, **TP2, train_iters=60, eval_interval=20, **saved)
    assert torchrun(given, whole).wait(200) == 0, whole.read_text()
    parts = replace(given, save=None, save_xser=folder, load_xser=folder)
    process = torchrun(parts, tmp_path / "first.log")
    wait_for_losses(tmp_path / "first.log", 5)
    process.send_signal(number)
    assert process.wait(60) != 0
    text = (tmp_path / "first.log").read_text()
    first = losses(tmp_path / "first.log")
    said = f"{signal.Signals(number).name}: ending after iteration {len(first)}"
    assert 5 <= len(first) < 60 and said in text, text
    second = tmp_path / "second.log"
    assert torchrun(parts, second).wait(200) == 0, second.read_text()
    assert first + losses(second) == losses(whole)
    for folder in ("whole", "parts"):
        assert latest(tmp_path / folder).step == 60
        assert tools(["merge", str(tmp_path / folder), str(tmp_path / f"{folder}-merged")]) == 0
    merged = [load_file(tmp_path / f"{f}-merged/model.safetensors") for f in ("whole", "parts")]
    assert same(*merged)


def wait_for_losses(log: Path, count: int) -> None:
    wait_for(lambda: log.exists() and len(losses(log)) >= count, 120, f"losses in {log}", 0.02)


@pytest.mark.slow
def test_one_run_at_a_time_and_none_after_its_launcher(data, tmp_path):
    """A second run on the folder is refused. `kill -9` of torchrun ends its ranks too, and then
    the folder is free; TensorBoard shows each step once.
    """
    folder = str(tmp_path / "saved")
    saved = dict(save=folder, load=folder, save_interval=7, tensorboard_dir=str(tmp_path / "tb"))
    given = arguments(data, **TP2, num_workers=1, train_iters=1000, eval_iters=0, **saved)
    first = torchrun(given, tmp_path / "first.log")
    wait_for_losses(tmp_path / "first.log", 10)
    assert torchrun(given, tmp_path / "second.log").wait(120) != 0
    text = (tmp_path / "second.log").read_text()
    refused = rf"another run saves into {folder} \(process \d+ on .*\): wait until"
    assert re.search(refused, text) and not losses(tmp_path / "second.log"), text
    assert first.poll() is None

    ranks = psutil.Process(first.pid).children(recursive=True)
    assert len(ranks) >= 4  # with their loader workers
    first.kill()
    _, alive = psutil.wait_procs(ranks, timeout=8)
    assert not alive
    saved, done = latest(folder).step, len(losses(tmp_path / "first.log"))
    assert done - 8 <= saved <= done + 1

    last = replace(given, exit_interval=saved + 20)
    assert torchrun(last, tmp_path / "third.log").wait(120) == 0
    third = losses(tmp_path / "third.log")
    assert [int(step) for step, _ in third] == list(range(saved + 1, saved + 21))
    overlap = dict(losses(tmp_path / "first.log"))
    assert all(overlap.get(step, loss) == loss for step, loss in third)
    events = read_events(str(tmp_path / "tb"))
    steps = list(range(1, saved + 21))
    assert [event.step for event in events.Scalars("lm loss")] == steps
    by_samples = [event.step for event in events.Scalars("lm loss vs samples")]
    assert by_samples == [8 * step for step in steps]
