"""The descriptions of the environment agree, on every Python; an instance keeps what it has."""

import contextlib
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from data_scripts import dump

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()
)
PINS = {normal(name): pin for name, pin in PINS.items()}
REQUIREMENTS = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_every_requirement_is_pinned_within_its_range(requirement):
    assert normal(requirement.name) in PINS, f"{requirement.name} has no pin in constraints.txt"
    assert requirement.specifier.contains(PINS[normal(requirement.name)])


def test_what_runs_here_is_what_is_pinned():
    for requirement in REQUIREMENTS:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert version(requirement.name).split("+")[0] == PINS[normal(requirement.name)], (
                requirement.name
            )


def test_conda_installs_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = next(
        entry for entry in environment["dependencies"] if str(entry).startswith("python=")
    )
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(
        python.removeprefix("python=")
    )
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    makefile = (ROOT / "Makefile").read_text()
    extras = re.search(r"--editable '\.\[(.*?)\]'", makefile).group(1)
    assert set(extras.split(",")) == set(EXTRAS)
    assert pip == ["--constraint constraints.txt", f"--editable .[{extras}]"]


PYTHONS = ["3.11.0", "3.12.0", "3.13.0", "3.14.0"]


def test_every_pin_installs_on_every_python():
    for name, pin in PINS.items():
        with contextlib.suppress(PackageNotFoundError):  # needed on other machines only
            if version(name).split("+")[0] == pin:
                wanted = SpecifierSet(metadata(name)["Requires-Python"] or "")
                refused = [python for python in PYTHONS if python not in wanted]
                assert not refused, f"{name}=={pin} needs Python {wanted}"


def resolve(python: str, platform: str, *options: str) -> dict[str, str]:
    """Names and versions that an installation elsewhere would take, all of them as wheels."""
    command = [shutil.which("uv", path=Path(sys.executable).parent) or "uv", "pip", "compile"]
    command += ["pyproject.toml", "--no-header", "--no-annotate", "--only-binary=:all:", "--quiet"]
    command += [f"--python-version={python}", f"--python-platform={platform}", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr[:200]}")
    assert done.returncode == 0, done.stderr
    return {normal(n): pin for n, pin in (line.split("==") for line in done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28"])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_resolve_on_other_pythons_and_machines(python, machine):
    options = ["--constraint=constraints.txt", "--extra=xla", "--extra=test"]
    resolved = resolve(python, machine, *options)
    assert resolved.items() <= PINS.items()
    has_xla = machine.startswith("x86_64") and python != "3.14.0"
    assert {"torch-xla", "jax", "jaxlib"} & resolved.keys() == (
        {"torch-xla", "jax", "jaxlib"} if has_xla else set()
    )


@pytest.mark.slow
@pytest.mark.parametrize("torch", ["2.7.1", "2.8.0", "2.9.0"])
def test_an_instance_keeps_its_torch_and_its_numpy(torch, tmp_path):
    kept = {"torch": torch, "numpy": "1.26.4", "protobuf": "3.20.3"}
    constraint = tmp_path / "kept.txt"
    constraint.write_text("".join(f"{name}=={pin}\n" for name, pin in kept.items()))
    resolved = resolve("3.11", "x86_64-manylinux_2_28", f"--constraint={constraint}")
    assert kept.items() <= resolved.items()


def test_make_instance_keeps_what_is_there(tmp_path):
    """A pip that only lists, in place of the instance's: what it has goes into the constraints."""
    pip = tmp_path / "python"
    pip.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        '*"pip list"*) printf "torch==2.8.0\\nnumpy==1.26.4\\ntqdm==4.0\\nneuronx-cc==2.20\\n" ;;\n'
        f'*) echo "$*" >> {tmp_path}/asked ;;\nesac\n'
    )
    pip.chmod(0o755)
    command = ["make", f"--file={ROOT}/Makefile", "instance", f"PYTHON={pip}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    kept = (tmp_path / "build" / "kept.txt").read_text().split()
    assert kept == ["torch==2.8.0", "numpy==1.26.4", "neuronx-cc==2.20"]
    assert "pip install --constraint build/kept.txt --editable ." in (
        (tmp_path / "asked").read_text()
    )


@pytest.mark.parametrize("found, accepted", [("3.10", False), ("3.11", True), ("3.15", False)])
def test_an_old_python_gets_one_line_before_anything_is_built(found, accepted, tmp_path):
    """A Python that says it is of another version."""
    major, minor = found.split(".")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ touch {tmp_path}/built; exit 1; }}\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = ({major}, {minor}, 0)\n$2"\n'
    )
    python.chmod(0o755)
    command = ["make", f"--file={ROOT}/Makefile", "tutorials", f"PYTHON={python}"]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "built").exists() == accepted
    first = done.stderr.splitlines()[0]
    assert accepted or first.startswith(f"Python 3.11 to 3.14 is needed, {python} is {found}")


def test_the_default_dump_is_fetched_once_and_whole(tmp_path, monkeypatch):
    whole = dump.default_dump().read_bytes()
    monkeypatch.setattr(dump, "DUMP", tmp_path / "dump" / dump.NAME)

    def fetch(folder):
        path = folder / "fetched"
        path.write_bytes(whole)
        fetched.append(path)
        return path

    fetched = []
    monkeypatch.setattr(dump, "_fetch", fetch)
    assert dump.default_dump() == dump.default_dump() == tmp_path / "dump" / dump.NAME
    assert len(fetched) == 1 and list(dump.DUMP.parent.iterdir()) == [dump.DUMP]
    dump.DUMP.write_bytes(whole[:-1])
    assert dump.default_dump().read_bytes() == whole and len(fetched) == 2


def test_a_dump_that_cannot_be_fetched_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "DUMP", tmp_path / "dump" / dump.NAME)
    monkeypatch.setattr(dump, "WHEEL", ["--no-index", "gensim"])
    with pytest.raises(FileNotFoundError, match="(?s)--dump FILE.*gensim"):
        dump.default_dump()
    assert list(dump.DUMP.parent.iterdir()) == []


def test_a_checkout_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setattr(dump, "DUMP", tmp_path / "a file" / "dump" / dump.NAME)
    with pytest.raises(OSError, match="the default dump goes there. Run `make`.*--dump FILE"):
        dump.default_dump()
