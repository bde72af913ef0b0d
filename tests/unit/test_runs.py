"""Run folders: what was written comes back; what was not finished, or changed since, is never read as a result."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from pydantic import BaseModel

from rackbook import runs
from rackbook.errors import DataError

MACHINE = {"cpu": "made up", "cores": 2}


class Settings(BaseModel):
    lag_s: float = 2.0
    ranks: list[int] = [2, 4]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    monkeypatch.setenv("RACKBOOK_RUNS", str(folder))
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "committed")
    return folder


POINTS = pl.DataFrame({"context_tokens": [1024, 2048], "step_ms": [1.1, 0.1 + 0.2], "model": ["a, b", None]})


def recorded(topic="context_sweep", params=None, points=POINTS):
    with runs.record(topic, params or Settings(), machine=MACHINE) as run:
        run.write_text("server.log", "ready\n")
        run.write_json("bench.json", {"completed": 3})
        run.write_points(points)
        run.flag("the client fell behind")
        run.flag("the client fell behind")
        run.describe(vllm="0.32.0")
    return run.id


def test_what_was_written_comes_back():
    stored = runs.read(recorded())
    assert stored.experiment == "context_sweep"
    assert stored.params == {"lag_s": 2.0, "ranks": [2, 4]}
    assert stored.flags == ("the client fell behind",)
    assert stored.provenance["machine"] == MACHINE
    assert stored.provenance["vllm"] == "0.32.0"
    assert stored.provenance["duration_s"] >= 0
    assert stored.raw("server.log").read_text() == "ready\n"
    assert json.loads(stored.raw("bench.json").read_text()) == {"completed": 3}
    points = stored.points()
    assert points.select(POINTS.columns).equals(POINTS)  # every bit of the floats
    assert points["origin"].to_list() == ["measured"] * 2
    assert points["source"].to_list() == [stored.id] * 2


def test_an_empty_text_is_not_a_missing_one():
    frame = pl.DataFrame({"model": ["", None]})
    assert runs.read(recorded(points=frame)).points()["model"].to_list() == ["", None]


def test_the_id_names_topic_time_and_parameters(home):
    first, second = recorded(), recorded(params={"lag_s": 3.0})
    topic, date, at, digest = first.split("-")
    assert (topic, len(date), len(at), len(digest)) == ("context_sweep", 8, 6, 4)
    assert second.split("-")[3] != digest
    assert sorted(p.name for p in home.iterdir()) == sorted([first, second])


def test_two_equal_runs_get_two_folders():
    assert recorded() != recorded()


def test_a_run_is_found_by_id_or_folder_and_listed_newest_first(home):
    first = recorded()
    second = recorded(topic="engine_gap")
    third = recorded(params={"lag_s": 1})
    assert runs.read(home / first).id == first
    assert [run.id for run in runs.stored("context_sweep")] == [third, first] or first.split("-")[:3] == third.split(
        "-"
    )[:3]
    assert {run.id for run in runs.stored()} == {first, second, third}
    assert runs.unfinished() == []


def test_newest_first_goes_by_time(home):
    ids = []
    for day in ("02", "03", "01"):
        ids.append(recorded(params={"day": day}))
        path = home / ids[-1] / "run.json"
        content = json.loads(path.read_text())
        content["provenance"]["started_utc"] = f"2026-11-{day}T00:00:00+00:00"
        path.write_text(json.dumps(content))
    assert [run.id for run in runs.stored()] == [ids[1], ids[0], ids[2]]


def test_an_unknown_id_lists_what_there_is():
    known = recorded()
    with pytest.raises(DataError, match=f"unknown run: got '{known[:-1]}'.*{known}"):
        runs.read(known[:-1])


@pytest.mark.parametrize("problem", [ValueError("the server died"), KeyboardInterrupt(), SystemExit(143)])
def test_a_run_that_stops_is_kept_reported_and_not_read(home, problem):
    recording = runs.record("context_sweep", Settings(), machine=MACHINE)
    with pytest.raises(type(problem)), recording as run:  # noqa: PT012 - the block is what stops
        run.write_points(POINTS)
        raise problem
    assert runs.stored() == []
    (left,) = runs.unfinished()
    assert left.id == run.id
    assert type(problem).__name__ in left.reason
    assert (left.path / "points.csv").is_file()
    for name in (run.id, home / f".{run.id}.partial"):
        with pytest.raises(DataError, match="never finished: it stopped with"):
            runs.read(name)


def test_a_run_whose_process_is_killed_is_reported_and_not_read(home):
    code = (
        "import time\nfrom rackbook import runs\n"
        "with runs.record('context_sweep', {'a': 1}, machine={}) as run:\n"
        "    run.write_text('server.log', 'half')\n    print(run.id, flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    run_id = child.stdout.readline().strip()
    with pytest.raises(DataError, match=f"process {child.pid} may still be writing it"):
        runs.read(run_id)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with pytest.raises(DataError, match="never finished: its process was killed"):
        runs.read(run_id)
    assert [left.id for left in runs.unfinished()] == [run_id]


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def change(path):
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"9" + content[-1:])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: cut(folder / "points.csv"), "points.csv: got .* bytes, recorded .*truncated"),
        (lambda folder: change(folder / "points.csv"), "points.csv: content changed"),
        (lambda folder: (folder / "server.log").unlink(), "server.log: is missing"),
        (lambda folder: cut(folder / "run.json"), "not readable JSON"),
        (lambda folder: (folder / "run.json").write_text("[]"), "expected an object"),
        (lambda folder: (folder / "run.json").write_text('{"format": 2}'), "got run format 2, this version reads 1"),
        (lambda folder: (folder / "run.json").write_text('{"format": 1}'), "not a run's record"),
        (lambda folder: (folder / "run.json").unlink(), "never finished"),
    ],
)
def test_a_damaged_run_is_an_error_and_hides_no_other(home, damage, words):
    broken, whole = recorded(), recorded(topic="engine_gap")
    damage(home / broken)
    with pytest.raises(DataError, match=words):
        runs.read(broken)
    assert [run.id for run in runs.stored()] == [whole]
    (left,) = runs.unfinished()
    assert left.id == broken


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (POINTS.clear(), "no point"),
        (pl.DataFrame({"latency": [1.0]}), "unknown column: got 'latency'"),
        (pl.DataFrame({"step_ms": [1.0, float("nan")]}), "column step_ms: got NaN or infinity"),
        (pl.DataFrame({"step_ms": [float("inf")]}), "column step_ms: got NaN or infinity"),
        (pl.DataFrame({"step_ms": [-1.0]}), "column step_ms: got a value out of range, allowed: a number ≥ 0"),
        (pl.DataFrame({"context_tokens": [1.5]}), "column context_tokens: got a fraction"),
        (pl.DataFrame({"step_ms": ["fast"]}), "conversion from `str` to `f64`"),
    ],
)
def test_points_that_are_none_are_refused(frame, words):
    with pytest.raises(DataError, match=words):
        recorded(points=frame)


@pytest.mark.parametrize("name", ["../run.json", "run.json", "a/b", "failed.json"])
def test_a_file_name_stays_in_the_folder(name):
    with pytest.raises(DataError, match="allowed: a plain name"), runs.record("a", {}, machine=MACHINE) as run:
        run.raw(name)


def test_nan_is_no_plain_value():
    with pytest.raises(DataError, match="not plain finite values"), runs.record("a", {}, machine=MACHINE) as run:
        run.write_json("a.json", {"x": float("nan")})
    with pytest.raises(DataError, match="parameters of a"), runs.record("a", {"x": float("inf")}, machine=MACHINE):
        pass


def test_raw_files_are_freed_of_secrets_when_the_run_ends(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "abcdefghijklmnop")
    with runs.record("a", {}, machine=MACHINE) as run:
        run.raw("server.log").write_text("key abcdefghijklmnop accepted\n")
        run.raw("binary").write_bytes(b"\xff\x00abc")
        run.write_points(POINTS)
    stored = runs.read(run.id)
    assert stored.raw("server.log").read_text() == "key *** accepted\n"
    assert stored.raw("binary").read_bytes() == b"\xff\x00abc"


SECRET = "hf_abcdefghijklmnopqrstuvwx"
WRITES = """
import os, sys, time
from rackbook import runs
with runs.record("context_sweep", {"a": 1}, machine={}) as run:
    log = run.raw("forward.host0.log").open("w")
    print("read with", os.environ["HF_TOKEN"], file=log, flush=True)
    (run.folder / "work").mkdir()
    (run.folder / "work" / "rank0.log").write_text(os.environ["HF_TOKEN"])
    run.raw("binary").write_bytes(b"\\xff\\x00abc")
    print(run.id, flush=True)
    sys.stdin.readline()
    raise ValueError("ended with " + os.environ["HF_TOKEN"])
