"""Executing committed notebooks in place: clean, stable, and never half done."""

import json
from pathlib import Path

import pytest
from small_notebooks import notebook, show_chart, spec

from rackbook.suite.notebooks import discover, load_json
from rackbook.suite.refresh import committed, refresh


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("notebooks")
    notebook(made, "01_good", "import os\nprint(seed)\nprint(2)", "6 * 7", show_chart(spec()))
    notebook(made, "02_bad", "1 / 0")
    return made


@pytest.fixture(scope="module")
def done(folder) -> dict:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    first = refresh(discover(folder))
    once = (folder / "01_good.ipynb").read_bytes()
    refresh(discover(folder)[:1])
    return {"before": before, "first": first, "once": once}


def test_a_second_execution_changes_no_byte(folder, done):
    assert (folder / "01_good.ipynb").read_bytes() == done["once"]
    assert done["once"] != done["before"]["01_good.ipynb"]


def test_only_what_a_reader_needs_is_committed(folder, done):
    content = load_json(folder / "01_good.ipynb")
    assert content["metadata"] == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [c["metadata"] for c in content["cells"]] == [{}, {"tags": ["parameters"]}, {}, {}, {}, {}]
    assert [c["id"] for c in content["cells"]] == [f"cell-{i}" for i in range(6)]
    code = [c for c in content["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == [1, 2, 3, 4, 5]
    assert code[1]["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["1\n", "2\n"]}]
    assert code[2]["outputs"][0]["data"] == {"text/plain": ["42"]}
    assert "papermill" not in json.dumps(content)
    assert "Exception was encountered" not in json.dumps(content)


def test_the_file_is_as_nbformat_itself_would_write_it(folder, done):
    import nbformat

    path = folder / "01_good.ipynb"
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    assert nbformat.writes(content).rstrip("\n") + "\n" == path.read_text("utf-8")


def test_a_notebook_that_fails_stays_as_it_was_and_the_result_says_so(folder, done):
    assert done["first"] is False
    assert (folder / "02_bad.ipynb").read_bytes() == done["before"]["02_bad.ipynb"]


def test_cells_without_an_id_get_one_that_does_not_change():
    content = {"cells": [{"cell_type": "markdown", "metadata": {"x": 1}, "source": "a\nb"}], "metadata": {}}
    first = committed(content)
    assert first == committed(content)
    assert first["cells"][0] == {"cell_type": "markdown", "id": "cell-00", "metadata": {}, "source": ["a\n", "b"]}
