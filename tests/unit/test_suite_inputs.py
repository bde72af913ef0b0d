"""What a result depends on: exactly the files that its kernel read, and a change of any of them is seen."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from small_notebooks import notebook

from rackbook.errors import DataError
from rackbook.suite import inputs
from rackbook.suite.notebooks import load_json, read
from rackbook.suite.tracing import state


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A library and data of two files each, a notebook, and a trace in which the first of each was read."""
    for name in ("lib/rackbook/a.py", "lib/rackbook/b.py", "lib/rackbook/suite/pool.py", "data/a.csv", "data/b.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(inputs, "_ROOTS", {"data": tmp_path / "data", "library": tmp_path / "lib" / "rackbook"})
    monkeypatch.setattr(inputs, "_RUNNER", tmp_path / "lib" / "rackbook" / "suite")
    notebook(tmp_path, "01_one")
    (tmp_path / "mine.csv").write_text("1")
    trace(tmp_path, "lib/rackbook/a.py", "lib/rackbook/suite/pool.py", "data/a.csv", "elsewhere.csv")
    return tmp_path


def trace(place, *names):
    """What a kernel leaves that has just read these."""
    (place / "trace.json").write_text(json.dumps({str(place / name): state(place / name) for name in names}))


def made(place, parameters=None, meanwhile=lambda: None, digests=None):
    """The manifest of an execution during which something may happen."""
    nb = read(place / "01_one.ipynb")
    values = {p.name: p.default for p in nb.parameters} | (parameters or {})
    earlier = inputs.before(nb, values)
    meanwhile()
    return inputs.manifest(place / "trace.json", nb, values, digests or inputs.Digests(), earlier), nb, values


def still_current(found, nb, values) -> bool:
    return inputs.Digests().current(inputs.name_of(found), found, nb, values)


def test_a_manifest_lists_what_was_read_and_neither_the_runner_nor_files_elsewhere(place):
    found, nb, values = made(place)
    assert list(found["library"]) == ["a.py"]
    assert list(found["data"]) == ["a.csv"]
    assert found["files"] == {}
    assert str(place) not in json.dumps(found)
    assert still_current(found, nb, values)


@pytest.mark.parametrize(
    ("changed", "current"),
    [("lib/rackbook/a.py", False), ("lib/rackbook/b.py", True), ("data/a.csv", False), ("data/b.csv", True),
     ("lib/rackbook/suite/pool.py", True), ("mine.csv", True)],
)  # fmt: skip
def test_a_change_counts_where_it_was_read_and_nowhere_else(place, changed, current):
    found, nb, values = made(place)
    (place / changed).write_text("changed")
    assert still_current(found, nb, values) is current


def test_a_file_that_is_gone_counts_as_changed(place):
    found, nb, values = made(place)
    (place / "data" / "a.csv").unlink()
    assert not still_current(found, nb, values)


def test_a_file_of_the_user_counts_by_content_not_by_time(place):
    found, nb, values = made(place, {"points_path": str(place / "mine.csv")})
    assert str(place) not in json.dumps(found)
    (place / "mine.csv").write_text("1")
    assert still_current(found, nb, values)
    (place / "mine.csv").write_text("2")
    assert not still_current(found, nb, values)


def test_a_folder_of_the_user_counts_with_the_names_in_it(place):
    found, nb, values = made(place, {"points_path": str(place / "data")})
    (place / "data" / "b.csv").rename(place / "data" / "c.csv")
    assert not still_current(found, nb, values)


LIVE = """\
cluster: str = "b200x8"  # [-] where to measure
"""


def test_a_cluster_file_of_the_user_counts_and_so_does_the_recipe_that_it_names(place):
    notebook(place, "01_one", parameters=LIVE)
    assert made(place)[0]["files"] == {}  # a name of the library's: its file is among the data that were read
    (place / "mine.toml").write_text('recipe = "own/recipe.toml"')
    (place / "own").mkdir()
    (place / "own" / "recipe.toml").write_text("a")
    at = {"cluster": str(place / "mine.toml")}
    found, nb, values = made(place, at)
    assert still_current(found, nb, values)
    (place / "own" / "recipe.toml").write_text("b")
    assert not still_current(found, nb, values)
    found, nb, values = made(place, at)
    (place / "mine.toml").write_text('recipe = "deepseek-v4.1-flash-b200"')
    assert not still_current(found, nb, values)
    found, nb, values = made(place, at)
    assert len(found["files"]["cluster"]) == 1
    (place / "mine.toml").unlink()
    assert not still_current(found, nb, values)


def test_the_compiler_of_the_simulations_is_among_the_versions():
    assert {"numba", "llvmlite"} <= inputs.versions().keys()


def test_a_new_file_in_a_folder_that_was_listed_is_a_change(place):
    trace(place, "data")
    found, nb, values = made(place)
    assert list(found["data"]) == ["./"]
    assert still_current(found, nb, values)
    (place / "data" / "c.csv").write_text("")
    assert not still_current(found, nb, values)


def test_the_source_of_the_notebook_counts_and_its_outputs_do_not(place):
    found, nb, values = made(place)
    content = load_json(nb.path)
    content["cells"][1]["execution_count"] = 7
    content["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x"}]
    nb.path.write_text(json.dumps(content))
    assert still_current(found, nb, values)
    content["cells"][-1]["source"] += "\n# changed"
    nb.path.write_text(json.dumps(content))
    assert not still_current(found, nb, values)


