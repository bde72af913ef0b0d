"""The one list of dependencies, its lock and the conda file agree."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(requirement.name.lower(), []).append(requirement)
    return found


def test_lock_pins_every_dependency_inside_its_bounds():
    locked = pins()
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    for requirement in map(Requirement, declared):
        assert requirement.name in locked, f"{requirement.name} is not in requirements.lock: run `make lock`"
        for pin in locked[requirement.name]:
            (exact,) = pin.specifier
            assert exact.operator == "=="
            assert exact.version in requirement.specifier, f"{pin} is outside {requirement}: run `make lock`"


def test_lock_names_no_index_and_no_path():
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert "--" not in text


def test_vllm_is_only_the_gpu_extra_and_pinned():
    assert PROJECT["optional-dependencies"]["gpu"] == ["vllm==0.33.0"]
    assert "vllm" not in pins()


def test_conda_environment_takes_everything_from_pyproject_and_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert f"python{PROJECT['requires-python']}" in plain
    assert set(plain) == {f"python{PROJECT['requires-python']}", "pip", "make"}
    assert pip == ["--constraint requirements.lock", "--editable ."]


def test_ci_runs_make_test_and_nothing_else_of_the_suite():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"  # so that whatever fails is the end of it
    own = [line for line in lines if re.search(r"\b(make|pytest|ruff|nbval|rackbook|python\d?)\b", line)]
    assert own == ["RACKBOOK_REQUIRE_LAB=1 make test"]
    assert lines[-1] == own[0]
    rules = dict(re.findall(r"^(\w+):(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert rules["test"].split() == ["lint", "unit", "nbval", "real"]
