"""Every notebook runs with other parameters, and they change what it shows."""

import tomllib
from pathlib import Path

import pytest

from rackbook.suite import batch
from rackbook.suite.notebooks import load_json
from rackbook.suite.parameters import assign

VARIANTS = tomllib.loads((Path(__file__).parent / "variants.toml").read_text("utf-8"))


@pytest.fixture(scope="session")
def executed(notebooks, tmp_path_factory):
    """All variants in one batch."""
    folders = batch.Folders(tmp_path_factory.mktemp("variants"))
    chosen = [n for n in notebooks if n.name in VARIANTS]
    values = {n.name: assign(VARIANTS[n.name].items(), [n]).values[n.name] for n in chosen}
    return folders, values, {o.notebook: o for o in batch.execute(chosen, values, folders)}


def shown(content: dict) -> list[dict]:
    """Every output, without the pictures, which follow from it, and whether or not its text is kept as lines."""
    return [
        {kind: _text(data) for kind, data in output.get("data", output).items() if kind != "image/png"}
        for cell in content["cells"]
        for output in cell.get("outputs", [])
    ]


def _text(data: object) -> object:
    return "".join(data) if isinstance(data, list) and all(isinstance(line, str) for line in data) else data


def test_no_variant_is_left_over(notebooks):
    assert VARIANTS.keys() <= {n.name for n in notebooks}


def test_it_has_a_variant_off_its_defaults(notebook):
    assert notebook.name in VARIANTS, f"add [{notebook.name}] to variants.toml"
    values = assign(VARIANTS[notebook.name].items(), [notebook]).values[notebook.name]
    assert values
    same = [name for name, value in values.items() if value == notebook.parameter(name).default]
    assert same == []


def test_its_variant_runs_and_changes_what_it_shows(notebook, executed):
    folders, values, outcomes = executed
    assert notebook.name in outcomes
    outcome = outcomes[notebook.name]
    assert outcome.succeeded, outcome.reason
    assert {name: outcome.parameters[name] for name in outcome.given} == values[notebook.name]
    changed = load_json(folders.notebooks / f"{notebook.name}.ipynb")
    assert shown(changed) != shown(load_json(notebook.path))
