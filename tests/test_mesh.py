"""The mesh from a notebook: what its cells show, and every way in which ranks are known to go
wrong.
"""

import ast
import os
import pickle
import shutil
import subprocess
import sys
import threading
from multiprocessing import Pipe

import psutil
import pytest
from nbclient.exceptions import CellExecutionError, DeadKernelError

from tests.notebook import Notebook, Traces, write
from tests.slurm import wait_for
from tutorial_lib.backends import check_backend
from tutorial_lib.lab.mesh import Mesh, nursery
from tutorial_lib.lab.mesh.failures import describe_failure
from tutorial_lib.lab.mesh.output import as_shown, by_rank
from tutorial_lib.lab.mesh.ranks import Rank

SETUP = """
from tutorial_lib.lab.mesh import Mesh
mesh = Mesh(world_size=4, tp_size=2, timeout=5)
mesh.start()
"""
STALE = {
    "RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "9", "GROUP_RANK": "3",
    "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "stale",
    "TORCHELASTIC_RESTART_COUNT": "5", "TORCHELASTIC_USE_AGENT_STORE": "False",
}  # fmt: skip


# ---- before anything starts ----


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"world_size": 4, "tp_size": 3}, ["4", "3", "divisible"]),
        ({"world_size": 0}, ["world_size is 0"]),
        ({"world_size": 2.0}, ["world_size is 2.0"]),
        ({"world_size": True}, ["world_size is True"]),
        ({"world_size": 2, "tp_size": 0}, ["tp_size is 0"]),
        ({"world_size": 2, "timeout": 0}, ["timeout 0"]),
        ({"world_size": 2, "timeout": float("inf")}, ["timeout inf"]),
        ({"world_size": 2, "timeout": "20"}, ["timeout '20'"]),
        ({"world_size": 2, "backend": "tpu"}, ["'tpu'", "auto, cpu, cuda, neuron, xla"]),
        ({"world_size": 4, "launcher": "pbs"}, ["'pbs'", "local, slurm"]),
        ({"world_size": 4, "nodes": 2}, ["nodes 2", "slurm"]),
        ({"world_size": 4, "nodes": 0, "launcher": "slurm"}, ["nodes is 0"]),
        ({"world_size": 4, "nodes": 3, "launcher": "slurm"}, ["4", "3", "divisible"]),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError) as error:
        Mesh(**arguments)
    assert all(word in str(error.value) for word in said), error.value
    assert psutil.Process().children(recursive=True) == before


def test_a_machine_without_slurm_is_told_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ValueError, match="launcher 'slurm' needs sbatch, srun, scancel, scontrol, sinfo"
    ):
        Mesh(4, launcher="slurm", nodes=2)


def test_close_before_start_does_nothing():
    mesh = Mesh(2)
    mesh.close()
    mesh.close()


# ---- what is shown ----


def test_equal_outputs_are_shown_once_and_all_in_rank_order():
    assert by_rank({2: "a\n", 0: "a\n", 1: "b\n", 3: ""}, 4) == "[ranks 0, 2] a\n[rank 1] b"
    assert by_rank({1: "x\n", 0: "x\n"}, 2) == "[all 2 ranks] x"
    assert by_rank({0: "x\ny\n"}, 1) == "[rank 0]\nx\ny"
    assert by_rank({0: "\n", 1: ""}, 2) == ""


def test_text_is_shown_as_on_a_terminal_without_files_of_cells():
    assert as_shown("0%\r50%\r100%\n") == "100%\n"
    assert as_shown("done\r") == "done"
    assert as_shown("<ipython-input-1-0ab>:1: UserWarning: x") == "cell:1: UserWarning: x"
    assert as_shown("[Gloo] Rank 0 is connected to 1 peer ranks\nkept") == "kept"


def _report(error=None, waited_in=None, line="f()"):
    place = {"frames": [f"cell, line 1: {line}"], "line": line, "tensor": None}
    return place | {"error": error, "waited_in": waited_in}


def test_the_guilty_rank_comes_first_and_those_that_waited_share_a_line():
    waited = _report("RuntimeError: Connection closed by peer", "all_reduce", "dist.all_reduce(x)")
    text = describe_failure({0: waited, 1: _report("KeyError: 'k'"), 2: waited})
    assert text.splitlines() == [
        *("rank 1: KeyError: 'k'", "  cell, line 1: f()"),
        "ranks 0, 2 waited in all_reduce (at: dist.all_reduce(x))",
    ]


