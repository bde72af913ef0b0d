"""Sweeps of small notebooks: what is kept, what is run again, and what happens when something breaks."""

from __future__ import annotations

import errno
import http.server
import json
import os
import subprocess
import threading
from pathlib import Path

import polars as pl
import pytest
import small_sweep
from small_notebooks import notebook, record, register_experiment, show_chart, spec

from rackbook import cli
from rackbook.suite import copies, index, inputs, leases, store, sweep_report, sweeps
from rackbook.suite.notebooks import discover, load_json, source

SECRET = "sk-4f1d0e77aa31-not-for-outputs"
TEXT = "it's \"x\"\\\n'''__import__('os').system('touch pwned')"

FIRST = """\
name = "first"
[[sweep]]
notebooks = ["01"]
grid = { rate = [0.25, 0.5] }
set = { label = %s, limit = 1e300 }
[[sweep]]
notebooks = ["02"]
seeds = [1, 2]
""" % json.dumps(TEXT)  # noqa: UP031 - the text has braces


class Place:
    """A folder with notebooks, a suite and its results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"

    def notebook(self, name: str, *cells: str, **options) -> Path:
        return notebook(self.folder / "nb", name, *cells, **options)

    def arguments(self, text: str, *more: object) -> list[str]:
        (self.folder / "suite.toml").write_text(text)
        fixed = ["sweep", self.folder / "suite.toml", "--notebooks", self.folder / "nb", "--out", self.out]
        return [str(word) for word in (*fixed, *more)]

    def run(self, text: str, *more: object) -> int:
        with pytest.raises(SystemExit) as end:
            cli.main(self.arguments(text, *more))
        return end.value.code

    def index(self) -> pl.DataFrame:
        return pl.read_parquet(self.out / "index.parquet")

    def done(self) -> dict[str, Path]:
        return {p.name: p for p in (self.out / "executions").iterdir()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for topic in small_sweep.TOPICS:
        register_experiment(monkeypatch, topic)
    return Place(tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A sweep of four executions of which one fails, run once for all tests that only look at it."""
    made = Place(tmp_path_factory.mktemp("first"))
    made.notebook(
        "01_one", "print(repr(label), limit)", "open('own.txt', 'w').write(str(rate))",
        "from IPython.display import display\n" + show_chart(spec(title={"text": "Dots", "subtitle": "few"})),
        f"import json\nc = json.loads({json.dumps(spec('rates'))!r})\nc['data']['values'][0]['a'] = rate\n"
        "display({'application/vnd.vegalite.v5+json': c, 'text/plain': 'c'}, raw=True)",
    )  # fmt: skip
    made.notebook("02_two", "assert seed != 2, 'two is not allowed'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        for topic in small_sweep.TOPICS:
            register_experiment(patch, topic)
        made.status = made.run(FIRST)
    return made


def test_everything_that_can_be_complete_is_and_the_failure_shows_in_the_exit_status(first):
    assert first.status == 1
    assert first.index().group_by("status").len().sort("status").rows() == [("done", 3), ("failed", 1)]


def test_a_parameter_is_data_in_the_notebook_whatever_it_holds(first):
    for folder in first.done().values():
        content = load_json(folder / "notebook.ipynb")
        if content["metadata"]["rackbook"]["notebook"] != "01_one":
            continue
        (injected,) = [c for c in content["cells"] if "injected-parameters" in c["metadata"].get("tags", [])]
        compile(source(injected), "cell", "exec")
        streams = [o for c in content["cells"] for o in c.get("outputs", []) if o["output_type"] == "stream"]
        assert "".join(streams[0]["text"]) == f"{TEXT!r} 1e+300\n"
    assert not list(first.folder.rglob("pwned"))


def test_each_execution_has_a_working_folder_of_its_own_which_is_kept(first):
    kept = {p.read_text() for p in first.out.glob("executions/*/files/own.txt")}
    assert kept == {"0.25", "0.5"}


def test_no_variable_of_the_environment_reaches_what_is_written(first):
    for path in first.out.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_the_index_says_what_failed_why_and_with_which_parameters(first):
    (row,) = first.index().filter(pl.col("status") == "failed").to_dicts()
    assert row["notebook"] == "02_two"
    assert (row["cause"], row["error"]) == ("notebook", "AssertionError: two is not allowed")
    assert row["p_seed"] == 2
    assert json.loads(row["parameters"])["seed"] == 2
    assert (first.out / row["folder"] / "notebook.ipynb").is_file()
    done = first.index().filter(pl.col("notebook") == "01_one")
    assert sorted(done["p_rate"]) == [0.25, 0.5]
    assert done["p_sizes"].to_list() == ["[1, 2]", "[1, 2]"]
    assert done["duration_s"].min() > 0


def test_the_report_is_one_page_with_the_table_the_charts_and_the_failure(first):
    page = (first.out / "report" / "sweep-first.html").read_text()
    assert "4 executions: 3 done, 1 failed, 0 not run yet." in page
    assert page.count("AssertionError: two is not allowed") >= 2
    assert "the same in every execution, so shown once" in page  # the chart that does not depend on the rate
    assert "rate 0.25" in page
    assert "rate 0.5" in page
    assert "http://" not in page.replace("http://www.w3.org/", "").split("<script>")[0]


def test_what_is_complete_is_not_run_again_and_what_failed_is(first, capsys, monkeypatch):
    for topic in small_sweep.TOPICS:
        register_experiment(monkeypatch, topic)
    before = {name: p.stat().st_mtime_ns for name, p in first.done().items()}
    assert first.run(FIRST) == 1
    said = capsys.readouterr().err
    assert "4 executions, 3 done, 1 to run" in said
    assert "[1/1] 02_two seed=2" in said
    assert {name: p.stat().st_mtime_ns for name, p in first.done().items()} == before
    assert first.run(FIRST, "--keep-failed") == 1
    assert "02_two seed=2 " not in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_writes_nothing(place, capsys):
    place.notebook("01_one")
    assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2]\ngpus = 2\ntimeout_s = 600", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "01_one                            2      0      2     2       20  at most: GPUs × time limit" in printed
    assert "2 executions, 0 done, 2 to run; about 40 GPU minutes" in printed
    assert "01_one seed=2" in printed
    assert not place.out.exists()


