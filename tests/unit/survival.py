"""Killing a sweep at random moments, and counting what is there in the end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import polars as pl
import small_sweep
from small_notebooks import notebook, show_chart, spec

from rackbook.suite.store import read_result

COUNT = 24
HOLD = "hold"
"""While this file is there no execution ends."""

SUITE = """\
name = "survival"
[[sweep]]
notebooks = ["01", "02"]
grid = { rate = [0.25, 0.5], fast = [true, false] }
repeats = 3
"""


def prepare(folder: Path) -> tuple[str, ...]:
    """Write 24 executions of two notebooks; the arguments that run them."""
    wait = f"import os, time\nwhile os.path.exists({str(folder / HOLD)!r}):\n    time.sleep(0.1)"
    notebook(folder / "nb", "01_one", wait, "print(seed, rate)", show_chart(spec()))
    notebook(
        folder / "nb", "02_two", wait, "from rackbook.locations import DATA\nlen((DATA / 'claims.toml').read_text())"
    )
    (folder / "suite.toml").write_text(SUITE)
    return ("sweep", str(folder / "suite.toml"), "--notebooks", str(folder / "nb"), "--out", str(folder / "out"))


def processes_with(text: str) -> list[int]:
    """Processes that have a text among their variables."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def complete(out: Path) -> list[Path]:
    """The complete executions, each read."""
    folders = [p for p in (out / "executions").glob("*") if not p.name.startswith(".")] if out.exists() else []
    for folder in folders:
        record = read_result(folder)
        assert record["outcome"]["succeeded"]
        assert (folder / "notebook.ipynb").stat().st_size > 0
    return folders


def kill_five_times(
    arguments: tuple[str, ...], out: Path, environment: dict[str, str], mark: str, seed: int
) -> list[str]:
    """Start a sweep again and again; kill five times something of it: the runner, a kernel, a worker, all of them.

    Executions are held until some are at work, so that the sweep is never over before it can be killed.
    """
    draws = random.Random(seed)
    hold = out.parent / HOLD
    killed: list[str] = []
    while len(killed) < 5:
        hold.touch()
        run = small_sweep.start(*arguments, environment=environment)
        before = len(complete(out))
        _until(lambda: list(out.glob("executions/.*.partial")) and processes_with(mark)[1:], run)
        if draws.random() < 0.7:
            hold.unlink()
            if draws.random() < 0.5:
                _until(lambda: len(complete(out)) > before, run)  # noqa: B023 - called at once
        time.sleep(draws.uniform(0, 1.0))
        assert run.poll() is None, f"it ended before it could be killed: {run.communicate()}"
        kind = draws.choice(["runner", "runner", "kernel", "worker", "everything"])
        victims = _victims(kind, run.pid, mark)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victims:
            killed.append(kind)
        time.sleep(draws.uniform(0, 0.5))
        run.kill()
        run.communicate()
    hold.unlink(missing_ok=True)
    assert 0 < len(complete(out)) < COUNT
    return killed


def _until(holds, run) -> None:
    deadline = time.monotonic() + 120
    while not holds() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _victims(kind: str, runner: int, mark: str) -> list[int]:
    mine = processes_with(mark)
    if kind == "runner":
        return [runner]
    if kind == "everything":
        return mine
    word = b"ipykernel" if kind == "kernel" else b"rackbook.suite.worker"
    found = []
    for pid in mine:
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found[:1]


def assert_exactly_all(out: Path) -> None:
    """Exactly 24 results, each once, nothing half written, and the index says the same."""
    folders = complete(out)
    assert len(folders) == COUNT
    assert len({folder.name.partition("-")[0] for folder in folders}) == COUNT
    assert not list((out / "executions").glob(".*"))
    index = pl.read_parquet(out / "index.parquet")
    assert index.height == COUNT
    assert index["status"].unique().to_list() == ["done"]
    settings = index.select("notebook", "p_rate", "p_fast", "p_seed").unique()
    assert settings.height == COUNT