def test_a_rank_that_never_arrived_is_named():
    waited = _report(None, "all_reduce", "dist.all_reduce(x)")
    line = "ranks 0, 2 waited in all_reduce (at: dist.all_reduce(x)); rank 1 never arrived: "
    two = {0: waited, 2: waited}
    assert describe_failure(two, [1]) == line + "the cell had ended there"
    assert describe_failure(two | {1: _report(line="spin()")}) == line + "still at: spin()"
    different = {0: waited, 1: _report(None, "broadcast")}
    assert "in different collectives" in describe_failure(different)


# ---- one notebook, and what can happen in it, one thing after the other ----


@pytest.fixture(scope="module")
def one_notebook():
    with Notebook(STALE) as notebook:
        notebook.run(SETUP)
        yield notebook


@pytest.fixture
def notebook(one_notebook):
    """The notebook, with its mesh in order even if the test before has failed half-way."""
    one_notebook.run("if mesh._remedy: mesh.restart()")
    return one_notebook


def test_ranks_are_up_and_in_order(notebook):
    places = "".join(f"[rank {rank}] {rank} 4 cpu\n" for rank in range(4))
    assert notebook.run("%%px\nprint(rank, world_size, device)") == places
    assert notebook.run("%px import os; print(os.environ['WORLD_SIZE'])") == "[all 4 ranks] 4\n"
    # More threads than cores make every rank ten times as slow, and torch reads their number when
    # it is imported.
    assert notebook.run("%px print(torch.get_num_threads())") == "[all 4 ranks] 1\n"
    assert notebook.run("%%px --rank 3,1\nprint('a\\nb')") == "[ranks 1, 3]\na\nb\n"
    assert notebook.run("%%px --rank 2\nrank * 10") == "[rank 2] 20\n"
    both = "import sys; print('out'); print('err', file=sys.stderr)"
    assert notebook.run(f"%px {both}") == "[all 4 ranks]\nout\nerr\n"


def test_push_and_gather(notebook):
    notebook.run("mesh.push(steps=3, name='x')")
    assert notebook.run("print(mesh.gather('steps * 10 + rank'))") == "[30, 31, 32, 33]\n"
    tensor = "mesh.gather('torch.ones(1, requires_grad=True) * rank')[3]"
    assert notebook.run(f"print({tensor})") == "tensor([3.])\n"
    assert "3: NameError: name 'nothing' is" in notebook.fail("mesh.gather('nothing')", 10)
    assert "all-reduce is right" in notebook.run("mesh.check()")