def test_a_changed_notebook_and_a_changed_file_run_again_exactly_what_depends_on_them(place, capsys):
    place.notebook("01_one", "text = open(points_path).read() if points_path else ''")
    place.notebook("02_two")
    (place.folder / "mine.csv").write_text("1")
    text = (
        "[[sweep]]\nnotebooks = ['01']\nlist = [ { points_path = 'mine.csv' }, { rate = 0.25 } ]\n"
        "[[sweep]]\nnotebooks = ['02']\n"
    )
    assert place.run(text) == 0
    (place.folder / "mine.csv").write_text("2")
    capsys.readouterr()
    assert place.run(text) == 0
    said = capsys.readouterr().err
    assert "3 executions, 2 done, 1 to run" in said
    assert "01_one points_path=" in said
    place.notebook("02_two", "x = 1")
    assert place.run(text) == 0
    said = capsys.readouterr().err
    assert "3 executions, 2 done, 1 to run" in said
    assert "[1/1] 02_two" in said
    assert len(place.done()) == 5  # nothing old is deleted
    assert sorted(place.index()["status"]) == ["done"] * 3 + ["outdated"] * 2


@pytest.fixture
def data(place, monkeypatch):
    """A folder of data that counts as the library's, with one file, which notebook 01 reads."""
    folder = place.folder / "data"
    folder.mkdir()
    (folder / "a.csv").write_text("1")
    monkeypatch.setattr(inputs, "_ROOTS", {"data": folder})
    return folder


def test_a_file_with_a_time_ahead_of_this_machines_clock_is_no_change(place, data):
    os.utime(data / "a.csv", (4e9, 4e9))
    place.notebook("01_one", f"print(open({str(data / 'a.csv')!r}).read())")
    assert place.run("[[sweep]]\nnotebooks = ['01']") == 0
    (listed,) = [json.loads(path.read_text()) for path in (place.out / "inputs").iterdir()]
    assert list(listed["data"]) == ["a.csv"]


REPLACE = """\
import os, pathlib, shutil
path, new = pathlib.Path({path!r}), pathlib.Path({new!r})
print(path.read_text())
if new.exists():
    shutil.copystat(path, new)
    new.replace(path)
"""


