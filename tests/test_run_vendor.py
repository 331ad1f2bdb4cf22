"""The tutorials' own scripts and code blocks, unedited.

Nothing of them is in the repository. `TUTORIAL_VENDOR` names a folder with checkouts of the
vendor's three repositories and, beside them, `transformers-4.26.0` and so on: the versions that the
scripts name (see notebooks/README.md). `TUTORIAL_SEEDS` names one with the tutorials' texts.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pyarrow
import pytest
import transformers

from tutorial_lib.data.indexed_dataset_builder import IndexedDatasetBuilder

VENDOR, SEEDS = (os.environ.get(name) for name in ("TUTORIAL_VENDOR", "TUTORIAL_SEEDS"))
NXD = "neuronx-distributed/examples/training"
NEOX = f"{NXD}/tp_dp_gpt_neox_hf_pretrain"
OLD = "aws-neuron-samples/torch-neuronx/training"
OLD_NEOX = f"{OLD}/tp_dp_gpt_neox_hf_pretrain"
MEGATRON = "aws-neuron-reference-for-megatron-lm"
V, S, STEPS = 64, 32, 8


class Script(NamedTuple):
    """A published script: where it is, its version of transformers, what it imports."""

    path: str
    transformers: str | None
    beside: tuple[str, ...]
    arguments: str
    resume: str | None = "--resume_ckpt"


LOOP = (
    "--data_dir {data}/blocks --output_dir out --batch_size {batch} --max_steps 40 --lr 0.01 "
    "--warmup_steps 1 --grad_accum_usteps 1 --tensor_parallel_size {tp} --steps_this_run {steps} "
)
LLAMA = LOOP + (
    "--model_path {data}/llama --seq_len 32 --use_mix_precision --use_zero_1 "
    "--sequence_parallel_enabled --selective_checkpoint_enabled "
)
LLAMA_SAVES = LLAMA + f"--checkpoint_dir saved --checkpoint_freq {STEPS} "
RESUME = f"--loading_step {STEPS}"
GPT = (
    "--tensor-model-parallel-size {tp} --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--micro-batch-size {batch} --global-batch-size 4 --seq-length 32 "
    "--max-position-embeddings 32 --train-iters {steps} --lr-decay-iters 40 --lr 0.01 "
    "--data-path {data}/gpt --vocab-file {data}/vocab.json --merge-file {data}/merges.txt "
    "--data-impl mmap --split 100,0,0 --distributed-backend xla --lr-decay-style cosine "
    "--min-lr 1e-5 --weight-decay 1e-2 --clip-grad 1 --lr-warmup-fraction .01 "
    "--log-interval 1 --tensorboard-log-interval 1 --eval-interval 40 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-async-tensor-model-parallel-allreduce "
    "--no-contiguous-buffers-in-local-ddp --save-xser saved --save-interval 8 "
    "--use-cpu-initialization --tensorboard-dir out "
)
BERT_LARGE = f"{NXD}/tp_dp_bert_hf_pretrain/tp_dp_bert_large_hf_pretrain_hdf5.py"
NEOX_7B = "tp_dp_gpt_neox_6.9b_hf_pretrain/tp_dp_gpt_neox_6.9b_hf_pretrain.py"
NEOX_20B = "tp_dp_gpt_neox_20b_hf_pretrain"
LLAMA_ZERO = f"{NXD}/llama/tp_zero1_llama_hf_pretrain/tp_zero1_llama_hf_pretrain.py"
LLAMA_7B = f"{OLD}/tp_zero1_llama2_7b_hf_pretrain/tp_zero1_llama2_7b_hf_pretrain.py"
COMMON, OLD_COMMON = (f"{NEOX}/common",), (f"{OLD_NEOX}/common",)
SCRIPTS = {
    "bert": Script(BERT_LARGE, "4.26.0", (), LOOP.replace("blocks", "hdf5")),
    "neox_6.9b": Script(f"{NEOX}/{NEOX_7B}", "4.26.0", (*COMMON, f"{NEOX}/{NEOX_20B}"), LOOP),
    "neox_20b": Script(f"{NEOX}/{NEOX_20B}/{NEOX_20B}.py", "4.26.0", COMMON, LOOP),
    "llama": Script(LLAMA_ZERO, "4.48.0", (f"{NXD}/llama",), LLAMA_SAVES, RESUME),
    "megatron": Script(f"{MEGATRON}/pretrain_gpt.py", None, (), GPT, "--load-xser saved"),
    # It reads `state_dict["optimizer"]`, which it does not save.
    "llama_of_the_tutorial": Script(LLAMA_7B, "4.31.0", (), LLAMA, None),
    "neox_6.9b_of_the_tutorial": Script(f"{OLD_NEOX}/{NEOX_7B}", "4.26.0", OLD_COMMON, LOOP),
    "neox_20b_of_the_tutorial": Script(
        f"{OLD_NEOX}/{NEOX_20B}/{NEOX_20B}.py", "4.26.0", OLD_COMMON, LOOP
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tiny data of all kinds, and models under the names that the scripts ask the hub for."""
    folder = tmp_path_factory.mktemp("data")
    rows = (np.arange(2)[:, None] * 7 + np.arange(S)[None] * (np.arange(2)[:, None] + 1)) % V
    rows = np.tile(rows, (64, 1))  # each data-parallel rank of two sees its own walk
    blocks = {"input_ids": rows, "attention_mask": np.ones_like(rows), "labels": rows}
    table = pyarrow.table({name: list(values) for name, values in blocks.items()})
    (folder / "blocks").mkdir()
    with pyarrow.OSFile(str(folder / "blocks/data.arrow"), "wb") as file:
        with pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write(table)
    # As `datasets` saves it, without what only some of its versions read.
    files = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0", "_split": None}
    state = files | {"_format_type": None, "_format_kwargs": {}, "_format_columns": None}
    state |= {"_output_all_columns": False}
    (folder / "blocks/state.json").write_text(json.dumps(state))
    (folder / "blocks/dataset_info.json").write_text("{}")
    (folder / "hdf5").mkdir()
    for shard in range(3):
        with h5py.File(folder / f"hdf5/x_training_{shard}.hdf5", "w") as file:
            positions = np.tile(np.arange(1, 21), (len(rows), 1))
            file["input_ids"], file["input_mask"] = rows, np.ones_like(rows)
            file["segment_ids"], file["masked_lm_positions"] = np.zeros_like(rows), positions
            file["masked_lm_ids"] = np.take_along_axis(rows, positions, 1)
            file["next_sentence_labels"] = np.arange(len(rows)) % 2
    with IndexedDatasetBuilder(folder / "gpt", np.uint16, 257) as builder:
        for row in rows:
            builder.add_documents(np.append(row, 256), [len(row) + 1])
    names = {chr(256 + i): i for i in range(256)} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(names))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(vocab_size=V, max_position_embeddings=S)
    config = transformers.BertConfig(**sizes)
    transformers.BertForPreTraining(config).save_pretrained(folder / "bert-large-uncased")
    neox = dict(sizes, model_type="gpt_neox", rotary_pct=0.25, use_parallel_residual=True)
    llama = dict(sizes, model_type="llama", num_key_value_heads=4, torch_dtype="float32")
    configs = {"EleutherAI/gpt-neox-20b": neox, "EleutherAI/pythia-6.9b": neox, "llama": llama}
    for name, values in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder


