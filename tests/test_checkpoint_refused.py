"""What a checkpoint is refused for: a clear error with the file's name on every rank, quickly and
in little memory; and `verify` finds sound only what loads. More in `test_checkpoint` (spoiled
shards, foreign models, full disks), `test_checkpoint_vendor` and `test_checkpoint_tools`.
"""

import enum
import errno
import os
import pickle
import resource
import threading
import time

import numpy as np
import pytest
import torch

from tests.standin import WITNESS, Bomb, Standin, attempt, build, edit, largest_file, refused
from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.optimizer import NeuronZero1Optimizer
from tutorial_lib.parallel_layers import checkpointing, parallel_state
from tutorial_lib.storage import digest_of, xser

SHARD = "dp_rank_00_tp_rank_01_pp_rank_00.pt"


def save(folder, **options):
    model, optimizer, scheduler = build()
    model.train_step(optimizer, 0)
    save_checkpoint(folder, "step_1", model, optimizer, scheduler, {"position": 1}, **options)


def load(folder, tag=None):
    load_checkpoint(folder, tag, *build())


def as_vendor(folder):
    """Takes away what would tell that a file is not the one that was saved."""
    (folder / "done").write_text("1")
    (folder / "metadata.json").unlink()


BOMBS = [(f"model/{SHARD}", False), (f"model/{SHARD}.tensors/tensor_1.pt", True)]
BOMBS += [(f"optim/{SHARD}", True), ("scheduler.pt", False), ("user_content.pt", True)]


@pytest.mark.parametrize(("name", "raw"), [*BOMBS, ("random_state.pt", False)])
def test_a_pickle_bomb(ranks, tmp_path, capsys, name, raw):
    ranks(save, str(tmp_path), use_xser="tensors" in name, world_size=4, tp=2)
    folder = tmp_path / "step_1"
    if raw:
        (folder / name).write_bytes(pickle.dumps({"a": Bomb()}, protocol=2))
    else:
        torch.save({"a": Bomb()}, folder / name)
    arguments = load, str(tmp_path)
    # It is not the file that was saved.
    refused(ranks, ValueError, [str(folder / name)], *arguments, world_size=4)
    as_vendor(folder)
    if name != "random_state.pt":  # of another library's checkpoint it is not known of which mesh
        refused(ranks, ValueError, [str(folder / name), "refused"], *arguments, world_size=4)
    assert main(["verify", str(folder)]) == 1
    assert f"{folder / name}" in capsys.readouterr().out
    assert not os.path.exists(WITNESS)


def test_a_small_file_that_is_missing(ranks, tmp_path):
    ranks(save, str(tmp_path), world_size=2, tp=2)
    for name in ("user_content.pt", "random_state.pt", "scheduler.pt"):  # the last is read first
        os.remove(tmp_path / "step_1" / name)
        words = [str(tmp_path / "step_1" / name), "is missing"]
        refused(ranks, FileNotFoundError, words, load, str(tmp_path))


def load_dict(folder, what):
    load_checkpoint(folder, **{"model": Standin(), what: {}})


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_wrong_degree(ranks, tmp_path, what):
    ranks(save, str(tmp_path), world_size=2, tp=2)
    words = ["tensor-parallel size 2", "this run has 4", f"give the {what}", f"{tmp_path}/step_1"]
    refused(ranks, ValueError, words, load_dict, str(tmp_path), what, world_size=4, tp=4)


def test_a_folder_that_nobody_may_write(ranks):
    refused(ranks, OSError, ["/proc/checkpoints"], save, "/proc/checkpoints")


# --- the tools, and folders as people have them ---------------------------------------------------


