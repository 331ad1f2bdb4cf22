"""GPT's checkpoints, whose padding follows the degree."""

import pytest
import torch
from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as hf

from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.models.full_weights import full_tensors, load_full_tensors
from tutorial_lib.models.gpt import GPT2LMHeadModel
from tutorial_lib.storage import xser

from .standin import same, state

SIZES = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=32, bos_token_id=0, eos_token_id=0
)
STILL = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def config(**changes) -> GPT2Config:
    return GPT2Config(**{**SIZES, **STILL, **changes})


def shaken(changes):
    """A Hugging Face model none of whose parameters is constant."""
    torch.manual_seed(7)
    model = hf.GPT2LMHeadModel(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save(folder, changes, full):
    model = GPT2LMHeadModel(config(**changes))
    load_full_tensors(model, full)
    save_checkpoint(folder, "step_7", model)


def load(folder, tag, changes):
    model = GPT2LMHeadModel(config(**changes))
    load_checkpoint(folder, tag, model)
    return full_tensors(model)


@pytest.mark.parametrize(
    "tp, other, changes", [(1, 4, {}), (4, 2, {"tie_word_embeddings": False, "vocab_size": 384})]
)
def test_checkpoints_are_merged_split_and_cut_anew(ranks, tmp_path, tp, other, changes):
    """The padding follows the degree: 300 rows are 384 on one rank, 512 on two or four."""
    model, run = shaken(changes), tmp_path / "run"
    ranks(save, str(run), changes, model.state_dict(), world_size=tp, tp=tp)
    assert main(["merge", str(run), str(tmp_path / "merged")]) == 0
    merged, info = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(state(merged), state(model))
    again = str(tmp_path / "again" / "t")
    assert main(["split", str(tmp_path / "merged"), again, "--tp", str(tp)]) == 0
    for file in (tags.latest(run).path / "model").iterdir():
        assert same(xser.load(file), xser.load(f"{again}/model/{file.name}"))
    assert main(["reshard", f"{run}/step_7", f"{run}/other", "--tp", str(other)]) == 0
    for tag in ("step_7", "other"):
        for found in ranks(load, str(run), tag, changes, world_size=other, tp=other):
            assert all(
                torch.equal(value, model.get_parameter(name)) for name, value in found.items()
            )
