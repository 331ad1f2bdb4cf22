"""To and from torch.distributed.checkpoint: bit for bit, opened by plain PyTorch, and only read."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tests.standin import WITNESS, Bomb, same
from tests.test_checkpoint_hugging_face import CASES, hugging_face
from tests.tiny_models import TINY
from tutorial_lib.checkpoint import save_checkpoint
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.checkpoint.convert import convert
from tutorial_lib.checkpoint.distributed import read_distributed, write_distributed
from tutorial_lib.models.full_weights import load_full_tensors

# What somebody writes who has never heard of this library.
PLAIN = """
import sys, torch, transformers
import torch.distributed.checkpoint as dcp
folder, kind, expected = sys.argv[1:]
with torch.device("meta"):
    config = transformers.AutoConfig.from_pretrained(folder)
    tied = set(getattr(transformers, kind)(config).all_tied_weights_keys)
right = torch.load(expected, weights_only=True)
model = getattr(transformers, kind)(config)
state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
dcp.load(state, checkpoint_id=folder, no_dist=True)
model.load_state_dict(state, strict=False)
assert all(torch.equal(tensor, right[name]) for name, tensor in model.state_dict().items())
assert not [name for name in sys.modules if name.startswith("tutorial_lib")]
"""


def save(case: str, folder: str, weights: dict) -> None:
    kind, changes = CASES[case]
    model = TINY[kind].build(TINY[kind].config(**changes))
    load_full_tensors(model, weights)
    save_checkpoint(folder, "step_1", model)


@pytest.mark.parametrize("case", ["bert", "neox", "llama shared", "gpt2", "llama tied"])
def test_there_and_back(ranks, tmp_path, case):
    original, kind = hugging_face(case), TINY[CASES[case][0]]
    ranks(save, case, str(tmp_path / "run"), original.state_dict(), world_size=2, tp=2)
    options = [word for name in kind.options for word in ("--option", f"{name}=true")]
    run, distributed, again = (str(tmp_path / name) for name in ("run", "dcp", "again"))
    assert main(["convert", run, distributed]) == 0
    torch.save(original.state_dict(), tmp_path / "right.pt")
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, distributed, kind.theirs.__name__]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, str(tmp_path / "right.pt")], check=True, env=environment)

    back = ["convert", distributed, f"{again}/step_1", "--tp", "2", "--pad", *options]
    assert main(back) == 0 and main(["verify", again]) == 0
    for rank in range(2):
        name = f"step_1/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        before, after = (torch.load(tmp_path / top / name) for top in ("run", "again"))
        assert same(before, after)


def test_an_enum_as_python_3_11_2_pickles_it(tmp_path, monkeypatch):
    def by_name(member, _):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    write_distributed({"weight": torch.ones(2)}, tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(read_distributed(tmp_path)["weight"], torch.ones(2))


HOSTILE = {
    "a call": pickle.dumps(Bomb()),
    # an attribute of a known module, which a rule for whole modules would let pass
    "a path": b"\x80\x04\x8c%ctorch.distributed.checkpoint.metadata\x8c\x09os.system\x93." % 37,
    "a look-up": b"cbuiltins\ngetattr\n(ctorch\nSize\nV__doc__\ntR.",
    "no pickle": b"garbage",
    "another object": pickle.dumps({"weight": 1}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_metadata_is_read_as_data_only(tmp_path, content):
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert read_distributed(tmp_path / "dcp")["weight"].tolist() == [1, 1]
    (tmp_path / "dcp" / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="/dcp is not a sound distributed checkpoint"):
        read_distributed(tmp_path / "dcp")
    assert not os.path.exists(WITNESS)


def test_a_size_is_given_for_a_distributed_checkpoint_and_only_then(tmp_path):
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match="tp None: .*/dcp is a folder of torch.distributed"):
        convert(tmp_path / "dcp", tmp_path / "new")
    with pytest.raises(ValueError, match="tp 2: .*/run is not a folder of torch.distributed"):
        convert(tmp_path / "run", tmp_path / "new", tp=2)