def test_a_file_that_is_replaced_while_it_is_read_is_named_and_read_again(place, data, capsys):
    (place.folder / "new").write_text("2")
    place.notebook("01_one", REPLACE.format(path=str(data / "a.csv"), new=str(place.folder / "new")))
    assert place.run("[[sweep]]\nnotebooks = ['01']") == 0
    said = capsys.readouterr().err
    assert "01_one: tried again after: changed while the notebook ran" in said
    assert "data/a.csv" in said
    (folder,) = place.done().values()
    content = load_json(folder / "notebook.ipynb")
    assert "".join(content["cells"][2]["outputs"][0]["text"]) == "2\n"  # of the file that is there now
    assert place.index().select("status", "attempts").rows() == [("done", 2)]


def test_a_file_that_changes_each_time_is_a_failure_that_names_it(place, data, capsys):
    place.notebook("01_one", f"path = {str(data / 'a.csv')!r}\ntext = open(path).read()\nopen(path, 'a').write('1')")
    assert place.run("[[sweep]]\nnotebooks = ['01']\nretries = 1") == 1
    (row,) = place.index().to_dicts()
    assert (row["status"], row["cause"], row["attempts"]) == ("failed", "input changed", 2)
    assert row["error"].endswith("data/a.csv")


def test_what_is_out_of_date_in_the_end_is_named(place, data, capsys):
    place.notebook("01_one", f"print(open({str(data / 'a.csv')!r}).read())")
    place.notebook("02_two", f"open({str(data / 'a.csv')!r}, 'a').write('1')")
    assert place.run("[[sweep]]\nnotebooks = ['01']") == 0
    assert place.run("[[sweep]]\nnotebooks = ['01', '02']", "--jobs", "1") == 1  # it counted when that started
    said = capsys.readouterr()
    said = said._replace(out=said.out.partition("executions/\n")[2])
    assert said.out.startswith("1 of 2 executions complete, 1 not")
    assert "note: 01_one: its result is out of date, " in said.err
    assert "data/a.csv has changed" in said.err


def look(place, text: str) -> str:
    """Write index and report over what is there, without running anything; the report."""
    (place.folder / "suite.toml").write_text(text)
    results, sweep = store.Store(place.out), sweeps.read(place.folder / "suite.toml", discover(place.folder / "nb"))
    complete = results.complete(sweep.executions)
    return sweep_report.write(sweep, results, complete, index.write(results, sweep.executions, complete)).read_text()


def test_a_rerun_that_fails_shows_beside_the_result_that_is_out_of_date(place, capsys):
    text = "[[sweep]]\nnotebooks = ['01']"
    first = place.notebook("01_one").read_text()
    assert place.run(text) == 0
    place.notebook("01_one", "1 / 0")
    assert place.run(text) == 1
    assert sorted(place.index()["status"]) == ["failed", "outdated"]
    assert "1 executions: 0 done, 1 failed, 0 not run yet" in look(place, text)
    capsys.readouterr()
    assert place.run(text, "--keep-failed") == 1
    assert "[1/1]" not in capsys.readouterr().err
    (place.folder / "nb" / "01_one.ipynb").write_text(first)
    assert place.run(text) == 0
    assert place.index()["status"].to_list() == ["done"]  # the old result counts again, and the failure no more


def test_what_is_out_of_date_and_not_run_again_is_no_failure(place):
    text = "[[sweep]]\nnotebooks = ['01']"
    place.notebook("01_one", "1 / 0")
    assert place.run(text) == 1
    place.notebook("01_one", "x = 1")
    assert place.run(text) == 0
    assert place.index().select("status", "attempts").rows() == [("done", 2)]
    place.notebook("01_one", "x = 2")
    page = look(place, text)
    assert "1 executions: 0 done, 0 failed, 1 out of date, 0 not run yet" in page
    assert "out of date: what it depends on has changed since" in page
    assert sorted(place.index()["status"]) == ["outdated", "waiting"]  # the failure was overcome


