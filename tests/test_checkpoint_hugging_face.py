"""To and from Hugging Face: a folder of several files is split over ranks, loaded, saved, merged,
and opens there again, bit for bit; and the ranks' logits are Hugging Face's.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.standin import same, state
from tests.tiny_models import LENGTH, TINY, VOCABULARY
from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.models.full_weights import load_full_tensors
from tutorial_lib.parallel_layers import parallel_state

CASES = {
    "bert": ("bert", {}),
    "neox": ("gpt_neox", {}),  # query, key and value of a head lie together
    "neox tied": ("gpt_neox", {"tie_word_embeddings": True, "attention_bias": False}),
    "llama": ("llama", {"num_key_value_heads": 8}),  # three fused matrices of one size
    "llama biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    # Four ranks share two key and value heads.
    "llama shared": ("llama", {"num_key_value_heads": 2, "head_dim": 6}),
    "gpt2": ("gpt2", {}),  # three fused matrices, their columns cut; some ranks hold padding only
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}
IDS = torch.arange(1, 1 + 2 * LENGTH).reshape(2, LENGTH)


def logits_of(output) -> torch.Tensor:
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


def hugging_face(case: str):
    """The whole model; no weight is a one or a zero, as those of norms and biases are at first."""
    kind, changes = CASES[case]
    torch.manual_seed(7)
    model = TINY[kind].theirs(TINY[kind].config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def load_and_save(case, source, target, weights):
    kind, changes = CASES[case]
    model = TINY[kind].build(TINY[kind].config(**changes))
    load_checkpoint(source, model=model)
    loaded = state(model)
    load_full_tensors(model, weights)
    assert same(state(model), loaded), "both ways to a rank's part agree"
    save_checkpoint(target, "step_1", model)
    with torch.no_grad():
        return logits_of(model.eval()(IDS)), parallel_state.get_tensor_model_parallel_rank()


@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 4))])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(ranks, tmp_path, case, tp):
    original = hugging_face(case)
    original.save_pretrained(tmp_path / "hf", max_shard_size="20kB")
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    kind = CASES[case][0]
    options = [word for name in TINY[kind].options for word in ("--option", f"{name}=true")]
    split = ["split", f"{tmp_path}/hf", f"{tmp_path}/run/step_0", "--tp", str(tp), "--pad"]
    assert main([*split, *options]) == 0 and main(["verify", str(tmp_path / "run")]) == 0

    arguments = (case, str(tmp_path / "run"), str(tmp_path / "again"), original.state_dict())
    parts = ranks(load_and_save, *arguments, world_size=tp, tp=tp)
    logits = torch.cat([part for part, _ in parts], dim=-1)[..., :VOCABULARY]
    with torch.no_grad():
        expected = logits_of(original(IDS))
    assert (logits - expected).abs().max() <= 1e-5

    assert main(["merge", str(tmp_path / "again"), str(tmp_path / "merged")]) == 0
    before = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(load_file(tmp_path / "merged" / "model.safetensors"), before)
    merged, info = type(original).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(logits_of(merged.eval()(IDS)), expected)


def old_norms(name: str) -> str:
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        name = name.replace(f"LayerNorm.{new}", f"LayerNorm.{old}")
    return name


NEOX = "gpt_neox.layers.0.attention."
PUBLISHED = {
    "bert": lambda t: {
        **{old_norms(name): tensor for name, tensor in t.items()},
        "bert.embeddings.position_ids": torch.arange(32)[None],
    },
    "neox": lambda t: {
        **t,
        f"{NEOX}masked_bias": torch.tensor(-1e9),
        f"{NEOX}bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        f"{NEOX}rotary_emb.inv_freq": torch.ones(1),
    },
    "llama": lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    "gpt2": lambda t: {
        **{name.removeprefix("transformer."): x for name, x in t.items()},
        "h.0.attn.bias": torch.ones(1, 1, 8, 8),
    },
    "llama tied": lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
}


@pytest.mark.filterwarnings("ignore:.*does not use")
@pytest.mark.parametrize("form", ["safetensors", "bin", "bins"])
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_files_open(tmp_path, case, form):
    """With the names that published checkpoints have, in each of the forms that they have."""
    original, folder = hugging_face(case), tmp_path / "hf"
    original.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    tensors = PUBLISHED[case](weights)
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        os.remove(folder / "model.safetensors")
        names = dict.fromkeys(tensors, "pytorch_model.bin")
        if form == "bins":
            names = {name: f"part_{number % 3}.bin" for number, name in enumerate(tensors)}
            index = folder / "pytorch_model.bin.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
        for file in set(names.values()):
            held = {name: x for name, x in tensors.items() if names[name] == file}
            torch.save(held, folder / file, _use_new_zipfile_serialization=form == "bins")
    output = str(tmp_path / "run" / "step_0")
    assert main(["split", str(folder), output, "--tp", "2", "--pad"]) == 0
    assert main(["verify", output]) == 0
    assert main(["merge", output, str(tmp_path / "merged")]) == 0
    assert same(load_file(tmp_path / "merged" / "model.safetensors"), weights)


def test_a_rank_with_padding_only(tmp_path):
    """Its shard of the vocabulary is a file like any other, with xser too."""
    hugging_face("gpt2").save_pretrained(tmp_path / "hf")
    one, four = f"{tmp_path}/one/step_0", f"{tmp_path}/four/step_0"
    assert main(["split", str(tmp_path / "hf"), one, "--tp", "1"]) == 0
    assert main(["reshard", one, four, "--tp", "4", "--xser"]) == 0
    assert main(["verify", four]) == 0 and main(["merge", four, f"{tmp_path}/merged"]) == 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert same(load_file(tmp_path / "merged" / "model.safetensors"), weights)


def test_a_checkpoint_without_metadata_is_opened_by_naming_the_model(tmp_path, capsys):
    """As of the vendor's library."""
    hugging_face("llama shared").save_pretrained(tmp_path / "hf")
    folder, output = tmp_path / "run" / "step_0", str(tmp_path / "merged")
    assert main(["split", str(tmp_path / "hf"), str(folder), "--tp", "2", "--pad"]) == 0
    os.remove(folder / "metadata.json")
    (folder / "done").write_text("1")
    assert main(["merge", str(folder), output]) == 1
    assert "--config" in capsys.readouterr().err
    config = ["--config", str(tmp_path / "hf")]
    assert main(["merge", str(folder), output, *config]) == 0
    assert main(["reshard", str(folder), f"{tmp_path}/r/step_0", "--tp", "4", *config]) == 0
    assert main(["merge", f"{tmp_path}/r", f"{tmp_path}/again"]) == 0
    for rank in range(2):  # as `parallel_layers.save` lays it out
        (tmp_path / f"low/tp_rank_{rank:02d}_pp_rank_00").mkdir(parents=True)
        model = torch.load(folder / f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
        low = tmp_path / f"low/tp_rank_{rank:02d}_pp_rank_00/checkpoint.pt"
        torch.save({"model": model, "epoch": 3}, low)
    assert main(["merge", f"{tmp_path}/low", f"{tmp_path}/of_low", *config]) == 0
    low.unlink()
    assert main(["merge", f"{tmp_path}/low", f"{tmp_path}/none", *config]) == 1
    assert str(low) in capsys.readouterr().err
    for name in ("merged", "again", "of_low"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert same(found, load_file(tmp_path / "hf" / "model.safetensors"))