def save_large(folder):
    model = Standin(vocabulary=20_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train_step(optimizer, 1)
    save_checkpoint(folder, "step_1", model, optimizer)


COMMANDS = {
    "merge": ["merge", "x.safetensors"],
    "reshard": ["reshard", "x", "--tp", "1"],
    "reshard-xser": ["reshard", "x", "--tp", "1", "--xser"],
}


def run_tool(command: str, folder) -> int:
    name, output, *options = COMMANDS[command]
    return main([name, f"{folder}/run", f"{folder}/out/{output}", *options])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tool_and_a_full_disk(ranks, tmp_path, capsys, command):
    ranks(save_large, f"{tmp_path}/run", world_size=2, tp=2)
    for size in (10, 20_000, 161_000):  # a shard of `embed` has 160,000
        with largest_file(size):
            assert run_tool(command, tmp_path) == 1
        error = capsys.readouterr().err
        assert "File too large" in error and f"{tmp_path}/out/x" in error
        assert os.listdir(tmp_path / "out") == []
    assert run_tool(command, tmp_path) == 0


def fail_to_flush(_):
    raise OSError(errno.EIO, "Input/output error")


def fail_to_mark(path, text):
    if path.name == tags.DONE:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    path.write_text(text)


@pytest.mark.parametrize(
    "command, module, name, fail, said",
    [(command, os, "fsync", fail_to_flush, "output error: '{}/out/x") for command in COMMANDS]
    + [("reshard", tags, "write_text", fail_to_mark, "{}/out/x.incomplete/done")],
)
def test_a_disk_that_fails_in_the_end(
    ranks, tmp_path, capsys, monkeypatch, command, module, name, fail, said
):
    ranks(save_large, f"{tmp_path}/run", world_size=2, tp=2)
    monkeypatch.setattr(module, name, fail)
    assert run_tool(command, tmp_path) == 1
    assert said.format(tmp_path) in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("tag", ["ü 1", "-x", "step_1.part", "%s{}", 7])
def test_unusual_names(ranks, tmp_path, capsys, tag):
    folder = tmp_path / "a b" / "größe"
    ranks(save_as, str(folder), tag, world_size=2, tp=2)
    ranks(load, str(folder), tag, world_size=2, tp=2)
    assert main(["verify", f"{folder}/{tag}"]) == 0
    assert main(["reshard", f"{folder}/{tag}", f"{folder}/{tag}!", "--tp", "1"]) == 0
    assert main(["inspect", f"{folder}/{tag}!"]) == 0
    os.rename(folder / str(tag), folder / f"{tag}.incomplete")
    with pytest.raises(FileNotFoundError, match="is incomplete"):
        tags.find(folder, tag)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tags.find(folder, "v1")


def save_as(folder, tag):
    save_checkpoint(folder, tag, *build())


def test_a_link_is_no_second_checkpoint(ranks, tmp_path, capsys, monkeypatch):
    ranks(save, f"{tmp_path}/disk/run", world_size=2, tp=2)
    folder = tmp_path / "run"
    os.symlink(tmp_path / "disk" / "run", folder)
    os.symlink("step_1", folder / "latest")
    os.symlink("step_9", folder / "dangling")
    found = tags.complete(folder)
    assert [item.tag for item in found] == ["step_1"] and tags.incomplete(folder) == []
    assert tags.find(folder, "latest").key == tags.latest(folder).key == found[0].key
    ranks(load, str(folder), world_size=2, tp=2)
    ranks(load, str(folder), "latest", world_size=2, tp=2)
    assert main(["verify", f"{folder}/latest"]) == 0
    monkeypatch.chdir(folder / "latest")
    capsys.readouterr()
    assert main(["inspect", "."]) == 0
    assert capsys.readouterr().out.startswith(f"checkpoint  {tmp_path}/disk/run/step_1\n")
    # Rotation and replacement remove links, never what they lead to.
    ranks(save_as, str(folder), "latest", world_size=2, tp=2)
    assert not (folder / "latest").is_symlink()
    assert {item.tag for item in tags.complete(folder)} == {"step_1", "latest"}
    os.rename(folder / "step_1", tmp_path / "step_1")
    os.symlink(tmp_path / "step_1", folder / "step_1")
    tags.rotate(folder, 1, "latest")
    assert sorted(os.listdir(folder)) == ["dangling", "latest"]
    assert tags.find(tmp_path, "step_1").files


def test_a_checkpoint_that_is_replaced_is_there_all_the_time(tmp_path):
    """Somebody else lists the folder meanwhile."""

    def save():
        tags.publish(tags.begin(tmp_path, "step_1"), 1, {}, {"tp": 1, "pp": 1})

    def watch():
        while not over.is_set():
            seen.append([item.tag for item in tags.complete(tmp_path)])

    save()
    over, seen = threading.Event(), []
    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(50):
        save()
        time.sleep(0.002)  # a save is no faster
    over.set()
    thread.join()
    assert len(seen) > 50 and all(tags == ["step_1"] for tags in seen)


BAD = {
    "num_workers": ["8", 2.5, 0, True],
    "num_kept_ckpts": ["2", 1.5, 0, True],
    "step": ["a", 1.5, -1, True],
    "model": [5],
    "optimizer": [5],
    "scheduler": [5],
    "tag": [None, b"a", ["a"], "a/b", "a\0b", "a\nb", "\ud800"],
    "checkpoint_dir_str": [None, 5, ""],
}


def save_badly(folder):
    """On one rank only, too: the others do not wait for it."""
    second, found = parallel_state.get_tensor_model_parallel_rank(), []
    for name, values in BAD.items():
        for value in values:
            for bad in ({name: value}, {name: value} if second else {}):
                given = {"checkpoint_dir_str": folder, "tag": "t_1", "model": Standin(), **bad}
                found.append((name, value, *attempt(save_checkpoint, **given)))
    return found


def test_arguments_of_a_wrong_type(ranks, tmp_path):
    for found in ranks(save_badly, str(tmp_path), world_size=2, tp=2):
        for name, value, kind, message in found:
            assert kind is ValueError and repr(value) in message, (name, value, message)
    assert os.listdir(tmp_path) == []


class Color(enum.Enum):
    RED = 1


UNREADABLE = {
    "module": {"a": os},
    "key": {"a": {Color.RED: 1}},
    "keys": {"a": {(1, Color.RED): 1}},
    "date": {"a": np.datetime64("2020-01-01")},
    "record": {"a": np.zeros(2, dtype=[("x", "i4")])},
    "long": {"a": np.longdouble(3)},
    "sparse": {"a": torch.eye(3).to_sparse()},
    "meta": {"a": torch.empty(3, device="meta")},
}


def save_contents(folder):
    return [
        attempt(save_checkpoint, folder, "t_1", Standin(), user_content=content)
        for content in UNREADABLE.values()
    ]


def test_what_could_not_be_read_again_is_not_saved(ranks, tmp_path):
    for found in ranks(save_contents, str(tmp_path), world_size=2, tp=2):
        for error, message in found:
            assert error is ValueError and "user_content" in message, message
    assert os.listdir(tmp_path) == []


def test_a_shard_that_another_library_lost(ranks, tmp_path, capsys):
    ranks(save, str(tmp_path), world_size=2, tp=2)
    as_vendor(tmp_path / "step_1")
    os.remove(tmp_path / "step_1" / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for command in ("verify", "inspect"):
        main([command, str(tmp_path / "step_1")])
        said = "".join(capsys.readouterr())
        assert "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt" in said and "missing" in said


def save_milestones(folder):
    model, optimizer, _ = build(zero1=True)
    model.train_step(optimizer, 0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    save_checkpoint(folder, "step_1", model, optimizer, scheduler)


def load_others(folder):
    """An optimizer with other groups; a scheduler of another kind."""
    model, _, scheduler = build()
    groups = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    return (
        attempt(load_checkpoint, folder, None, model, groups),
        attempt(load_checkpoint, folder, None, model, None, scheduler),
    )


def test_another_optimizer_or_scheduler(ranks, tmp_path):
    ranks(save_milestones, str(tmp_path), world_size=2, tp=2)
    for found in ranks(load_others, str(tmp_path), world_size=2, tp=2):
        for name, (kind, message) in zip(("optim", "scheduler.pt"), found, strict=True):
            words = f"{tmp_path}/step_1/{name} is of another"
            assert kind is ValueError and words in message, message


@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_a_tag_that_is_something_else(ranks, tmp_path, kind):
    """Seen before anything is written."""
    tag = tmp_path / "run" / "step_1"
    tag.parent.mkdir()
    if kind == "link":
        tag.symlink_to("step_0")
    elif kind == "file":
        tag.write_text("mine")
    else:
        (tag / "mine").mkdir(parents=True)
    refused(ranks, ValueError, [str(tag), "not a checkpoint"], save, str(tmp_path / "run"))
    assert os.listdir(tmp_path / "run") == ["step_1"]
    assert tag.is_symlink() or tag.is_file() or os.listdir(tag) == ["mine"]


# --- hostile content ----------------------------------------------------------------------------

CONTENT = "user_content.pt"
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


def signed(folder, name):
    """Makes the digest of a file fit what it holds now."""
    digest = digest_of(folder / name)._asdict()
    edit(folder / "done", lambda marker: marker["files"].update({name: digest}))


def rewritten(name, write):
    """Another content in a file, with a digest that fits."""

    def change(folder):
        write(folder / name)
        signed(folder, name)

    return change


def metadata(change):
    return rewritten("metadata.json", lambda path: edit(path, change))


def saved(name, value):
    return rewritten(name, lambda path: torch.save(value, path))


def weights(change):
    return rewritten(MODEL, lambda path: torch.save(change(torch.load(path)), path))


def optimizer(change):
    def write(path):
        change(value := torch.load(path))
        torch.save(value, path)

    return rewritten(OPTIM, write)


def size(name, number):
    def change(folder):
        edit(folder / "done", lambda marker: marker["mesh"].update({name: number}))
        metadata(lambda found: found["mesh"].update({name: number}))(folder)

    return change


def replaced(name, make):
    def change(folder):
        os.remove(folder / name)
        make(folder / name)

    return change


def link_to_device(path):
    os.symlink("/dev/zero", path)


def doubling():
    value = [0]
    for _ in range(200):
        value = [value, value]
    return value


def cycle():
    value = []
    value.append(value)
    return value


class HugeArray:
    def __reduce__(self):
        state = (1, (1 << 40,), np.dtype(float), False, b"\0" * 8)
        return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state


def without_number(path):
    xser.save(torch.load(path), path, xser=True)
    path.write_bytes(path.read_bytes().replace(b"tid", b"dit"))


def tied(groups):
    return metadata(lambda found: found.update(tied=groups))


def layout(name, **entries):
    return metadata(lambda found: found["model"][name].update(entries))


def partition(**entries):
    whole = dict(dim=0, sizes=[10], parts=1, replicas=[1], pad=0) | entries
    return layout("embed", partition=whole)


DEEP = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."  # a pickle of lists in lists


HOSTILE = {
    **{
        f"{name} is no file: {make.__name__}": replaced(name, make)
        for name in ("done", "checkpoint", "metadata.json", MODEL)
        for make in (link_to_device, os.mkfifo)
    },
    **{f"{axis} {n}": size(axis, n) for axis in ("tp", "pp") for n in (10**9, 0, -3, "2", 2.0)},
    "a file outside": lambda folder: edit(
        folder / "done",
        lambda marker: marker["files"].update({"../x": {"size": 1, "xxh3_128": ""}}),
    ),
    "deep marker": lambda folder: (folder / "done").write_text("[" * 100_000),
    "deep metadata": rewritten("metadata.json", lambda path: path.write_text('{"a":' * 100_000)),
    "half the metadata": rewritten("metadata.json", lambda path: os.truncate(path, 300)),
    "no ties": metadata(lambda found: found.pop("tied")),
    "no optimizer": metadata(lambda found: found.pop("optimizer")),
    "a configuration of 5": metadata(lambda found: found.update(config=5)),
    "a dtype that is a module": layout("norm", dtype="nn"),
    **{f"a shape of {size}": layout("norm", shape=[size]) for size in (10**15, -4, "4")},
    "sizes of 10¹⁵": partition(sizes=[10**15]),
    "dim 7": partition(dim=7),
    "parts 10⁹": partition(parts=10**9),
    "no replicas": partition(replicas=[0]),
    **{f"tied: {one}": tied([one]) for one in (["embed", "nowhere"], "embed", [1, 2], [])},
    "a list": weights(lambda value: list(value.values())),
    "numbers for names": weights(lambda value: dict(enumerate(value.values()))),
    "another tensor": weights(lambda value: {**value, "more": torch.ones(1)}),
    "another shape": weights(lambda value: {**value, "norm": torch.ones(5)}),
    "another dtype": weights(lambda value: {**value, "norm": torch.ones(4, dtype=torch.int64)}),
    "no tensor": weights(lambda value: {**value, "norm": 5}),
    "terabytes by stride 0": weights(
        lambda value: {**value, "norm": torch.ones(1).expand(1 << 40)}
    ),
    "a reference without its number": rewritten(MODEL, without_number),
    "an optimizer that is a list": saved(OPTIM, [1]),
    "no groups": optimizer(lambda value: value.pop("param_groups")),
    "no state": optimizer(lambda value: value.pop("state")),
    "state of words": optimizer(lambda value: value.update(state={0: "x"})),
    "a moment that is too short": optimizer(
        lambda value: value["state"][0].update(exp_avg=torch.ones(1, 1))
    ),
    "deep content": rewritten(CONTENT, lambda path: path.write_bytes(DEEP)),
    "content in itself": saved(CONTENT, cycle()),
    "an array of terabytes": saved(CONTENT, {"a": HugeArray()}),
    "an array of objects": saved(CONTENT, np.zeros(2, dtype=[("x", "O")])),
    "a scheduler that is a list": saved("scheduler.pt", [1]),
    "no random states": saved("random_state.pt", {}),
    "random states of words": saved("random_state.pt", {"ranks": ["x"]}),
    "code": rewritten(CONTENT, lambda path: path.write_bytes(pickle.dumps(os.system))),
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
    saved(CONTENT, doubling())(folder)
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
