"""Order, folders, locks and interruption of a batch."""

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_notebooks import notebook
from survival import processes_with

from rackbook.engine import processes
from rackbook.errors import RackbookError
from rackbook.suite import batch, kernels, leases, outcomes, pool
from rackbook.suite.executions import MACHINE
from rackbook.suite.notebooks import discover

ENDLESS = "import subprocess, time\nchild = subprocess.Popen(['sleep', '300'])\ntime.sleep(300)"


def executed(path: Path, *, duration_s: float, succeeded: bool = True) -> None:
    outcome = outcomes.Outcome(
        notebook=path.stem, succeeded=succeeded, reason="" if succeeded else "x", failed_cell=None, parameters={},
        given=(), duration_s=duration_s, run="r",
    )  # fmt: skip
    outcomes.write({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, path, outcome)


def test_the_longest_notebook_of_the_last_run_starts_first_and_unknown_ones_before_it(tmp_path):
    for name in ("01_short", "02_long", "03_failed", "04_new_small"):
        notebook(tmp_path, name)
    notebook(tmp_path, "05_new_large", "x = 1\n" * 200)
    folders = batch.Folders(tmp_path / "out")
    executed(folders.notebooks / "01_short.ipynb", duration_s=1.0)
    executed(folders.notebooks / "02_long.ipynb", duration_s=9.0)
    executed(folders.notebooks / "03_failed.ipynb", duration_s=0.1, succeeded=False)
    names = [n.name[:2] for n in batch.longest_first(discover(tmp_path), folders)]
    assert names[0] == "05"
    assert set(names[1:3]) == {"03", "04"}
    assert names[3:] == ["02", "01"]


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    notebook(tmp_path, "01_one")
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RackbookError, match="another run is writing here"):
            batch.execute(discover(tmp_path), {}, batch.Folders(out))