def test_the_values_found_stand_beside_the_published_ones(place):
    varying = record("one", basis="simulated", verdict="reproduced")
    yes = record("one", id="one.two", statement="Two is two.", value=True, found=True, unit="")
    place.notebook(
        "01_one", f"import json\nr = json.loads({json.dumps([varying, yes])!r})\nr[0]['found'] = rate",
        "from IPython.display import display\n"
        "display({'application/vnd.rackbook.verdicts+json': r, 'text/plain': 'v'}, raw=True)",
        verdicts=False,
    )  # fmt: skip
    assert place.run("name = 'v'\n[[sweep]]\nnotebooks = ['01']\ngrid = { rate = [0.25, 0.95] }") == 0
    found = place.index().explode("claims").unnest("claims").sort("claim", "p_rate")
    assert found.select("claim", "p_rate", "published", "found", "unit", "verdict").rows() == [
        ("one.one", 0.25, 1.0, 0.25, "ms", "reproduced"),
        ("one.one", 0.95, 1.0, 0.95, "ms", "reproduced"),
        ("one.two", 0.25, 1.0, 1.0, "yes/no", "consistent"),
        ("one.two", 0.95, 1.0, 1.0, "yes/no", "consistent"),
    ]
    page = (place.out / "report" / "sweep-v.html").read_text()
    assert "One is one. Published: 1 ms; here: 0.25 to 0.95 ms; 2 reproduced" in page
    assert "-0.75" in page
    assert "Two is two." not in page
    assert "1 more came out the same in each" in page


def test_odd_files_in_the_working_folder_are_kept_and_stop_nothing(place):
    place.notebook(
        "01_one", "import os, socket\nos.symlink('nowhere', 'link')\nos.mkfifo('pipe')\n"
        "socket.socket(socket.AF_UNIX).bind('socket')"
    )  # fmt: skip
    assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2]", "--jobs", "1") == 0
    for folder in place.done().values():
        assert sorted(p.name for p in (folder / "files").iterdir()) == ["link", "pipe", "socket"]


def test_files_that_cannot_be_kept_fail_their_execution_and_no_other(place, monkeypatch):
    place.notebook("01_one")
    whole, calls = store._sync_tree, []

    def sync(folder):
        calls.append(folder)
        if len(calls) == 1:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "files/secret")
        whole(folder)

    monkeypatch.setattr(store, "_sync_tree", sync)
    assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2]", "--jobs", "1") == 1
    rows = place.index().sort("status").select("status", "error").rows()
    assert [status for status, _ in rows] == ["done", "failed"]
    assert rows[1][1].startswith("its files cannot be kept: [Errno 13] Permission denied")


def test_an_address_is_no_folder_for_results(place, capsys, monkeypatch):
    monkeypatch.chdir(place.folder)
    place.notebook("01_one")
    place.out = "s3://bucket/x"
    assert place.run("[[sweep]]\nnotebooks = ['01']") == 2
    assert "--out: got the address s3://bucket/x, allowed: a folder" in capsys.readouterr().err
    assert not (place.folder / "s3:").exists()


def test_a_killed_kernel_is_tried_again_and_a_failed_notebook_is_not(place, capsys):
    kill_once = (
        "import os, signal, pathlib\nmark = pathlib.Path({!r})\n"
        "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    place.notebook("01_one", kill_once.format(str(place.folder / "mark")))
    place.notebook("02_two", "1 / 0")
    assert place.run("[[sweep]]\nnotebooks = ['01', '02']") == 1
    said = capsys.readouterr().err
    assert "01_one: tried again after: KernelDied" in said
    assert "02_two: tried again" not in said
    rows = place.index().select("notebook", "status", "attempts").rows()
    assert rows == [("01_one", "done", 2), ("02_two", "failed", 1)]


def test_what_uses_too_much_memory_or_time_is_ended_and_says_so(place):
    place.notebook("01_one", "kept = bytearray(500_000_000)\nfor i in range(0, len(kept), 4096):\n    kept[i] = 1\n"
                   "import time\ntime.sleep(30)")  # fmt: skip
    place.notebook("02_two", "import time\ntime.sleep(60)")
    text = "[[sweep]]\nnotebooks = ['01']\nmemory_gib = 0.25\n[[sweep]]\nnotebooks = ['02']\ntimeout_s = 2"
    assert place.run(text) == 1
    rows = {row["notebook"]: row for row in place.index().to_dicts()}
    assert rows["01_one"]["cause"] == "memory limit"
    assert "GiB of memory, allowed: 0.25" in rows["01_one"]["error"]
    assert rows["02_two"]["cause"] == "time limit"
    assert [row["attempts"] for row in rows.values()] == [1, 1]


def test_a_full_disk_stops_the_sweep_keeps_what_is_complete_and_can_be_resumed(place, monkeypatch, capsys):
    place.notebook("01_one")
    text = "[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2, 3]"
    whole, calls = store._sync_tree, []

    def sync(folder):
        calls.append(folder)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(folder)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_sync_tree", sync)
        assert place.run(text, "--jobs", "1") == 3
    said = capsys.readouterr().err
    assert "cannot write here: No space left on device; what is complete is kept" in said
    assert len(calls) == 2  # no further execution was started for nothing
    assert len(place.done()) == 1
    assert place.run(text) == 0
    assert len(place.done()) == 3


def test_a_disk_that_is_full_when_the_index_is_written_stops_the_sweep(place, monkeypatch, capsys):
    place.notebook("01_one")

    def write(path, _):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", write)
    assert place.run("[[sweep]]\nnotebooks = ['01']") == 3
    assert "No space left on device" in capsys.readouterr().err


def test_no_space_for_temporary_files_stops_the_sweep_at_the_first(place, monkeypatch, capsys):
    place.notebook("01_one")
    full = place.folder / "full"
    full.mkdir()
    # the worker's kernel finds no room for its own files
    (full / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "if 'rackbook.suite.worker' in sys.orig_argv:\n"
        "    from rackbook.suite import kernels\n"
        "    def private_environment(*_):\n"
        "        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "    kernels.private_environment = private_environment\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(full), prepend=os.pathsep)
    assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2, 3]", "--jobs", "1") == 3
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "temporary files: " in said
    assert "tried again" not in said
    assert set(place.index()["status"]) == {"waiting"}