def test_axes_are_set_up_and_stale_variables_of_the_shell_are_gone(notebook):
    notebook.run("%px from tutorial_lib.parallel_layers import parallel_state")
    places = "mesh.gather('parallel_state.get_tensor_model_parallel_rank()')"
    assert notebook.run(f"print({places})") == "[0, 1, 0, 1]\n"
    notebook.run(f"mesh.push(names={list(STALE)})")
    notebook.run("%px import os")
    variables = notebook.run("print(mesh.gather('[os.environ.get(name) for name in names]'))")
    got = dict(zip(STALE, ast.literal_eval(variables)[2]))
    assert got.pop("MASTER_PORT") != "29500"
    ranks = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    found = {name: text for name, text in got.items() if text is not None}
    assert found == ranks | {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_the_same_error_everywhere_leaves_the_group_alone(notebook):
    everyone = "RankError: ranks 0, 1, 2, 3: "
    for line, said in (
        ("print('a'); raise KeyError('k')", "KeyError: 'k'\n  cell, line 1: print('a'); raise Key"),
        ("1 +", "SyntaxError: invalid syntax\n  cell, line 1: 1 +"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("%nomagic", "UsageError: Line magic function"),
    ):
        assert notebook.fail(f"%px {line}", 10).startswith(everyone + said)
        if line.startswith("print"):
            assert notebook.outputs[0].text == "[all 4 ranks] a\n"
    chain = "try: f(30)\nexcept ZeroDivisionError as e: raise KeyError(1) from e"
    error = notebook.fail(f"%%px\ndef f(n): return f(n - 1) if n else 1 / 0\n{chain}", 10)
    assert error.endswith("\n  caused by ZeroDivisionError: division by zero")
    deep = notebook.fail("%px f(30)", 10).splitlines()
    assert len(deep) == 14 and deep[7] == "  … 20 more frames"
    notebook.run("mesh.check()")


@pytest.mark.parametrize(
    "collective",
    ["dist.all_reduce(x, group=held)", "dist.barrier()", "dist.new_group([0, 1, 2, 3])"],
)
def test_one_rank_raises_while_the_others_wait(notebook, collective):
    notebook.run("%px text = 'kept'; x = torch.ones(3); held = dist.new_group([0, 1, 2, 3])")
    error = notebook.fail(
        f"%%px\nif rank == 1:\n    raise ValueError('only here')\n{collective}", 15
    )
    lines = error.splitlines()
    assert lines[0] == "RankError: rank 1: ValueError: only here"
    assert lines[1] == "  cell, line 2: raise ValueError('only here')"
    assert lines[2].startswith("ranks 0, 2, 3 waited in ") and f"(at: {collective})" in lines[2]
    assert "mesh.reset()" in lines[3] and len(lines) == 4
    # The next cell resets the ranks by itself. Their variables stay, but for the groups of the old
    # mesh.
    printed = notebook.run("%px dist.all_reduce(x); print(text)").splitlines()
    assert "reset in" in printed[0] and printed[1:] == ["[all 4 ranks] kept"]
    assert "NameError: name 'held' is not defined" in notebook.fail("%px held", 10)


@pytest.mark.parametrize(
    "busy", ["while True: time.sleep(0.1)", "dist.all_reduce(x) if rank else time.sleep(60)"]
)
def test_an_interrupt_ends_the_cell_on_all_ranks(notebook, busy):
    notebook.run("%px import time; x = torch.ones(3)")
    notebook.interrupt_after(1)
    error = notebook.fail(f"%%px\n{busy}", 12)
    assert error.startswith("KeyboardInterrupt")
    assert "mesh.reset()" in error
    notebook.run("mesh.reset()")
    notebook.run("mesh.check()")


def test_a_killed_rank_is_named_with_its_signal_and_a_restart_helps(notebook):
    notebook.run(
        "import os, signal, threading; threading.Timer(1, os.kill, [mesh.pids[2], "
        "signal.SIGKILL]).start()"
    )
    error = notebook.fail("%%px\nwhile True: dist.all_reduce(torch.ones(3))", 15)
    assert error.startswith("RankError: rank 2: the process was killed by SIGKILL")
    assert "ranks 0, 1, 3 waited in all_reduce" in error and "mesh.restart()" in error
    for call in ("mesh.reset()", "mesh.check()", "%px 1"):
        assert "mesh.restart()" in notebook.fail(call, 5)
    before = Traces(notebook.kernel)
    assert "backend cpu, up in" in notebook.run("mesh.restart()")
    before.assert_gone(within=1, ports=False)
    notebook.run("mesh.check()")


HOLD = "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep(60)\n"


GUILTY = {
    "alone": (
        "if rank == 3: raise ValueError('alone')", ["rank 3: ValueError: alone", "mesh.reset()"]
    ),
    "never": (
        "if rank != 2:\n    dist.all_reduce(torch.ones(3))",
        ["ranks 0, 1, 3 waited in all_reduce (at: dist.all_reduce(torch.ones(3))); rank 2 never "
         "arrived: the cell had ended there"],
    ),
    "different": (
        "x = torch.ones(3)\ndist.barrier() if rank < 2 else dist.all_gather([x] * 4, x)",
        ["ranks 0, 1 waited in barrier", "in different collectives"],
    ),
    "others compute": (
        "import time\nif rank == 1: raise ValueError('own')\ntime.sleep(60)",
        ["rank 1: ValueError: own", "ranks 0, 2, 3 still ran (at: time.sleep(60))"],
    ),
    "holds the lock": (
        HOLD + "if rank == 0: raise ValueError('own')\ndist.barrier()",
        ["rank 0: ValueError: own", "ranks 2, 3 waited in barrier", "rank 1 still ran (at: a"],
    ),
    "stopped": (
        "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()",
        ["rank 1: the process was stopped (SIGSTOP)", "ranks 0, 2, 3 waited in barrier"],
    ),
    "shapes": (
        "x = torch.ones(500_000 if rank == 1 else 3)\ndist.all_reduce(x)",
        ["bytes arrived where", "tensors of different sizes", "waited in all_reduce"],
    ),
    "exits": (
        "import os\nif rank == 2: os._exit(3)\ndist.barrier()",
        ["rank 2: the process exited with status 3", "ranks 0, 1, 3 waited in barrier"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("cell, shown", GUILTY.values(), ids=GUILTY)
def test_the_guilty_rank_is_first_within_30_s_and_the_mesh_recovers(notebook, cell, shown):
    error = notebook.fail(f"%%px\n{cell}", 30)
    assert shown[0] in error.splitlines()[0] and all(text in error for text in shown), error
    assert "memory ran out" not in error and "KeyboardInterrupt" not in error
    notebook.run("mesh.recover()\nmesh.check()")


def test_the_parent_of_the_ranks_may_be_killed(notebook):
    kill = "os.kill, [mesh._ranks._process.pid, signal.SIGKILL]"
    notebook.run(f"import os, signal, threading; threading.Timer(1, {kill}).start()")
    error = notebook.fail("%px import time; time.sleep(60)", 10)
    assert "the process that holds the ranks together is gone" in error
    notebook.run("mesh.recover()\nmesh.check()")


def test_two_interrupts_leave_a_mesh_that_recovers(notebook):
    notebook.interrupt_after(1)
    notebook.interrupt_after(2)  # while rank 0 withstands the first
    withstand = "def f():\n    try: time.sleep(60)\n    except KeyboardInterrupt: f()"
    error = notebook.fail(f"%%px\nimport time\n{withstand}\ndist.barrier() if rank else f()", 15)
    assert error.startswith("KeyboardInterrupt")
    notebook.run("mesh.recover()\nmesh.check()")


def test_long_lines_and_much_output_do_not_hang(notebook):
    line = "x" * 60_000
    assert notebook.run(f"%px print('x' * {len(line)})") == f"[all 4 ranks] {line}\n"
    shown = notebook.run("%px for _ in range(1000): print('x' * 100_000)")
    assert len(shown) < 2_000_000 and shown.endswith("more characters are not shown\n")


def test_await_works(notebook):
    cell = "%%px\nimport asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')"
    assert notebook.run(cell) == "[all 4 ranks] awaited\n"


def test_what_listens_does_so_on_loopback_alone(notebook):
    connections = [c for p in Traces(notebook.kernel).processes for c in p.net_connections("tcp")]
    connections += notebook.kernel.net_connections("tcp")
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.slow
def test_starts_and_closes_leave_no_descriptors_threads_or_orphans(notebook):
    orphan = (
        "%%px\nimport subprocess\n"
        "p = subprocess.Popen(['sleep', '611'], env={}, start_new_session=True)"
    )
    count = "import psutil; me = psutil.Process(); print(me.num_fds(), me.num_threads())"
    seen = []
    for _ in range(3):
        notebook.run("mesh.restart()")
        notebook.run(orphan)
        notebook.run("mesh.close()")
        seen.append(notebook.run(count))
    assert seen[1] == seen[2], seen
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "611"]]
    assert not left


def test_a_cell_that_is_meant_to_fail_prints_its_error(notebook):
    said = notebook.run("%%px --fails --rank 1\nraise ValueError(3)")
    assert said.startswith("RankError: rank 1: ValueError: 3\n")


def test_wrong_use_of_px_fails_the_cell(notebook):
    words = {"--rank 4": r"ranks \[4\]: give one or more of 0 to 3", "--rank x": "'x'"}
    words |= {"--noblock": "--noblock", "--fails": "meant to fail"}
    for line, said in words.items():
        with pytest.raises(CellExecutionError, match=said):
            notebook.run(f"%%px {line}\n1")
    assert "UsageError" in notebook.fail("%%pxx\n1", 5)


def test_set_up_twice_then_close_leaves_nothing(notebook):
    first = Traces(notebook.kernel)
    notebook.run(SETUP)
    first.assert_gone(within=1, ports=False)
    notebook.run("mesh.check()")
    second = Traces(notebook.kernel)
    assert len(second.processes) == 5
    notebook.run("mesh.close()\nmesh.close()")
    second.assert_gone(within=1)
    for cell in ("%px 1", "%%px --fails\n1"):
        assert notebook.fail(cell, 5) == "MeshError: no ranks are up: call mesh.start()"


# ---- the kernel's end, and other runners ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy", ["import time; time.sleep(300)", "%px dist.all_reduce(x) if rank else time.sleep(300)"]
)
def test_a_killed_kernel_leaves_nothing(busy, tmp_path):
    with Notebook({"TMPDIR": str(tmp_path)}) as notebook:
        notebook.run(SETUP)
        notebook.run("%px import time; x = torch.ones(3)")
        traces = Traces(notebook.kernel)
        threading.Timer(1, notebook.kernel.kill).start()
        with pytest.raises(DeadKernelError):
            notebook.run(busy)
        traces.assert_gone(within=10, kernel_too=True)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1.5, 4.0])
