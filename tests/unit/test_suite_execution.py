"""A batch of small notebooks that succeed and fail in every way seen before; each test looks at one of them."""

import base64
import json
import os
import threading
import time
from pathlib import Path

import pytest
from small_notebooks import notebook, show_chart, show_verdicts, spec

from rackbook import pictures
from rackbook.suite import batch, execution, outcomes
from rackbook.suite.artefacts import charts, verdicts
from rackbook.suite.notebooks import discover, load_json, source
from rackbook.suite.tasks import Task

SHOWN = "import os, sys\nprint(seed, rate, label, fast, sizes, limit, os.getcwd(), sys.executable, sep='|')"
CHILD = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\nprint(child.pid)"

CASES = {
    "01_fine": ("#md ## A question?\n\nOne call.", show_chart(spec()), show_chart(spec("more")), SHOWN, CHILD),
    "02_error": ("x = 1", "1 / 0", "print('never')"),
    "03_exit": ("import sys\nsys.exit(0)", "print('never')"),
    "04_killed": (CHILD, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('never')"),
    "05_endless": ("x = 1", "import time\nwhile True:\n    time.sleep(0.01)"),
    "06_twins": (show_chart(spec()), "x = 1", show_chart(spec())),
    "07_worker": (
        "import os, signal\nos.kill(int(os.environ['JPY_PARENT_PID']), signal.SIGKILL)\nimport time\ntime.sleep(60)",
    ),
    "08_after": (SHOWN,),
    "09_silent": ("print('no verdicts')",),
    "10_nursery": ("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1)",),
}
VALUES = {"01_fine": {"seed": 7, "label": "0012", "fast": True, "sizes": [4], "limit": 2.5}}
TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("notebooks")
    for name, cells in CASES.items():
        notebook(made, name, *cells, verdicts=name != "09_silent")
    return made


@pytest.fixture(scope="module")
def before(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("out")
    for name in ("02_error", "07_worker"):  # what an earlier, successful run would have left
        stale = made / "charts" / name / "stale.svg"
        stale.parent.mkdir(parents=True)
        stale.write_text("<svg/>")
        (made / "notebooks").mkdir(exist_ok=True)
        (made / "notebooks" / f"{name}.ipynb").write_text('{"stale": true}')
    return made


BESIDE: list[str] = []
"""Threads in which the batch let this process do something else."""


@pytest.fixture(scope="module")
def results(folder, before, out, tmp_path_factory) -> dict[str, outcomes.Outcome]:
    decoy = tmp_path_factory.mktemp("decoy")
    (decoy / "kernels" / "python3").mkdir(parents=True)
    (decoy / "kernels" / "python3" / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false", "{connection_file}"], "display_name": "x", "language": "python"})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(decoy))
        found = batch.execute(
            discover(folder), VALUES, batch.Folders(out), timeout_s=TIMEOUT_S,
            meanwhile=lambda: BESIDE.append(threading.current_thread().name),
        )  # fmt: skip
    return {outcome.notebook: outcome for outcome in found}


def saved(out: Path, name: str) -> dict:
    return load_json(out / "notebooks" / f"{name}.ipynb")


def printed(content: dict) -> list[str]:
    streams = [o for c in content["cells"] for o in c.get("outputs", []) if o.get("name") == "stdout"]
    return ["".join(stream["text"]).strip() for stream in streams]


def test_one_that_fails_never_stops_the_others(results):
    assert list(results) == list(CASES)
    assert [name for name, outcome in results.items() if outcome.succeeded] == ["01_fine", "08_after", "10_nursery"]


def test_what_can_be_done_meanwhile_is_done_once_and_beside_the_notebooks(results):
    assert BESIDE == ["meanwhile"]


def test_parameters_arrive_typed_and_the_folder_is_the_notebooks(results, out, folder):
    words = printed(saved(out, "01_fine"))[0].split("|")
    assert words[:6] == ["7", "0.5", "0012", "True", "[4]", "2.5"]
    assert words[6] == str(folder)
    assert results["01_fine"].given == tuple(VALUES["01_fine"])
    assert results["01_fine"].parameters["rate"] == 0.5


def test_the_kernel_is_this_python_though_another_python3_is_on_the_jupyter_path(results, out):
    import sys

    assert printed(saved(out, "08_after"))[0].split("|")[7] == sys.executable


def test_charts_are_written_in_three_forms(results, out):
    found = {p.name for p in (out / "charts" / "01_fine").iterdir()}
    assert found == {f"{stem}.{end}" for stem in ("dots", "more") for end in ("svg", "png", "vl.json")}
    assert json.loads((out / "charts" / "01_fine" / "dots.vl.json").read_text()) == spec()
    assert "two of them" in (out / "charts" / "01_fine" / "dots.svg").read_text()
    assert (out / "charts" / "01_fine" / "dots.png").read_bytes().startswith(b"\x89PNG")


def test_the_executed_notebook_carries_its_outcome(results, out):
    outcome, content = outcomes.of_executed(out / "notebooks" / "01_fine.ipynb")
    assert outcome == results["01_fine"]
    assert verdicts(content)[0]["id"] == "fine.one"
    assert 0 < outcome.duration_s < 60


@pytest.mark.parametrize("name", ["01_fine", "04_killed"])
def test_what_a_cell_started_does_not_outlive_the_kernel(results, out, name):
    pid = int(printed(saved(out, name))[-1])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
            return  # dead, and its new parent has not looked yet
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("name", "cell", "reason"),
    [
        ("02_error", 3, "ZeroDivisionError: division by zero"),
        ("03_exit", 2, "SystemExit: status 0: the notebook stopped before its end"),
        ("04_killed", 3, "KernelDied: the kernel ended in this cell"),
        ("05_endless", 3, "TimeLimit: the notebook ran past its limit of 8 s; raise it: --timeout of"),
        ("06_twins", 4, "two charts have the name 'dots'"),
        ("09_silent", 2, "NotebookIncomplete: the last code cell shows no verdicts"),
    ],
)
def test_a_failure_says_why_and_marks_its_cell(results, out, name, cell, reason):
    outcome = results[name]
    assert outcome.reason.startswith(reason)
    assert outcome.failed_cell == cell
    content = saved(out, name)
    assert content["metadata"]["rackbook"]["succeeded"] is False
    marker = next(i for i, c in enumerate(content["cells"]) if "papermill-error-cell" in source(c) and i)
    failing = content["cells"][marker + 1]
    assert any(o["output_type"] == "error" for o in failing["outputs"])
    code = [c for c in content["cells"] if c["cell_type"] == "code"]
    assert code.index(failing) + 1 == cell
    assert "An Exception was encountered" in source(content["cells"][0])


def test_cells_after_the_failing_one_did_not_run(results, out):
    for name in ("02_error", "03_exit", "04_killed"):
        assert "never" not in printed(saved(out, name))


def test_a_lost_worker_fails_its_notebook_alone_and_the_file_says_so(results, out):
    assert results["07_worker"].reason.startswith("the process that executed it ended")
    content = saved(out, "07_worker")
    assert "This run failed" in source(content["cells"][0])
    assert not any(c.get("outputs") for c in content["cells"])


def test_nothing_old_survives_a_failure(results, out):
    assert not (out / "charts" / "02_error").exists()
    assert not (out / "charts" / "07_worker").exists()
    assert "stale" not in saved(out, "02_error")


def test_the_notebooks_themselves_are_not_touched_and_nothing_half_written_is_left(results, folder, before, out):
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(out.rglob("*.partial"))


def one_task(path: Path, tmp_path: Path, **more) -> Task:
    return Task(
        notebook=path.stem, path=path, values={}, parameters={}, executed=tmp_path / "executed" / path.name,
        charts=None, scratch=tmp_path / "s", timeout_s=60, run="one", **more,
    )  # fmt: skip


def test_a_kernel_that_does_not_start_is_tried_once_more(tmp_path, monkeypatch):
    path = notebook(tmp_path, "01_start")
    real, attempts = execution._Engine._run, []

    def sometimes(nb_man, *rest):
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("Address already in use")
        real(nb_man, *rest)

    monkeypatch.setattr(execution._Engine, "_run", staticmethod(sometimes))
    assert execution.execute(one_task(path, tmp_path)).succeeded
    assert len(attempts) == 2


def test_a_kernel_that_never_starts_is_a_failure_with_the_reason(tmp_path, monkeypatch):
    path = notebook(tmp_path, "01_start")
    attempts = []

    def never(*_):
        attempts.append(1)
        raise RuntimeError("Address already in use")

    monkeypatch.setattr(execution._Engine, "_run", staticmethod(never))
    outcome = execution.execute(one_task(path, tmp_path))
    assert outcome.reason == "the kernel did not start, tried twice: RuntimeError: Address already in use"
    assert len(attempts) == 2
    assert not any(c.get("outputs") for c in load_json(tmp_path / "executed" / path.name)["cells"])


def test_a_chart_that_the_kernel_left_without_a_picture_gets_one(tmp_path):
    path = notebook(tmp_path, "01_bare", show_chart(spec(), picture=False), show_verdicts())
    task = one_task(path, tmp_path)
    outcome = execution.execute(Task(**{**task.__dict__, "charts": tmp_path / "charts"}))
    assert outcome.succeeded, outcome.reason
    (chart,) = charts(load_json(tmp_path / "executed" / path.name))
    assert base64.b64decode(chart.png) == (tmp_path / "charts" / "dots.png").read_bytes()
    assert chart.png == pictures.png(spec())


def test_a_chart_that_cannot_be_drawn_is_a_failure_of_its_cell(tmp_path):
    broken = spec() | {"mark": "no such mark"}
    path = notebook(tmp_path, "01_broken", show_chart(broken, picture=False), show_verdicts())
    outcome = execution.execute(one_task(path, tmp_path))
    assert "chart dots cannot be drawn" in outcome.reason
    assert outcome.failed_cell == 2


def test_no_process_of_the_batch_is_left(results):
    mine = os.getpid()
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == mine and fields[0] != "Z":
            command = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
            if "rackbook" in command or "ipykernel" in command:
                left.append(command)
    assert left == []
