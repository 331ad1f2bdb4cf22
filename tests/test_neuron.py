"""The backend `neuron` on a device that PyTorch holds for the vendor's; see `tests/neuron`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tutorial_lib import backends

from .notebook_cases import QUICK
from .test_notebooks import execute

STANDIN = Path(__file__).parent / "neuron"
SMALL = {name: values | {"backend": "auto"} for name, values in QUICK.items()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The device, compiled."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("needs g++ and ninja")
    from torch.utils import cpp_extension

    folder = tmp_path_factory.mktemp("neuron")
    options = dict(extra_cflags=["-O0"], build_directory=str(folder), is_python_module=False)
    with pytest.MonkeyPatch.context() as patch:  # this process has no such device
        patch.setattr(torch.ops, "load_library", lambda path: None)
        cpp_extension.load("neuron_device", [str(STANDIN / "device.cpp")], **options)
    return folder / "neuron_device.so"


@pytest.fixture
def calls(built, tmp_path, monkeypatch):
    """An environment in which PyTorch finds the package; the folder with what it was asked."""
    info, noted = tmp_path / "torch_neuronx-0.dist-info", tmp_path / "calls"
    info.mkdir(), noted.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nneuron = torch_neuronx:register\n")
    path = os.pathsep.join([str(tmp_path), str(STANDIN), str(STANDIN.parents[1])])
    for name, value in dict(PYTHONPATH=path, DEVICE=built, CALLS=noted, CORES=4).items():
        monkeypatch.setenv(name if name == "PYTHONPATH" else f"NEURON_{name}", str(value))
    return noted


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layers_and_a_step_of_each_model_equal_those_of_the_cpu(calls):
    command = [sys.executable, "-m", "tests.benchmarks.gpu_check", "--small", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\nneuron, torch " in f"\n{done.stdout}"
    rows = re.findall(r"^(\w+) +(\d+) +(\S+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 11 and all(float(gap) < 1e-12 for _, _, gap in rows), rows
    (noted,) = calls.iterdir()
    said = noted.read_text().splitlines()
    assert said[:2] == ["set_device 0", "group 0 of 1"]
    assert {"manual_seed_all", "get_rng_state"} <= set(said)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.grid] * (not name.startswith("03"))) for name in SMALL],
)
def test_a_notebook_trains_on_it(name, calls, tmp_path):
    _, results = execute(name, tmp_path, SMALL[name])
    assert results["results"]["parameters"]["backend"] == "neuron"
    assert results["claims"] and all(claim["passed"] for claim in results["claims"])
    said = [file.read_text() for file in calls.iterdir()]
    world = results["results"]["parameters"]["world_size"]
    for rank in range(world):  # each on a core of its own, in groups of this library
        asked = f"set_device {rank}\n", f"group {rank} of {world}\n"
        assert any(all(words in text for words in asked) for text in said)


@pytest.mark.parametrize(
    "devices, plugin, chosen",
    [({}, 0, "cpu"), ({"cuda": 8}, 0, "cuda"), ({}, 1, "xla"), ({"neuron": 64}, 1, "neuron")],
)
def test_auto_chooses_what_is_there(devices, plugin, chosen, monkeypatch):
    count = lambda backend: ({"cpu": 1} | devices).get(backend, 0)  # noqa: E731
    monkeypatch.setattr(backends, "device_count", count)
    monkeypatch.setattr(backends, "is_installed", lambda *modules: plugin)
    assert backends.check_backend("auto") == chosen


@pytest.mark.parametrize("backend", ["cuda", "neuron"])
def test_ranks_without_a_device_are_refused(backend, monkeypatch):
    monkeypatch.setattr(backends, "device_count", lambda backend: 2)
    assert backends.check_backend(backend, 2) == backend
    with pytest.raises(ValueError, match=f"'{backend}' needs a device for each of 3 ranks.*sees 2"):
        backends.check_backend(backend, 3)


@pytest.mark.parametrize("product", ["torch_neuronx", "libneuronxla"])
def test_the_name_of_the_vendors_package_does_not_make_it_xla(product, monkeypatch):
    """`torch_neuronx` is the XLA plugin's front end up to 2.9, and the native device from 2.13."""
    there = {product, "torch_xla"}
    monkeypatch.setattr(backends, "is_installed", lambda *modules: set(modules) <= there)
    assert backends.on_trainium("xla") == (product == "libneuronxla")