def test_a_kernel_killed_while_it_starts_the_mesh_leaves_nothing(moment):
    with Notebook() as notebook:
        notebook.run("from tutorial_lib.lab.mesh import Mesh")
        seen = []

        def kill():
            seen.append(Traces(notebook.kernel))
            notebook.kernel.kill()

        threading.Timer(moment, kill).start()
        with pytest.raises(DeadKernelError):
            notebook.run("import time; Mesh(4).start(); time.sleep(30)")
        assert seen[0].processes
        seen[0].assert_gone(within=10, kernel_too=True)


RAISES = "%%px\nif rank == 1:\n    raise ValueError('only here')\ndist.barrier()"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell, said",
    [(RAISES, "RankError: rank 1: ValueError: only here"), ("%%px\nwhile True: pass", "timed out")],
    ids=["one rank raises", "time-out"],
)
def test_papermill_fails_and_leaves_nothing_where_no_name_resolves(cell, said, tmp_path):
    note = f"open({str(tmp_path / 'pids')!r}, 'w').write(repr(mesh.pids));"
    source = write(tmp_path / "in.ipynb", SETUP, note, cell)
    arguments = ["papermill", source, str(tmp_path / "out.ipynb"), "--execution-timeout", "30"]
    command = [sys.executable, "-m", *arguments]
    silent = tmp_path / "resolv.conf"
    silent.write_text("nameserver 192.0.2.1\n")  # of RFC 5737: nobody has it, so nobody answers
    nameless = ["unshare", "--user", "--map-root-user", "--uts", "--mount", "sh", "-c"]
    change = f"hostname no.such.host.invalid && mount --bind {silent} /etc/resolv.conf"
    nameless += [f'{change} && exec "$@"', "sh"]
    if shutil.which("unshare") and not subprocess.run([*nameless, "true"]).returncode:
        command = [*nameless, *command]  # else this user may not change that in a namespace
    environment = os.environ | {"IPP_NONINTERACTIVE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert run.returncode != 0 and said in run.stdout + run.stderr, run
    pids = ast.literal_eval((tmp_path / "pids").read_text())
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), 10, "the end of the ranks")


