"""Executing the committed notebooks in place, so that what is committed is what the library gives."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackbook.cores import whole_cores
from rackbook.locations import shown
from rackbook.suite import kernels, outcomes, pool
from rackbook.suite.batch import TIMEOUT_S
from rackbook.suite.notebooks import Notebook, load_json
from rackbook.suite.progress import Progress, first_line
from rackbook.suite.tasks import Task

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def refresh(notebooks: Sequence[Notebook], *, jobs: int | None = None) -> bool:
    """Execute notebooks on their defaults and write the outputs into the very files.

    A notebook that fails stays as it was; its failed copy goes to a temporary folder that is named.

    Args:
        notebooks: which.
        jobs: how many at a time; one per available core if None.

    Returns:
        Whether all succeeded.
    """
    by_name = {n.name: n for n in notebooks}
    failed: list[outcomes.Outcome] = []
    with kernels.scratch_folder() as scratch:
        executed = Path(scratch) / "executed"
        tasks = [
            Task(
                notebook=n.name, path=n.path.resolve(), values={}, parameters={p.name: p.default for p in n.parameters},
                executed=executed / n.path.name, charts=None, scratch=Path(scratch) / n.name[:2],
                timeout_s=TIMEOUT_S, run="refresh",
            )
            for n in notebooks
        ]  # fmt: skip
        progress = Progress(len(tasks))

        def take(outcome: outcomes.Outcome) -> None:
            progress.ended(outcome)
            if outcome.succeeded:
                path = by_name[outcome.notebook].path
                outcomes.write(committed(load_json(executed / path.name)), path)
            else:
                failed.append(outcome)

        try:
            pool.run(
                tasks, jobs or whole_cores(), Path(scratch),
                on_start=lambda task: progress.started(task.notebook), on_end=take,
            )  # fmt: skip
        finally:
            progress.close()
        if failed:
            kept = Path(tempfile.mkdtemp(prefix="rackbook-failed-"))
            for outcome in failed:
                (executed / f"{outcome.notebook}.ipynb").replace(kept / f"{outcome.notebook}.ipynb")
                print(f"{outcome.notebook}: left as it was; {first_line(outcome.reason)}", file=sys.stderr)
            print(f"the failed copies: {shown(kept)}", file=sys.stderr)
    return not failed


def committed(content: dict[str, Any]) -> dict[str, Any]:
    """An executed notebook in the form that is committed: nothing in it depends on when, where or who.

    Args:
        content: as executed; not changed.

    Returns:
        Sources, outputs, tags and cell ids, one kernelspec, and no version of Python, time, duration or path.
    """
    cells = []
    for index, cell in enumerate(content["cells"]):
        tags = cell["metadata"].get("tags")
        kept = {
            "cell_type": cell["cell_type"],
            "id": cell.get("id") or f"cell-{index:02}",
            "metadata": {"tags": tags} if tags else {},
            "source": _lines("".join(cell["source"])),
        }
        if cell["cell_type"] == "code":
            kept |= {"execution_count": cell["execution_count"], "outputs": [_output(o) for o in cell["outputs"]]}
        cells.append(kept)
    return {
        "cells": cells,
        "metadata": {"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _output(output: dict[str, Any]) -> dict[str, Any]:
    """An output as nbformat writes it: long texts as lists of lines, so that a diff shows the line that changed."""
    kept = dict(output)
    if "text" in kept:
        kept["text"] = _lines("".join(kept["text"]))
    if "data" in kept:
        kept["data"] = {
            kind: _lines("".join(data)) if kind.startswith(("text/", "image/svg")) else data
            for kind, data in kept["data"].items()
        }
    return kept


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)