def run(script: Script, data, folder, backend="cpu", ranks=4, tp=2, batch=1, steps=STEPS, more=""):
    """Runs a script and returns the losses that it logged, in order."""
    needed = [Path(VENDOR or "", name) for name in (script.path, *script.beside)]
    if script.transformers:
        needed.append(Path(VENDOR or "", f"transformers-{script.transformers}"))
    for path in needed:
        if not path.exists():
            pytest.skip(f"TUTORIAL_VENDOR is {VENDOR}, where {path} is missing")
    for name in ("EleutherAI", "bert-large-uncased"):
        if not (folder / name).exists():
            (folder / name).symlink_to(data / name)
    arguments = script.arguments.format(data=data, batch=batch, tp=tp, steps=steps) + more
    runner = [sys.executable, "-m", "tutorial_lib.lab.run_vendor", f"--backend={backend}"]
    root = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join([root, *map(str, reversed(needed[1:]))])
    done = subprocess.run(
        [*runner, f"--ranks={ranks}", needed[0], *arguments.split()], cwd=folder,
        env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert "bitwise equal on the ranks that share them" in done.stdout
    found = re.findall(r"step_loss : (\S+)|lm loss: (\S+)", done.stdout)
    return [float(one or other) for one, other in found]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "xla"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_script_trains_saves_and_resumes(name, backend, data, tmp_path):
    losses = run(SCRIPTS[name], data, tmp_path, backend)
    assert len(losses) >= STEPS and losses[-1] < 0.9 * losses[0]  # Megatron's loop makes one more
    if more := SCRIPTS[name].resume:
        resumed = run(SCRIPTS[name], data, tmp_path, backend, steps=STEPS + 2, more=more)
        assert len(resumed) >= 2 and resumed[0] < losses[STEPS - 2]


def final_loss(folder: Path) -> float:
    metrics = json.loads((folder / "results.json").read_text())["results"]["metrics"]
    return next(m["MeasuredValue"] for m in metrics if m["MetricName"] == "Final loss")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_llamas_loss_is_that_of_one_rank(backend, data, tmp_path):
    """2 × 2 ranks with a sample each, two data-parallel ones, and one rank with both samples."""
    found = []
    for ranks, tp, batch in (4, 2, 1), (2, 1, 1), (1, 1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run(SCRIPTS["llama"], data, folder, backend, ranks, tp, batch)
        found.append(final_loss(folder))
    print("final losses", found)
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


# What the guide's blocks leave to the reader.
AROUND = """
import neuronx_distributed, torch, torch.distributed as dist, torch_xla.core.xla_model as xm
import transformers.models.bert.modeling_bert
from neuronx_distributed import parallel_layers
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("xla")
config = transformers.BertConfig(
    hidden_size=32, num_attention_heads=4, attn_implementation="eager", hidden_dropout_prob=0.0
)
input_file, max_pred_length, mini_batch_size, worker_init = 64, 32, 2, None
device, max_norm, epoch, PATH = xm.xla_device(), 1.0, 0, "saved"


def pretraining_dataset(input_file, max_pred_length):
    rows = (torch.arange(input_file)[:, None] + torch.arange(max_pred_length + 1)) % 8
    return [((row[:-1],), row[1:]) for row in rows]


class YourNewlyBuiltParallelModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 32), torch.nn.Linear(32, 8)
        self.attention = ParallelSelfAttention(config)
        self.output = ParallelSelfOutput(config)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(self.output(self.attention(hidden)[0], hidden))


def loss_fn(output, labels):
    global optimizer, optimzer, scheduler
    if "optimizer" not in globals():
        optimizer = optimzer = torch.optim.Adam(model.parameters(), 0.01)  # it is spelled both ways
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
    if dist.get_rank() == 0:
        print("step_loss :", loss.item())
    return loss


torch.manual_seed(0)
"""


def test_the_guides_code_blocks_run(data, tmp_path):
    if not SEEDS:
        pytest.skip("TUTORIAL_SEEDS does not name a folder with the tutorials' texts")
    blocks = []
    for text in sorted(Path(SEEDS).glob("*.txt")):
        found = re.findall(r"^\.\. code:: ipython3\n\n((?:   .*\n|\n)+)", text.read_text(), re.M)
        blocks += map(textwrap.dedent, found)
    # The others are commands for a shell. `...` is where the reader's own entries go.
    python = [b for b in blocks if re.match(r"(from|class|def|neuronx_distributed)\b", b)]
    assert len(python) == 5
    script = tmp_path / "guide.py"
    script.write_text(AROUND + "\n".join(python).replace("...", ""))
    losses = run(Script(script, None, (), ""), data, tmp_path)
    assert losses[-1] < 0.5 * losses[0]
    assert len(list((tmp_path / "saved").glob("tp_rank_0*_pp_rank_00/checkpoint.pt"))) == 2