def test_a_rank_may_print_before_its_first_task():
    """As IPython does on a SLURM node where another virtual environment is active."""
    here, there = Pipe()
    there.send_bytes(pickle.dumps({"pid": 1}))
    there.send_bytes(pickle.dumps([pickle.dumps(("output", "early"))]))
    rank = Rank(here, "127.0.0.1")
    rank.receive()
    assert rank.is_alive and rank.output == ["early"]


def test_ranks_that_no_fork_made_alike_draw_the_same_numbers(monkeypatch):
    """As on other nodes, on Trainium and on macOS: each imports torch by itself."""
    monkeypatch.setattr(nursery, "PRELOAD", ())
    mesh = Mesh(2)
    mesh.start()
    try:
        seeds = mesh.gather("torch.initial_seed()")
    finally:
        mesh.close()
    assert seeds[0] == seeds[1]


@pytest.mark.slow
def test_on_xla_the_rank_that_raises_is_named_and_three_meshes_start_in_one_kernel():
    try:
        check_backend("xla")
    except ValueError as error:
        pytest.skip(str(error))
    with Notebook() as notebook:
        setup = SETUP.replace("world_size=4", "world_size=2, backend='xla'")
        notebook.run(setup.replace("timeout=5", "timeout=20"))
        for _ in range(2):
            said = notebook.fail(
                "%%px\nfrom tutorial_lib.backends import mark_step\nfrom "
                "tutorial_lib.parallel_layers import comm\n"
                "total = comm.all_reduce('sum', torch.ones(3, device=device))\n"
                "if rank == 1:\n    raise KeyError('k')\nmark_step()",
                within=30,
            )
            assert "RankError: rank 1: KeyError: 'k'" in said, said
            assert "rank 0 waited in mark_step (at: mark_step())" in said, said
            notebook.run("mesh.recover()")
            notebook.run("mesh.check()")
        assert notebook.run("import sys; print('torch_xla' in sys.modules)") == "False\n"
