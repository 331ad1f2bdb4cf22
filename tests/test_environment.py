"""The descriptions of the environment agree, on every Python; an instance keeps what it has."""

import contextlib
import os
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
            name = requirement.name
            assert version(name).split("+")[0] == PINS[normal(name)], name


def test_conda_installs_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (python,) = re.findall(r"'python=([\d.]+)'", str(environment["dependencies"]))
    assert python in SpecifierSet(PROJECT["requires-python"])
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
    extra = {"torch-xla", "jax", "jaxlib"}
    assert extra & resolved.keys() == (extra if has_xla else set())


def stub(folder, name: str, version: str, *requires: str) -> None:
    """A package without content, where an environment would have the real one."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("torch, compiler", [("2.9.0", "2.26.6360.0"), ("2.14.1", "2.28.7631.0")])
def test_make_instance_moves_nothing_that_the_compiler_needs(torch, compiler, tmp_path):
    """`make instance` with uv for pip, which says what it would do and does not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    (packages,) = tmp_path.glob("v/lib/python*/site-packages")
    kept = {"torch": torch, "numpy": "1.26.4", "protobuf": "5.29.5"}
    for name, pin in kept.items():
        stub(packages, name, pin)
    stub(packages, "neuronx_cc", compiler, "numpy<=1.26.4,>=1.24.3", "protobuf<6")
    pip = tmp_path / "python"
    pip.write_text(
        '#!/bin/sh\nshift; shift; case "$1" in\n'
        "list) uv pip list --python v --format freeze ;;\n"
        'install) shift; uv pip install --python v --dry-run "$@" 2> said ;;\n'
        "esac\n"
    )
    pip.chmod(0o755)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", f"--file={ROOT}/Makefile", "instance", f"PYTHON={pip}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path})
    said = (tmp_path / "said").read_text()
    if "Failed to fetch" in said or "error sending request" in said:
        pytest.skip(f"the package index cannot be reached: {said[:200]}")
    assert done.returncode == 0, said
    changes = dict(re.findall(r"^ [+-] (\S+)==(\S+)", said, re.MULTILINE))
    assert "transformers" in changes and not {*kept, "neuronx-cc"} & changes.keys()
    assert int(changes["pyarrow"].split(".")[0]) < 26


def test_the_public_workflow_runs_what_is_here():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads the key `on` as true
    assert jobs["debian"]["container"].endswith("-bookworm")
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert jobs["notebooks"]["strategy"]["matrix"]["notebook"] == notebooks
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, job in jobs.items():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert job["timeout-minutes"] <= 60 and any("pytest" in command for command in commands)
        asked = {word for command in commands for word in re.findall(r"^make (\S+)", command)}
        assert asked <= targets, name
        for command in commands:  # what the shell would refuse
            subprocess.run(["bash", "-n"], input=command, text=True, check=True)
        for selected in re.findall(r"--deselect (\S+)", "".join(commands)):
            file, test = selected.split("::")
            assert f"def {test}(" in (ROOT / file).read_text()


def test_the_citation_names_what_is_published():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["message"]
    assert [citation[key] for key in ("version", "license")] == [
        PROJECT["version"], PROJECT["license"],
    ]  # fmt: skip


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
