"""Checkpoints of what is unusual and allowed: settings that are tensors, state dicts instead of a
model, nothing but a user's content, folders with odd configurations.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.standin import Standin, attempt, edit, refused, same, state, zero
from tests.tiny_models import TINY
from tutorial_lib.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.optimizer.zero1 import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.storage import xser


def optimizer_of(model, lr):
    options = dict(lr=torch.tensor(lr), foreach=False)
    return NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, **options)


def save_tensor_rate(folder):
    model = Standin()
    optimizer = optimizer_of(model, 0.125)
    model.train_step(optimizer, 0)
    save_checkpoint(folder, "step_1", model, optimizer)


def load_elsewhere(folder, tag="step_1"):
    model = zero(Standin())
    optimizer = optimizer_of(model, 0.5)
    with torch.device("meta"):
        load_checkpoint(folder, tag, model, optimizer)
        save_checkpoint(folder, "again", model, optimizer)
    return optimizer.param_groups[0]["lr"]


def test_the_default_device_does_not_matter_nor_that_a_rate_is_a_tensor(ranks, tmp_path):
    folder = str(tmp_path)
    ranks(save_tensor_rate, folder, world_size=2, tp=2)
    assert ranks(load_elsewhere, folder, world_size=1) == [torch.tensor(0.125)]
    with torch.device("meta"):
        for tag, form in (("plain", "--no-xser"), ("xser", "--xser")):
            assert main(["reshard", f"{folder}/step_1", f"{folder}/{tag}", "--tp", "1", form]) == 0
    for tag in ("again", "plain", "xser"):
        assert ranks(load_elsewhere, folder, tag, world_size=1) == [torch.tensor(0.125)]


def save_state_dict(folder, keep_vars):
    save_checkpoint(folder, "step_1", Standin().state_dict(keep_vars=keep_vars))


def load_weights(folder, tag=None):
    model = zero(Standin())
    load_checkpoint(folder, tag, model)
    return same(state(model), state(Standin()))


def test_a_state_dict_does_not_say_how_it_is_cut(ranks, tmp_path, capsys):
    """So the shard of rank 0 is never taken for the whole."""
    folder = str(tmp_path / "run")
    ranks(save_state_dict, folder, False, world_size=4, tp=2)
    for tp in (1, 2):
        assert all(ranks(load_weights, folder, world_size=2, tp=tp))
    for command in (["merge", f"{tmp_path}/m"], ["reshard", f"{tmp_path}/r", "--tp", "1"]):
        assert main([command[0], folder, *command[1:]]) == 1
        assert "was saved from a dict" in capsys.readouterr().err
    assert main(["verify", folder]) == 0 and main(["inspect", folder]) == 0
    assert "layouts are not recorded" in capsys.readouterr().out


def test_a_state_dict_of_parameters_says_how_it_is_cut(ranks, tmp_path):
    ranks(save_state_dict, str(tmp_path / "run"), True, world_size=2, tp=2)
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "m.safetensors")]) == 0
    assert load_file(tmp_path / "m.safetensors")["embed"].shape == (10, 4)


def only_content(folder):
    save_checkpoint(folder, "step_1", user_content={"position": 5})
    return load_checkpoint(folder), attempt(load_checkpoint, folder, model=Standin())[1]


def test_nothing_but_content(ranks, tmp_path, capsys):
    for content, message in ranks(only_content, str(tmp_path / "run"), world_size=2, tp=2):
        assert content == {"position": 5} and "model/dp_rank_00" in message
    assert main(["verify", str(tmp_path / "run")]) == main(["inspect", str(tmp_path / "run")]) == 0
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "m.safetensors")]) == 1
    assert "does not hold a model" in capsys.readouterr().err


def async_error_then_another(folder):
    save_checkpoint(folder, "step_1", Standin(), async_save=True)
    save_checkpoint(folder, "step_2", Standin(), async_save=True)  # the first is complete now
    first = [item.tag for item in tags.complete(folder)]
    finalize_checkpoint()
    if parallel_state.get_tensor_model_parallel_rank() == 1:
        right, xser.save = xser.save, None
    save_checkpoint(folder, "step_3", Standin(), async_save=True)
    error = attempt(save_checkpoint, folder, "step_4", Standin(), async_save=True)
    if parallel_state.get_tensor_model_parallel_rank() == 1:
        xser.save = right
    save_checkpoint(folder, "step_4", Standin(), async_save=True)
    finalize_checkpoint()
    return first, error[0], [item.tag for item in tags.complete(folder)]


def test_after_an_error_of_an_asynchronous_save_the_next_one_works(ranks, tmp_path):
    for first, error, found in ranks(async_error_then_another, str(tmp_path), world_size=2, tp=2):
        assert first == ["step_1"] and issubclass(error, TypeError)
        assert found == ["step_1", "step_2", "step_4"]


def save_numbers_for_names(folder, async_save):
    save_checkpoint(folder, "step_1", {1: torch.ones(1)}, async_save=async_save)
    finalize_checkpoint()


@pytest.mark.parametrize("async_save", [False, True])
def test_what_verify_would_refuse_is_not_published(ranks, tmp_path, async_save):
    words = ["is not published", "not names"]
    refused(ranks, ValueError, words, save_numbers_for_names, str(tmp_path), async_save)
    assert os.listdir(tmp_path) == []


# --- Hugging Face folders -------------------------------------------------------------------------

KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def llama(tmp_path):
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    model = TINY["llama"].theirs(TINY["llama"].config(num_hidden_layers=1, vocab_size=50, **heads))
    model.save_pretrained(tmp_path / "hf", max_shard_size="20kB")
    return tmp_path / "hf"


def file_of_key(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][KEY]


def alter(folder, function):
    """Another key matrix in the file that has it, or none."""
    weights = load_file(file_of_key(folder))
    changed = {**weights, KEY: function(weights[KEY])}
    changed = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(changed, file_of_key(folder), metadata={"format": "pt"})


def pickled(folder):
    os.remove(folder / INDEX)
    torch.save({"w": os.DirEntry}, folder / "pytorch_model.bin")


CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def configured(**changes):
    return lambda folder: edit(folder / CONFIG, lambda config: config.update(changes))


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


FOLDERS = {
    "empty": (lambda f: os.remove(f / CONFIG), [CONFIG, "is missing"]),
    "foreign": (configured(model_type="resnet"), ["model_type 'resnet' is not one of"]),
    "pickle": (pickled, ["pytorch_model.bin is refused"]),
    "truncated": (
        lambda f: os.truncate(file_of_key(f), 1000), ["is truncated or not a safetensors file"]
    ),
    "lacks": (lambda f: alter(f, lambda t: None), ["are missing", KEY]),
    "no json": (written(CONFIG, b"{"), [CONFIG, "truncated or not JSON"]),
    "a list": (written(CONFIG, b"[1]"), [CONFIG, "JSON object"]),
    "bytes": (written(CONFIG, b"\xff\xfe"), [CONFIG, "not JSON"]),
    "type": (configured(model_type=["llama"]), [CONFIG]),
    "text": (configured(hidden_size="x"), [CONFIG, "'x'"]),
    "zero": (configured(num_attention_heads=0), [CONFIG]),
    "heads": (configured(num_key_value_heads=4), [KEY, "(16, 32)", "(32, 32)"]),
    "default": (
        lambda f: edit(f / CONFIG, lambda c: c.pop("num_attention_heads")),
        ["o_proj.weight", "(32, 256)"],
    ),
    "index": (written(INDEX, b"{"), [INDEX, "truncated or not JSON"]),
    "map": (written(INDEX, b"{}"), [INDEX, "weight_map"]),
    "rows": (lambda f: alter(f, lambda t: t[:1].contiguous()), [KEY, "(1, 32)", "(16, 32)"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_spoiled_folder(llama, tmp_path, capsys, kind):
    spoil, words = FOLDERS[kind]
    spoil(llama)
    assert main(["split", str(llama), str(tmp_path / "out" / "t"), "--tp", "2"]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert not list((tmp_path / "out").rglob("*"))


def test_unknown_options_and_degrees(llama, tmp_path, capsys):
    for rest in (["--tp", "2", "--option", "size=3"], ["--tp", "0"]):
        assert main(["split", str(llama), str(tmp_path / "out" / "t"), *rest]) == 1
    error = capsys.readouterr().err
    assert "does not have the option size; it takes" in error and "tp is 0" in error
