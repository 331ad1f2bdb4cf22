"""Several nodes: a mesh in a SLURM job, and every way in which it can end. Two nodes on one
machine.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests import slurm
from tests.notebook import Notebook, Traces, code_cells, printed
from tests.notebook_cases import QUICK
from tests.test_notebooks import execute, metrics
from tests.test_pretrain_gpt import arguments, data, losses, torchrun  # noqa: F401
from tutorial_lib.checkpoint.tags import latest
from tutorial_lib.lab.plan.batch_script import batch_script
from tutorial_lib.lab.plan.batch_script import main as batch_script_command
from tutorial_lib.training.gpt_arguments import command_line

SETUP = """
import sys
sys.path.insert(0, ".")
from tutorial_lib.lab.mesh import Mesh
"""
ON_NODES = (
    'mesh = Mesh(world_size=4, tp_size=2, timeout=20, launcher="slurm", nodes=2)\nmesh.start()'
)
# The run of tests/test_checkpoint_resume.py: ZeRO-1, accumulation, dropout, a schedule.
MODEL = "%%px\nimport sys\nsys.path.insert(0, '.')\nfrom tests.test_checkpoint_resume import *\n"
TRAIN = (
    MODEL
    + "run = Run('llama', True, 5, torch.float32)\nlosses = [loss for loss, *_ in run.train(0)]\n"
)
RESUME = MODEL + (
    "run = Run('llama', True, 99, torch.float32)\n"
    "content = load_checkpoint({folder!r}, None, *run.all)\n"
    "run.sampler.load_state_dict(content['data'])\n"
    "losses = [loss for loss, *_ in run.train(content['global_step'])]\n"
)


# ---- batch files ----


def test_a_batch_file_that_makes_no_sense_is_refused(capsys):
    with pytest.raises(ValueError, match="no command"):
        batch_script([], 1, 1)
    for number in (0, True, 2.5, "2"):
        with pytest.raises(ValueError, match=f"nodes is {number!r}, must be a positive integer"):
            batch_script(["train.py"], number, 1)
    for odd in (dict(name="a\nb"), dict(name=""), dict(options=["--exclusive\nreboot"])):
        with pytest.raises(ValueError, match="not one line"):
            batch_script(["train.py"], 1, 1, **odd)
    with pytest.raises(SystemExit):
        batch_script_command(["--nodes", "1", "--ranks-per-node", "-3", "--", "train.py"])
    assert "ranks_per_node is -3, must be a positive integer" in capsys.readouterr().err


def test_words_of_the_command_arrive_as_they_are(tmp_path):
    words = ["show.py", "a b", 'c"d', "it's $HOME", "*"]
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    for name in ("torchrun", "srun"):
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    job["SLURM_LAUNCH_NODE_IPADDR"] = "10.0.0.1"
    shown = subprocess.run(
        ["bash"], input=batch_script(words, 2, 3), capture_output=True, text=True, check=True,
        env=os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, cwd=tmp_path,
    )  # fmt: skip
    meeting = ["--nnodes=2", "--node-rank=1", "--nproc-per-node=3"]
    meeting += ["--master-addr=10.0.0.1", "--master-port=20007"]
    assert shown.stdout.splitlines() == meeting + words


# ---- on a cluster ----


@pytest.fixture(scope="module")
def one_cluster():
    if missing := slurm.missing():
        pytest.skip(f"SLURM is not installed: no {', '.join(missing)} (Debian: slurm-wlm)")
    with slurm.Cluster() as one:
        yield one


@pytest.fixture
def cluster(one_cluster):
    """The cluster with both nodes up, whatever the test before left."""
    one_cluster.mend()
    return one_cluster


@pytest.fixture(scope="module")
def one_notebook(one_cluster):
    with Notebook(one_cluster.environment) as notebook:
        notebook.run(SETUP)
        yield notebook


@pytest.fixture
def notebook(cluster, one_notebook):
    """A notebook with its mesh up on the nodes."""
    condition = "if globals().get('mesh') is None or mesh._remedy:\n"
    one_notebook.run(condition + textwrap.indent(ON_NODES, "    "))
    return one_notebook


def _assert_gone(cluster) -> None:
    slurm.wait_for(lambda: not cluster.jobs(), 10, "the end of all jobs")


@pytest.mark.slow
def test_two_nodes_train_as_one_machine_does_and_go_on_after_one_has_died(
    cluster, one_notebook, tmp_path
):
    one_notebook.run("mesh = Mesh(world_size=4, tp_size=2)\nmesh.start()")
    one_notebook.run(TRAIN)
    local = one_notebook.run("print(mesh.gather('losses'))")
    said = one_notebook.run(ON_NODES)
    assert said.startswith("4 ranks on 2 nodes = 2 data × 2 tensor parallel, backend cpu, up in")
    names = "[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'SLURMD_NODENAME')]"
    one_notebook.run("%%px\nimport os")
    places = [["0", "0", "0", "n1"], ["1", "1", "0", "n1"], ["2", "0", "1", "n2"]]
    places.append(["3", "1", "1", "n2"])
    assert one_notebook.run(f'print(mesh.gather("{names}"))') == f"{places}\n"
    one_notebook.run(TRAIN)
    assert one_notebook.run("print(mesh.gather('losses'))") == local

    # A node dies while the ranks train; the checkpoint of the third step is complete.
    one_notebook.run(
        "%%px\nimport time\n"
        f"never_stopped({str(tmp_path)!r}, 'llama', True, dtype=torch.float32)\n"
        "run = Run('llama', True, 5, torch.float32)"
    )
    threading.Timer(3, cluster.kill_node, ["n2"]).start()
    text = one_notebook.fail("%%px\nrun.train(0, lambda step: time.sleep(2))", within=60)
    ended = r"ranks (0, 1, )?2, 3: SLURM's job \d+ ended: (COMPLETING|NODE_FAIL), NodeDown"
    assert re.search(ended, text), text
    assert "mesh.restart() starts new ranks." in text
    one_notebook.run("mesh.close()")
    cluster.start_node("n2")
    one_notebook.run("mesh.restart()")
    one_notebook.run(RESUME.format(folder=str(tmp_path)))
    assert one_notebook.run("print(mesh.gather('losses'))") == local


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell, said",
    [
        ("if rank == 3: raise KeyError('k')", "(?s)rank 3: KeyError: 'k'.*ranks 0, 1, 2 waited in"),
        (
            "import os\nif rank == 1: os.kill(os.getpid(), 9)",
            r"(?s)rank 1: process \d+ on n1 is gone.*mesh.restart\(\)",
        ),
    ],
    ids=["raises", "is killed"],
)
def test_a_rank_that_fails_while_others_wait_is_named(notebook, cell, said):
    text = notebook.fail(f"%%px\n{cell}\ndist.barrier()", within=30)
    assert re.search(said, text), text
    notebook.run("mesh.recover()\nmesh.check()")


@pytest.mark.slow
def test_a_job_that_is_cancelled(cluster, notebook):
    notebook.run("import subprocess, threading")
    cancel = "threading.Timer(2, subprocess.run, [['scancel', mesh._ranks.job_id]]).start()"
    notebook.run(cancel)
    text = notebook.fail("%%px\nimport time\ntime.sleep(60)", within=30)
    assert "SLURM's job" in text and "CANCELLED" in text, text
    _assert_gone(cluster)


@pytest.mark.slow
def test_a_job_that_waits_says_why_and_can_be_given_up(cluster, one_notebook):
    one_notebook.run("if globals().get('mesh'): mesh.close()")
    _assert_gone(cluster)
    one_notebook.interrupt_after(4)
    one_notebook.run('mesh = Mesh(4, launcher="slurm", nodes=2)')
    partition = "scontrol", "update", "PartitionName=main"
    cluster.command(*partition, "State=DOWN")
    assert "the ranks were not up yet" in one_notebook.fail("mesh.start()", within=20)
    cluster.command(*partition, "State=UP")
    assert "is pending: PartitionDown" in printed(one_notebook.outputs)
    _assert_gone(cluster)


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_no_job(cluster, one_notebook):
    one_notebook.run("if globals().get('mesh'): mesh.close()")
    _assert_gone(cluster)
    with Notebook(cluster.environment) as notebook:
        notebook.run(SETUP)
        notebook.run(ON_NODES)
        assert len(cluster.jobs()) == 1
        traces = Traces(notebook.kernel)
        notebook.kernel.send_signal(signal.SIGKILL)
        _assert_gone(cluster)
        traces.assert_gone(within=15, kernel_too=True)


def _submit(cluster, folder: Path, log: str, command: list[str], **options) -> None:
    """Submits the batch file of a run on both nodes, with the tools of this environment on its
    path.
    """
    script = batch_script(command, 2, 2, options=[f"--output={folder / log}"], **options)
    (folder / "run.sbatch").write_text(script)
    path = f"{folder}:{Path(sys.executable).parent}:{slurm.PATH}"
    given = os.environ | cluster.environment | {"PATH": path}
    root = Path(__file__).resolve().parents[1]
    subprocess.run(
        ["sbatch", str(folder / "run.sbatch")], env=given, cwd=root, check=True, capture_output=True
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_unattended_run_on_two_nodes_goes_on_after_one_has_died(cluster, data, tmp_path):  # noqa: F811
    (tmp_path / "neuron_parallel_compile").write_text(
        '#!/bin/sh\nNEURON_EXTRACT_GRAPHS_ONLY=1 exec "$@"\n'
    )
    (tmp_path / "neuron_parallel_compile").chmod(0o755)
    slurm.wait_for(lambda: not cluster.jobs(), 20)
    given = arguments(data, tensor_model_parallel_size=2, train_iters=60, eval_iters=0)
    log = tmp_path / "whole.log"
    assert torchrun(given, log, ranks=4).wait(200) == 0, log.read_text()
    saved = str(tmp_path / "saved")
    on_nodes = replace(given, save=saved, load=saved, save_interval=10)
    command = ["-m", "tutorial_lib.training.pretrain_gpt", *command_line(on_nodes)]

    _submit(cluster, tmp_path, "first.log", command, precompile=["--exit-interval", "2"])
    log = tmp_path / "first.log"
    slurm.wait_for(lambda: log.exists() and len(losses(log)) >= 2 + 15, 120)
    cluster.kill_node("n2")
    slurm.wait_for(lambda: not cluster.jobs(), 60)
    cluster.start_node("n2")
    compiled, first = losses(log)[:2], losses(log)[2:]
    whole = losses(tmp_path / "whole.log")
    assert compiled == whole[:2]
    # So no checkpoint of the compiling was taken.
    assert first == whole[: len(first)] and 15 <= len(first) < 60

    _submit(cluster, tmp_path, "second.log", command)
    slurm.wait_for(lambda: not cluster.jobs(), 120)
    second = losses(tmp_path / "second.log")
    assert second == whole[len(whole) - len(second) :], (tmp_path / "second.log").read_text()
    assert len(first) // 10 * 10 == len(whole) - len(second)


@pytest.mark.slow
def test_an_unattended_run_saves_before_its_time_is_over(cluster, data, tmp_path):  # noqa: F811
    slurm.wait_for(lambda: not cluster.jobs(), 20)
    saved = str(tmp_path / "saved")
    given = arguments(
        data, tensor_model_parallel_size=2, train_iters=3000, eval_iters=0,
        save=saved, load=saved, save_interval=5000,
    )  # fmt: skip
    command = ["-m", "tutorial_lib.training.pretrain_gpt", *command_line(given)]
    log = tmp_path / "first.log"
    _submit(cluster, tmp_path, "first.log", command)
    slurm.wait_for(lambda: log.exists() and len(losses(log)) >= 5, 120)
    cluster.command("scancel", "--signal=USR1", *cluster.jobs())  # what --signal has SLURM do
    slurm.wait_for(lambda: not cluster.jobs(), 60)
    done = len(losses(log))
    assert f"SIGUSR1: ending after iteration {done}" in log.read_text(), log.read_text()
    assert latest(saved).step == done


# ---- whole notebooks ----

NOTEBOOKS = {name: parameters for name, parameters in QUICK.items() if name < "07"}
ON_TWO_NODES = {"launcher": "slurm", "nodes": 2}
IN_TEST_FULL = "01_developer_guide"


@pytest.fixture
def in_cluster(cluster, monkeypatch):
    """This process, and the notebooks that it executes, are on the cluster's head node."""
    slurm.wait_for(lambda: not cluster.jobs(), 20)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.grid] * (name != IN_TEST_FULL)) for name in NOTEBOOKS],
)
def test_a_notebook_on_two_nodes_has_the_results_of_one_machine(in_cluster, name, tmp_path):
    _, local = execute(name, tmp_path, NOTEBOOKS[name])
    ran, found = execute(name, tmp_path, NOTEBOOKS[name] | ON_TWO_NODES)
    shown = [printed(cell.outputs) for cell in code_cells(ran)]
    assert any("ranks on 2 nodes" in text for text in shown)
    assert found["claims"] and all(claim["passed"] for claim in found["claims"])
    names = [[claim["name"] for claim in one["claims"]] for one in (found, local)]
    assert names[0] == names[1]
    assert metrics(found, "Final loss") == metrics(local, "Final loss")
    _assert_gone(in_cluster)