"""


@pytest.fixture
def writer(home, monkeypatch):
    """A process that records a run, its secret in raw files, and fails when a line comes in; and the run's folder."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=os.environ,
    )  # fmt: skip
    yield child, home / f".{child.stdout.readline().strip()}.partial"
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def leaks(folder):
    return [p.name for p in sorted(folder.rglob("*")) if p.is_file() and SECRET.encode() in p.read_bytes()]


def test_a_run_that_stops_keeps_no_secret(writer):
    child, folder = writer
    child.communicate("\n")
    assert leaks(folder) == []
    assert (folder / "forward.host0.log").read_text() == "read with ***\n"
    assert (folder / "binary").read_bytes() == b"\xff\x00abc"
    (left,) = runs.unfinished()
    assert "it stopped with ValueError: ended with ***" in left.reason


def test_a_killed_run_is_freed_of_secrets_when_it_is_next_seen_and_a_living_one_left_alone(writer):
    child, folder = writer
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (left,) = runs.unfinished()
    assert f"process {child.pid} may still be writing it" in left.reason
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    child.kill()
    child.wait()
    assert leaks(folder) == ["forward.host0.log", "rank0.log"]
    (left,) = runs.unfinished()
    assert "its process was killed" in left.reason
    assert leaks(folder) == []
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (left,) = runs.unfinished()
    assert "its process was killed" in left.reason
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == after  # once is enough