def test_another_version_of_a_package_is_a_change(place, monkeypatch):
    found, nb, values = made(place)
    monkeypatch.setattr(inputs, "versions", lambda: found["versions"] | {"polars": "0.0"})
    assert not still_current(found, nb, values)


def replaced(path, content):
    """Let another file of the same size take a file's place, with the time of the old one, as rsync and tar do."""
    assert len(content) == path.stat().st_size
    other = path.with_name("other")
    other.write_text(content)
    shutil.copystat(path, other)
    other.replace(path)


@pytest.mark.parametrize("name", ["data/a.csv", "lib/rackbook/a.py", "mine.csv", "01_one.ipynb"])
@pytest.mark.parametrize("change", ["written", "replaced"])
def test_what_changed_while_it_ran_is_named_and_makes_no_result(place, name, change):
    path, digests = place / name, inputs.Digests()
    at = {"points_path": str(place / "mine.csv")}
    made(place, at, digests=digests)  # what a runner hashed before is no excuse
    text = path.read_text()
    other = text.replace("a", "b", 1).replace("1", "2", 1)
    with pytest.raises(inputs.ChangedError, match=f"changed while the notebook ran.*: .*{name}$"):
        made(place, at, lambda: path.write_text(other) if change == "written" else replaced(path, other), digests)


def test_a_file_that_went_while_it_ran_is_a_change(place):
    with pytest.raises(inputs.ChangedError, match=r"data/a\.csv$"):
        made(place, meanwhile=(place / "data" / "a.csv").unlink)


def test_a_file_that_came_into_a_folder_of_the_user_while_it_ran_is_a_change(place):
    at = {"points_path": str(place / "data")}
    with pytest.raises(inputs.ChangedError, match=r"data/c\.csv$"):
        made(place, at, meanwhile=lambda: (place / "data" / "c.csv").write_text("c"))


def test_no_clock_is_asked(place):
    for path in place.rglob("*"):
        os.utime(path, (4e9, 4e9))  # far ahead of this machine's
    trace(place, "lib/rackbook/a.py", "data/a.csv", "data")
    found, nb, values = made(place, {"points_path": str(place / "mine.csv")})
    assert still_current(found, nb, values)


def test_a_file_that_takes_the_place_of_another_is_hashed_anew(place):
    digests = inputs.Digests()
    before = digests.path(place / "data" / "a.csv")
    replaced(place / "data" / "a.csv", "data/b.csv")
    assert digests.path(place / "data" / "a.csv") != before


def test_what_is_out_of_date_is_named(place):
    found, nb, values = made(place)
    (place / "data" / "a.csv").write_text("changed")
    assert [name.rpartition("/")[2] for name in inputs.Digests().changes(found, nb, values)] == ["a.csv"]


def test_without_a_trace_there_is_no_result(place):
    (place / "trace.json").unlink()
    with pytest.raises(DataError, match="the kernel left no list of what it read"):
        made(place)
