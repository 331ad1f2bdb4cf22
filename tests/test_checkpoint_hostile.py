"""Checkpoint folders of hostile content end in an error with the file's name, quickly and in little
memory; and `verify` finds sound only what loads.
"""

import os
import pickle
import resource
import time

import numpy as np
import pytest
import torch

from tests.standin import build, edit
from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.optimizer import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import checkpointing, parallel_state
from tutorial_lib.storage import digest_of
from tutorial_lib.storage.xser import save

MODEL, OPTIM = (f"{part}/dp_rank_00_tp_rank_00_pp_rank_00.pt" for part in ("model", "optim"))


@pytest.fixture
def world():
    parallel_state.initialize_fallback_parallel_state()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def folder(tmp_path, world):
    model, optimizer, scheduler = build()
    model.train_step(optimizer, 0)
    save_checkpoint(str(tmp_path), "step_1", model, optimizer, scheduler, {"a": 1})
    return tmp_path / "step_1"


def put(folder, name, value):
    """Another object in a file, with a digest that fits."""
    torch.save(value, folder / name)
    signed(folder, name)


def signed(folder, name):
    digest = digest_of(folder / name)._asdict()
    edit(folder / "done", lambda marker: marker["files"].update({name: digest}))


def metadata(folder, change):
    edit(folder / "metadata.json", change)
    signed(folder, "metadata.json")


def size(name, number):
    def change(folder):
        edit(folder / "done", lambda marker: marker["mesh"].update({name: number}))
        metadata(folder, lambda found: found["mesh"].update({name: number}))

    return change


def replaced(name, make):
    def change(folder):
        os.remove(folder / name)
        make(folder / name)

    return change


def link_to_device(path):
    os.symlink("/dev/zero", path)


def weights(change):
    def alter(folder):
        value = torch.load(folder / MODEL)
        put(folder, MODEL, change(value))

    return alter


def optimizer(change):
    def alter(folder):
        value = torch.load(folder / OPTIM)
        change(value)
        put(folder, OPTIM, value)

    return alter


def small(name, value):
    return lambda folder: put(folder, name, value)


def deep(depth: int = 100_000):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def deep_pickle(folder):
    data = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    with open(folder / "user_content.pt", "wb") as file:
        file.write(data)
    signed(folder, "user_content.pt")


def doubling():
    value = [0]
    for _ in range(200):
        value = [value, value]
    return value


def cycle():
    value = []
    value.append(value)
    return value


def huge_array(folder):
    array = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,))
    state = (1, array.shape, array.dtype, False, b"\0" * 8)

    class Array:
        def __reduce__(self):
            return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state

    torch.save({"a": Array()}, folder / "user_content.pt")
    signed(folder, "user_content.pt")


def without_number(folder):
    save(torch.load(folder / MODEL), folder / MODEL, xser=True)
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(content.replace(b"tid", b"dit"))
    signed(folder, MODEL)


def tied(groups):
    return lambda folder: metadata(folder, lambda found: found.update(tied=groups))


def layout(name, **entries):
    return lambda folder: metadata(folder, lambda found: found["model"][name].update(entries))


def partition(**entries):
    def change(found):
        whole = dict(dim=0, sizes=[10], parts=1, replicas=[1], pad=0)
        found["model"]["embed"]["partition"] = {**whole, **entries}

    return lambda folder: metadata(folder, change)


