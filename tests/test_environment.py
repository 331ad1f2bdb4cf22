"""The three descriptions of the environment, held to one another; and what an instance already has stays."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

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


@pytest.mark.parametrize(
    "name, installed",
    [("torch", "2.7.1"), ("torch", "2.8.0"), ("torch", "2.9.0"), ("torch-xla", "2.9.0")],
)
def test_an_instance_keeps_its_torch(name, installed):
    required = [r for r in REQUIREMENTS if r.name == name]
    assert required and all(r.specifier.contains(Version(installed)) for r in required)