def test_a_really_full_disk_leaves_nothing_half_written(place, tmp_path, capsys):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(small)], capture_output=True, check=False
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("a file system of a few kilobytes cannot be mounted here: needs root")
    try:
        place.out = small / "out"
        place.notebook("01_one", "print('x' * 50_000)")
        assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2, 3, 4, 5, 6]", "--jobs", "1") == 3
        assert "No space left on device" in capsys.readouterr().err
        for folder in place.out.glob("executions/[!.]*"):
            assert json.loads((folder / "result.json").read_text())["outcome"]["succeeded"]
            load_json(folder / "notebook.ipynb")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_two_runs_on_one_folder_share_the_work(place):
    place.notebook("01_one", "import time\ntime.sleep(0.5)")
    arguments = place.arguments("[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2, 3, 4]", "--jobs", "1")
    runs = [small_sweep.start(*arguments) for _ in range(2)]
    said = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert len(place.done()) == 4
    lines = [line for text in said for line in text.splitlines() if line.startswith("[")]
    assert sum("  ok" in line for line in lines) == 4
    assert place.index()["attempts"].to_list() == [1, 1, 1, 1]


def test_an_execution_sees_its_gpus_and_no_others(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(leases, "listed", dict)  # no driver contradicts
    place.notebook("01_one", "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])")
    text = "[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2]\ngpus = 1\n[[sweep]]\nnotebooks = ['01']\nseeds = [3]"
    assert place.run(text) == 0
    printed = {}
    for folder in place.done().values():
        content = load_json(folder / "notebook.ipynb")
        (stream,) = [o for c in content["cells"] for o in c.get("outputs", []) if o["output_type"] == "stream"]
        printed[content["metadata"]["rackbook"]["parameters"]["seed"]] = "".join(stream["text"]).strip()
    assert printed[3] == ""
    assert {printed[1], printed[2]} <= {"4", "5"}
    assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [9]\ngpus = 3") == 2
    assert place.run("[[sweep]]\nnotebooks = ['01']\nseeds = [9]\ngpus = 1", "--gpus", "0") == 2


class _Shelf(http.server.BaseHTTPRequestHandler):
    """Takes what is put and keeps it; refuses the first."""

    kept: dict[str, bytes]

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        refused = not self.kept and self.kept.setdefault("refused", b"") == b""
        if not refused:
            self.kept[self.path] = body
        self.send_response(503 if refused else 201)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_notebooks_are_copied_to_a_folder_and_to_an_address_once(first, tmp_path, monkeypatch, capsys):
    for topic in small_sweep.TOPICS:
        register_experiment(monkeypatch, topic)
    first.run(FIRST, "--keep-failed", "--copy-to", tmp_path / "other")
    copied = sorted(p.relative_to(tmp_path / "other") for p in (tmp_path / "other").rglob("*.ipynb"))
    assert [str(p.parent) for p in copied] == ["01_one", "01_one", "02_two"]
    assert {p.stem for p in copied} == first.done().keys()
    _Shelf.kept = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Shelf)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/sweep"
    try:
        assert first.run(FIRST, "--keep-failed", "--copy-to", address) == 3
        assert "not copied to http://127.0.0.1" in capsys.readouterr().err
        assert len(_Shelf.kept) == 3  # the refusal and two notebooks
        first.run(FIRST, "--keep-failed", "--copy-to", address)
        assert len(_Shelf.kept) == 4
        _Shelf.kept = {"refused": b"", "seen": b""}
        first.run(FIRST, "--keep-failed", "--copy-to", address)
        assert len(_Shelf.kept) == 2  # nothing is sent again
    finally:
        server.shutdown()
        server.server_close()
    assert first.run(FIRST, "--keep-failed", "--copy-to", "ftp://somewhere/x") == 2
    assert "allowed: a folder, or an address with" in capsys.readouterr().err


