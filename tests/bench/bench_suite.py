"""Overhead of the suite: a warm run of every notebook against its floor, and the start of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from measure import Ratio, at_most, interleaved, seconds
from nbclient import NotebookClient

from rackbook.locations import NOTEBOOKS

RACKBOOK = Path(sys.executable).parent / "rackbook"


def start_and_import(path: Path) -> None:
    """Start a kernel and run the notebook's imports, nothing else."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = code[:1]
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()


def floor() -> float:
    """Seconds that starting the kernels and importing costs, spread over the cores."""
    cores = len(os.sched_getaffinity(0))
    return sum(seconds(lambda path=path: start_and_import(path)) for path in sorted(NOTEBOOKS.glob("*.ipynb"))) / cores


def run_all() -> float:
    """Seconds of ``rackbook run`` on every notebook, report included."""
    with tempfile.TemporaryDirectory() as out:
        command = [RACKBOOK, "run", "--out", out]
        return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def ratios() -> list[Ratio]:
    """The suite's two promises."""
    run_all()
    floors, runs = zip(*((floor(), run_all()) for _ in range(3)), strict=True)
    middle = sorted(run / low for run, low in zip(runs, floors, strict=True))[1]
    ours = sorted(runs)[1]

    def start() -> None:
        subprocess.run([RACKBOOK, "--help"], check=True, capture_output=True)

    def bare_python() -> None:
        subprocess.run([sys.executable, "-c", "pass"], check=True)

    help_s, python_s = interleaved(start, bare_python, repeats=11)
    return [
        at_most("warm `rackbook run` against kernel starts + imports", ours, ours / middle, "s", 1.5),
        Ratio(
            "`rackbook --help` against an empty Python",
            help_s,
            python_s,
            "s",
            help_s / python_s,
            "≤ 0.3 s",
            help_s <= 0.3,
        ),
    ]