def test_a_run_that_another_host_writes_is_left_alone(writer):
    _, folder = writer
    started = json.loads((folder / "started.json").read_text())
    (folder / "started.json").write_text(json.dumps(started | {"pid": 2**22 + 1}))  # no process of this host
    (left,) = runs.unfinished()
    assert "may still be writing it" in left.reason
    assert leaks(folder) == ["forward.host0.log", "rank0.log"]


def test_a_folder_that_cannot_be_written_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / name))
        with pytest.raises(DataError, match="(is no folder|cannot write runs here).*set RACKBOOK_RUNS"):
            recorded()


def test_unknown_tables_and_files_are_named():
    stored = runs.read(recorded())
    with pytest.raises(DataError, match="table of points: got 'point', allowed: points"):
        stored.points("point")
    with pytest.raises(DataError, match="file: got 'log', allowed: bench.json, points.csv, server.log"):
        stored.raw("log")


def test_committed_runs_are_read_and_a_damaged_one_is_an_error(home, tmp_path):
    run_id = recorded()
    (tmp_path / "committed").mkdir()
    (home / run_id).rename(tmp_path / "committed" / run_id)
    assert [run.id for run in runs.committed("context_sweep")] == [run_id]
    assert runs.committed("engine_gap") == []
    assert runs.read(run_id).path.parent.name == "committed"
    cut(tmp_path / "committed" / run_id / "server.log")
    with pytest.raises(DataError, match="truncated"):
        runs.committed("context_sweep")


def test_a_run_lasts_as_long_as_its_block():
    before = time.monotonic()
    with runs.record("a", {}, machine=MACHINE) as run:
        time.sleep(0.05)
        run.write_points(POINTS)
    assert 0.05 <= runs.read(run.id).provenance["duration_s"] <= time.monotonic() - before + 0.01


def test_runs_of_a_notebook_lie_where_the_command_line_looks(tmp_path, monkeypatch):
    monkeypatch.delenv("RACKBOOK_RUNS")
    checkout = Path(__file__).resolve().parents[2]
    for folder in (checkout, checkout / "notebooks"):
        monkeypatch.chdir(folder)
        assert runs.home() == checkout / "build" / "runs"
    monkeypatch.chdir(tmp_path)
    assert runs.home() == tmp_path / "build" / "runs"


def test_a_committed_copy_is_listed_once(home, tmp_path):
    run_id = recorded()
    shutil.copytree(home / run_id, tmp_path / "committed" / run_id)
    (found,) = runs.stored()
    assert found.path.parent.name == "committed"
