"""Overhead of a sweep: one execution against bare papermill, and a sweep of which everything is done."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Ratio, at_most, seconds
from papermill.execute import execute_notebook

from rackbook.locations import NOTEBOOKS
from rackbook.suite import inputs, store
from rackbook.suite.notebooks import discover
from rackbook.suite.sweeps import read
from rackbook.suite.tracing import state

RACKBOOK = Path(sys.executable).parent / "rackbook"
NOTEBOOK = "11_single_user"
PARAMETER = "acceptance_length"
FEW, MANY, ROUNDS = 2, 10, 3
ALL_DONE = 10_000


def suite(folder: Path, values: list[float]) -> Path:
    """A sweep of one notebook over these values."""
    path = folder / "suite.toml"
    path.write_text(f"[[sweep]]\nnotebooks = ['{NOTEBOOK}']\ngrid = {{ {PARAMETER} = {values} }}\n")
    return path


def bare(values: list[float]) -> float:
    """Seconds per execution of papermill's own function in a process that has imported it."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out.ipynb")
        path = NOTEBOOKS / f"{NOTEBOOK}.ipynb"

        def run() -> None:
            for value in values:
                execute_notebook(
                    str(path), out, parameters={PARAMETER: value}, kernel_name="python3", progress_bar=False,
                    cwd=str(path.parent),
                )  # fmt: skip

        return seconds(run) / len(values)


def sweep(number: int, start: itertools.count) -> float:
    """Seconds of a sweep of so many executions, one at a time, none of them run before."""
    with tempfile.TemporaryDirectory() as folder:
        path = suite(Path(folder), [round(2 + next(start) / 1000, 3) for _ in range(number)])
        command = [RACKBOOK, "sweep", path, "--jobs", "1", "--out", Path(folder) / "out"]
        return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def per_execution() -> Ratio:
    """What one more execution costs in a sweep that runs, against bare papermill; starts and report cancel out."""
    start = itertools.count()
    bare([3.0])
    ours, reference = [], []
    for _ in range(ROUNDS):
        ours.append((sweep(MANY, start) - sweep(FEW, start)) / (MANY - FEW))
        reference.append(bare([3.1, 3.2, 3.3, 3.4]))
    pairs = sorted(zip(ours, reference, strict=True), key=lambda pair: pair[0] / pair[1])
    return at_most("an execution of a sweep against bare papermill", *pairs[ROUNDS // 2], "s", 1.15)


def all_done(folder: Path) -> Path:
    """A folder in which 10,000 executions are complete, as :class:`store.Store` leaves them."""
    path = suite(folder, [round(1 + i / 2500, 4) for i in range(ALL_DONE)])
    executions = read(path, discover()).executions
    results = store.Store(folder / "out")
    results.prepare()
    trace = folder / "trace.json"
    package = Path(inputs.__file__).parents[1]
    trace.write_text(json.dumps({str(p): state(p) for p in package.rglob("*.py")}))
    first = executions[0]
    earlier = inputs.before(first.notebook, first.parameters)
    listed = inputs.manifest(trace, first.notebook, first.parameters, results.digests, earlier)
    name = inputs.name_of(listed)
    results._keep_manifest(name, listed)
    outcome = {
        "succeeded": True, "reason": "", "failed_cell": None, "duration_s": 1.0, "run": "x", "cause": "",
        "finished_at": "2026-11-29T20:00:00+00:00", "machine": {},
    }  # fmt: skip
    page = json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    for e in executions:
        place = results.executions / f"{e.request}-{name}"
        place.mkdir()
        record = {
            "format": store.FORMAT, "request": e.request, "inputs": name, "notebook": e.notebook.name,
            "parameters": e.parameters, "given": [PARAMETER], "repeat": 1, "attempt": 1, "verdicts": {"open": 1},
            "started_at": outcome["finished_at"], "executor": {"kind": "local"}, "outcome": outcome,
        }  # fmt: skip
        (place / store.RESULT).write_text(json.dumps(record))
        (place / store.NOTEBOOK).write_text(page)
    return path


def resume() -> Ratio:
    """The whole command on a sweep of which everything is done: plan, index and report included."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        path = all_done(Path(folder))
        command = [RACKBOOK, "sweep", path, "--out", Path(folder) / "out"]
        python_s = seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            times.append(time.perf_counter() - begin)
            if f"{ALL_DONE} of {ALL_DONE} executions complete" not in done.stdout:
                raise RuntimeError(done.stdout)
        ours = sorted(times)[ROUNDS // 2]
        what = f"`rackbook sweep`, {ALL_DONE:,} executions, all done"
        return Ratio(what, ours, python_s, "s", ours / python_s, "≤ 5 s", ours <= 5)


def ratios() -> list[Ratio]:
    """The sweep's two promises."""
    return [resume(), per_execution()]