LIVE = 'source: str = "published"  # [-] measure: run now\n'


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Batches of two notebooks whose workers are left out; what they would have been asked to do."""
    for name in ("01_one", "02_two"):
        notebook(tmp_path / "nb", name, parameters=LIVE)
    monkeypatch.setattr(leases, "folder", lambda: tmp_path / "locks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RACKBOOK_RUNS", raising=False)

    def start(values: dict[str, dict], meanwhile=lambda: None):
        found = {}

        def run(tasks, jobs, _scratch, **_):
            found.update(tasks={task.notebook: task for task in tasks}, jobs=jobs, then=meanwhile())
            return [
                outcomes.Outcome(t.notebook, True, "", None, t.parameters, tuple(t.values), 1.0, t.run) for t in tasks
            ]

        monkeypatch.setattr(pool, "run", run)
        batch.execute(discover(tmp_path / "nb"), values, batch.Folders(tmp_path / "out"), jobs=2)
        return found

    return start


def test_notebooks_that_measure_run_one_after_the_other_and_nothing_else_meanwhile(started, tmp_path, capsys):
    others = leases.Leases([], tmp_path / "locks")
    found = started({"02_two": {"source": "measure"}}, lambda: others.turn([]))
    assert (found["jobs"], found["then"]) == (1, None)
    assert "note: notebooks that measure run one after the other" in capsys.readouterr().err
    assert others.turn([MACHINE]) is not None  # all is given back


def test_notebooks_that_do_not_measure_share_the_machine_but_not_with_a_measurement(started, tmp_path, capsys):
    others = leases.Leases([], tmp_path / "locks")
    found = started({}, lambda: (others.turn([]), others.turn([MACHINE])))
    assert found["jobs"] == 2
    share, whole = found["then"]
    assert share is not None
    assert whole is None
    assert capsys.readouterr().err == ""


def test_a_batch_waits_for_a_measurement_and_says_so(started, tmp_path, monkeypatch, capsys):
    others = leases.Leases([], tmp_path / "locks")
    held = others.turn([MACHINE])
    monkeypatch.setattr(leases.time, "sleep", lambda _: others.give_back(held))
    assert len(started({})["tasks"]) == 2
    assert capsys.readouterr().err == "waits: another run measures here\n"


def test_runs_are_recorded_where_the_command_line_looks(started, tmp_path):
    found = started({})
    homes = {task.environment["RACKBOOK_RUNS"] for task in found["tasks"].values()}
    assert homes == {str(tmp_path / "build" / "runs")}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    notebook(tmp_path, "01_one")
    (tmp_path / "file").write_text("")
    with pytest.raises(RackbookError, match=r"file.out: cannot write here: Not a directory; choose another"):
        batch.execute(discover(tmp_path), {}, batch.Folders(tmp_path / "file" / "out"))


def test_kernels_listen_on_sockets_with_short_paths_and_on_ports_only_if_the_path_is_long():
    assert kernels.connection(Path("/tmp/rb-x/01/1"))["transport"] == "ipc"
    assert kernels.connection(Path("/tmp") / ("long" * 30))["transport"] == "tcp"
    with kernels.scratch_folder() as scratch:
        assert kernels.connection(Path(scratch) / "01" / "1")["transport"] == "ipc"
        assert Path(scratch).stat().st_mode & 0o077 == 0


def test_a_long_temporary_folder_does_not_cost_the_sockets(tmp_path, monkeypatch):
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with kernels.scratch_folder() as scratch:
        assert kernels.connection(Path(scratch) / "01" / "1")["transport"] == "ipc"


def test_scratch_of_killed_runs_goes_with_the_next_one_and_that_of_living_ones_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "scratch_base", lambda: tmp_path)
    for name in ("rb-killed", "another"):
        (tmp_path / name / "01").mkdir(parents=True)
        (tmp_path / name / "lock").touch()
    with kernels.scratch_folder() as alive, kernels.scratch_folder() as other:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["another", Path(alive).name, Path(other).name]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_the_kernel_environment_puts_this_python_first_and_keeps_the_rest():
    found = kernels.environment({"JUPYTER_PATH": "/elsewhere", "X": "1"})
    assert found["JUPYTER_PATH"].split(os.pathsep) == [str(Path(sys.prefix) / "share" / "jupyter"), "/elsewhere"]
    assert kernels.environment(found) == found
    assert found["X"] == "1"


def wait_for_both(run: subprocess.Popen, mark: str) -> None:
    """Wait until each notebook has started its child."""

    def children() -> int:
        return sum(processes.command_line(pid) == "sleep 300" for pid in processes_with(mark))

    deadline = time.monotonic() + 120  # kernels take their time beside other work
    while children() < 2 and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.1)
    assert children() == 2


@pytest.fixture
def endless(tmp_path):
    """A run of two notebooks that do not end, and the variable by which its processes are found."""
    notebook(tmp_path / "nb", "01_endless", ENDLESS)
    notebook(tmp_path / "nb", "02_endless_too", ENDLESS)
    command = [sys.executable, "-c", "from rackbook.cli import main; main()", "run", "--jobs", "2",
               "--notebooks", str(tmp_path / "nb"), "--out", str(tmp_path / "out")]  # fmt: skip
    environment = os.environ | {"RACKBOOK_TEST_MARK": str(tmp_path)}
    mark = f"RACKBOOK_TEST_MARK={tmp_path}\0"
    run = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background jobs
    )  # fmt: skip
    try:
        wait_for_both(run, mark)
        yield run, mark
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 120  # the notebooks sleep for 300 s
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_with(mark)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_and_leaves_no_process(endless, tmp_path, number, status):
    run, mark = endless
    run.send_signal(number)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == status
    assert ("rackbook: interrupted" in errors) == (number == signal.SIGINT)
    assert "Traceback" not in errors
    assert gone(mark)
    assert not (tmp_path / "out" / "report").exists()


def test_killing_the_run_itself_leaves_no_kernel(endless):
    run, mark = endless
    run.kill()
    run.wait()
    assert gone(mark)


def test_progress_off_a_terminal_is_one_line_per_notebook(tmp_path, capsys):
    from rackbook.suite.progress import Progress

    progress = Progress(12)
    progress.started("01_one")
    outcome = outcomes.Outcome(
        notebook="01_one", succeeded=False, reason="ValueError: bad\nmore", failed_cell=1, parameters={}, given=(),
        duration_s=3.14, run="r",
    )  # fmt: skip
    progress.ended(outcome)
    progress.close()
    assert re.fullmatch(r"\[ 1/12\] 01_one +3\.1 s  FAILED: ValueError: bad\n", capsys.readouterr().err)


def test_progress_on_a_terminal_is_a_bar_with_the_time_and_what_runs():
    import struct
    import termios

    from rackbook.suite.progress import Progress

    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        progress = Progress(2, stream)
        progress.started("01_one")
        shown = ""
        while "01_one" not in shown and select.select([master], [], [], 30)[0]:
            shown += os.read(master, 10_000).decode()
        progress.close()
    os.close(master)
    assert re.search(r"0/2 \| +\| 00:\d\d, 01_one", shown)
