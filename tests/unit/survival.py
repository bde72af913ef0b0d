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

from rackbook.engine import processes
from rackbook.suite.store import read_result

COUNT = 24
HOLD = "hold"
"""While this file is there no execution ends."""

KINDS = ("runner", "runner", "kernel", "worker", "everything")
MOMENTS = ("held", "held", "let go", "after one more", "after one more")
"""When it is killed: while no execution ends, as they end, or after one more has been completed."""

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


def kill_five_times(arguments: tuple[str, ...], out: Path, environment: dict[str, str], mark: str, seed: int) -> None:
    """Start a sweep again and again; kill each time something of it, each of KINDS once, in an order that is drawn.

    Executions are held until some are at work, so that the sweep is never over before it can be killed.
    """
    hold = out.parent / HOLD
    try:
        _kill_five_times(arguments, out, environment, mark, random.Random(seed), hold)
    except BaseException:
        hold.unlink(missing_ok=True)
        _kill(processes_with(mark))
        raise


def _kill_five_times(
    arguments: tuple[str, ...], out: Path, environment: dict[str, str], mark: str, draws: random.Random, hold: Path
) -> None:
    for kind, moment in zip(draws.sample(KINDS, 5), draws.sample(MOMENTS, 5), strict=True):
        hold.touch()
        run = small_sweep.start(*arguments, environment=environment)
        before = len(complete(out))
        _until(lambda: list(out.glob("executions/.*.partial")) and processes_with(mark)[1:], run)
        if moment != "held":
            hold.unlink()
        if moment == "after one more":
            _until(lambda: len(complete(out)) > before, run)  # noqa: B023 - called at once
        time.sleep(draws.uniform(0, 0.5))
        assert run.poll() is None, f"it ended before it could be killed: {run.communicate()}"
        killed: list[int] = []
        _until(lambda: killed.extend(_kill(_victims(kind, run.pid, mark))) or killed, run)  # noqa: B023
        assert killed, f"no {kind} was there to be killed"
        time.sleep(draws.uniform(0, 0.5))
        run.kill()
        run.communicate()
    hold.unlink(missing_ok=True)
    assert 0 < len(complete(out)) < COUNT


def _until(holds, run) -> None:
    deadline = time.monotonic() + 120
    while not holds() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _kill(pids: list[int]) -> list[int]:
    """Kill processes; those that were there."""
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def _victims(kind: str, runner: int, mark: str) -> list[int]:
    mine = processes_with(mark)
    if kind == "runner":
        return [runner]
    if kind == "everything":
        return mine
    is_one = _is_kernel if kind == "kernel" else _is_worker
    return [pid for pid in mine if is_one(pid)][:1]


def _is_worker(pid: int) -> bool:
    return "rackbook.suite.worker" in processes.command_line(pid)


def _is_kernel(pid: int) -> bool:
    """Whether it is a kernel: one that was forked has the command line of the nursery, its parent."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if "rackbook.suite.nursery" in processes.command_line(parent):
            return True
    return "ipykernel_launcher" in processes.command_line(pid)


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