HOSTILE = {
    "done is a device": replaced("done", link_to_device),
    "done is a pipe": replaced("done", os.mkfifo),
    "begun is a device": replaced("checkpoint", link_to_device),
    "metadata is a device": replaced("metadata.json", link_to_device),
    "a shard is a device": replaced(MODEL, link_to_device),
    "a shard is a pipe": replaced(MODEL, os.mkfifo),
    **{f"{axis} {n}": size(axis, n) for axis in ("tp", "pp") for n in (10**9, 0, -3, "2", 2.0)},
    "a file outside": lambda folder: edit(
        folder / "done",
        lambda marker: marker["files"].update({"../x": {"size": 1, "xxh3_128": ""}}),
    ),
    "deep marker": lambda folder: (folder / "done").write_text("[" * 100_000),
    "deep metadata": lambda folder: (
        (folder / "metadata.json").write_text('{"a":' * 100_000),
        signed(folder, "metadata.json"),
    ),
    "half the metadata": lambda folder: (
        os.truncate(folder / "metadata.json", 300),
        signed(folder, "metadata.json"),
    ),
    "no ties": lambda folder: metadata(folder, lambda found: found.pop("tied")),
    "no optimizer": lambda folder: metadata(folder, lambda found: found.pop("optimizer")),
    "a configuration of 5": lambda folder: metadata(folder, lambda found: found.update(config=5)),
    "a dtype that is a module": layout("norm", dtype="nn"),
    "sizes of 10¹⁵": partition(sizes=[10**15]),
    "a full shape of 10¹⁵": layout("norm", shape=[10**15]),
    "a shape below zero": layout("norm", shape=[-4]),
    "a shape of words": layout("norm", shape=["4"]),
    "dim 7": partition(dim=7),
    "parts 10⁹": partition(parts=10**9),
    "no replicas": partition(replicas=[0]),
    "tied to nothing": tied([["embed", "nowhere"]]),
    "tied is a word": tied(["embed"]),
    "tied to a number": tied([[1, 2]]),
    "tied and empty": tied([[]]),
    "a list": weights(lambda value: list(value.values())),
    "numbers for names": weights(lambda value: dict(enumerate(value.values()))),
    "another tensor": weights(lambda value: {**value, "more": torch.ones(1)}),
    "another shape": weights(lambda value: {**value, "norm": torch.ones(5)}),
    "another dtype": weights(lambda value: {**value, "norm": torch.ones(4, dtype=torch.int64)}),
    "no tensor": weights(lambda value: {**value, "norm": 5}),
    "terabytes by stride 0": weights(
        lambda value: {**value, "norm": torch.ones(1).expand(1 << 40)}
    ),
    "a reference without its number": without_number,
    "an optimizer that is a list": small(OPTIM, [1]),
    "no groups": optimizer(lambda value: value.pop("param_groups")),
    "no state": optimizer(lambda value: value.pop("state")),
    "state of words": optimizer(lambda value: value.update(state={0: "x"})),
    "a moment that is too short": optimizer(
        lambda value: value["state"][0].update(exp_avg=torch.ones(1, 1))
    ),
    "deep content": deep_pickle,
    "content in itself": small("user_content.pt", cycle()),
    "an array of terabytes": huge_array,
    "an array of objects": small("user_content.pt", np.zeros(2, dtype=[("x", "O")])),
    "a scheduler that is a list": small("scheduler.pt", [1]),
    "no random states": small("random_state.pt", {}),
    "random states of words": small("random_state.pt", {"ranks": ["x"]}),
    "code": lambda folder: (
        (folder / "user_content.pt").write_bytes(pickle.dumps(os.system)),
        signed(folder, "user_content.pt"),
    ),
}  # fmt: skip


def limited(function, *args):
    """What it returns or raises; within 5 s and 1 GB."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = function(*args)
    except (RuntimeError, OSError, ValueError) as error:
        assert type(error) in (RuntimeError, FileNotFoundError, ValueError), repr(error)
        result = str(error)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    return result


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_named_error(folder, tmp_path, kind, capsys):
    HOSTILE[kind](folder)
    assert limited(main, ["verify", str(folder)]) == 1
    assert str(tmp_path) in "".join(capsys.readouterr())
    for command in (
        ["inspect"],
        ["merge", f"{tmp_path}/m"],
        ["reshard", f"{tmp_path}/r/t", "--tp", "1"],
    ):
        limited(main, [command[0], str(folder), *command[1:]])
    message = limited(load_checkpoint, str(tmp_path), "step_1", *build())
    assert message == {"a": 1} or "step_1" in message


def test_content_that_refers_to_itself_often_is_read_once(folder, tmp_path, capsys):
    put(folder, "user_content.pt", doubling())
    assert limited(main, ["verify", str(folder)]) == 0
    limited(load_checkpoint, str(tmp_path), "step_1", *build())


def test_the_sound_one_loads(folder, tmp_path):
    assert main(["verify", str(folder)]) == 0
    assert load_checkpoint(str(tmp_path), None, *build()) == {"a": 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["model", "low level"])
def test_weights_that_are_not_finite_replace_nothing(folder, tmp_path, bad, where):
    model, _, _ = build()
    checkpointing.save({"model": model.state_dict()}, f"{tmp_path}/low")
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        model.norm[0] = bad
    with pytest.raises(ValueError, match="is not saved"):
        if where == "low level":
            checkpointing.save({"model": model.state_dict()}, f"{tmp_path}/low")
        save_checkpoint(str(tmp_path), "step_2", model, optimizer, num_kept_ckpts=1)
    assert tags.latest(tmp_path).tag == "step_1" and not (tmp_path / "step_2").exists()
    assert checkpointing.load(f"{tmp_path}/low")["model"]["norm"].isfinite().all()