def test_the_key_of_an_address_stays_at_its_end_and_is_kept_nowhere(first, monkeypatch):
    place, sent = "abs://account.blob.core.windows.net/container/folder", []
    monkeypatch.setattr(copies, "_writer", lambda _: lambda text, address: sent.append(address))
    results = store.Store(first.out)
    assert list(copies.send(first.done(), results, f"{place}/?sv=1&sig=SECRET")) == []
    named = {
        name: load_json(folder / "notebook.ipynb")["metadata"]["rackbook"] for name, folder in first.done().items()
    }
    wanted = [f"{place}/{told['notebook']}/{name}.ipynb?sv=1&sig=SECRET" for name, told in named.items()]
    assert sorted(sent) == sorted(wanted)
    assert not [p for p in (first.out / "copied").rglob("*") if p.is_file() and "SECRET" in p.read_text()]
    assert list(copies.send(first.done(), results, f"{place}?sv=1&sig=RENEWED")) == []
    assert len(sent) == 3  # a new key is no new place

    def refuse(text, address):
        raise OSError(f"no access to {address}")

    monkeypatch.setattr(copies, "_writer", lambda _: refuse)
    problems = list(copies.send(first.done(), results, "s3://bucket/x?sig=SECRET"))
    assert len(problems) == 3
    assert not any("SECRET" in problem for problem in problems)


def test_a_result_that_somebody_damaged_is_listed_as_such(place):
    place.notebook("01_one")
    text = "[[sweep]]\nnotebooks = ['01']"
    assert place.run(text) == 0
    (folder,) = place.done().values()
    (folder / "result.json").write_text("{")
    (place.out / "index.parquet").unlink()
    place.run(text)
    assert place.index().select("status", "cause").rows() == [("failed", "damaged")]


def test_forked_and_fresh_kernels_give_the_same(place, monkeypatch):
    place.notebook("01_one", "import polars as pl, sys\nprint(sys.argv[0].rpartition('/')[2])\n"
                   "frame = pl.DataFrame({'a': range(1000)})\n"
                   "print(frame.group_by(b=pl.col('a') % 7).agg(pl.sum('a')).sort('b').rows())")  # fmt: skip
    text = "[[sweep]]\nnotebooks = ['01']\nseeds = [1, 2]"
    assert place.run(text) == 0
    monkeypatch.setenv("RACKBOOK_FRESH_KERNELS", "1")
    place.out = place.folder / "fresh"
    assert place.run(text) == 0
    streams = set()
    for folder in [*place.folder.glob("out/executions/*"), *place.folder.glob("fresh/executions/*")]:
        content = load_json(folder / "notebook.ipynb")
        streams.add("".join("".join(o["text"]) for c in content["cells"] for o in c.get("outputs", []) if "text" in o))
    assert len(streams) == 1
    assert "ipykernel_launcher.py" in streams.pop()


def test_a_sweep_of_the_short_form_needs_several_values_for_its_options(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "06", "-p", "confidence", "0.9", "--copy-to", "/tmp/x"])
    assert end.value.code == 2
    assert "--copy-to belongs to a sweep; give a number several values" in capsys.readouterr().err
