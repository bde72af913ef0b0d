"""The report of a sweep: a table over the swept parameters and each chart once per setting, on equal axes.

One HTML file that opens without a network. What failed stands in its place, as a failure.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

from rackbook import __version__
from rackbook.errors import DataError
from rackbook.suite import multiples, vega
from rackbook.suite.executions import Execution, shown
from rackbook.suite.index import SCHEMA
from rackbook.suite.notebooks import Notebook, load_json
from rackbook.suite.outcomes import hidden_paths, without_colour
from rackbook.suite.report import script_json, script_text, shown_parameter
from rackbook.suite.store import NOTEBOOK, Store
from rackbook.suite.sweeps import Sweep


@dataclass(frozen=True)
class Row:
    """One execution in the table.

    Attributes:
        execution: what was asked for.
        values: its swept values as text, in the order of the columns.
        status: "done", "failed" or "waiting".
        duration_s: None if it is not done.
        error: why it failed.
        cause: kind of failure.
        counts: verdicts in its notebook by word.
        folder: where its files are, relative to the sweep's folder.
    """

    execution: Execution
    values: tuple[str, ...]
    status: str
    duration_s: float | None = None
    error: str = ""
    cause: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True)
class Section:
    """One notebook of the sweep.

    Attributes:
        notebook: the notebook.
        columns: names of the swept parameters.
        rows: its executions.
        figures: its charts.
        unread: executions whose charts were not looked at, because there are too many.
    """

    notebook: Notebook
    columns: tuple[str, ...]
    rows: list[Row]
    figures: list[multiples.Figure]
    unread: int = 0

    def unit(self, column: str) -> str:
        """Unit of a column; empty without one."""
        unit = self.notebook.parameter(column).unit if column != _REPEAT else "-"
        return "" if unit in ("-", "path") else unit


MOST_READ = 60
"""Most executions of a notebook whose charts are looked at."""

_REPEAT = "repeat"


def write(sweep: Sweep, results: Store, complete: dict[str, Path], index: pl.DataFrame) -> Path:
    """Write the page.

    Args:
        sweep: what was asked for.
        results: where it lies.
        complete: folders of what is complete, by request.
        index: the index over the folder.

    Returns:
        The file.
    """
    path = results.out / "report" / f"sweep-{sweep.name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(render(sweep, results, complete, index), "utf-8")
    partial.replace(path)
    return path


def render(sweep: Sweep, results: Store, complete: dict[str, Path], index: pl.DataFrame) -> str:
    """The page."""
    known = {row["folder"] or row["request"]: row for row in index.select(list(SCHEMA)).to_dicts()}
    failed = {row["request"]: row for row in known.values() if row["status"] == "failed"}
    found = {
        e.request: known.get(f"{results.executions.name}/{complete[e.request].name}")
        if e.request in complete
        else failed.get(e.request)
        for e in sweep.executions
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rackbook", "suite/page"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"private": hidden_paths, "parameter": shown_parameter}
    sections = [
        _section(sweep, name, complete, found) for name in dict.fromkeys(e.notebook.name for e in sweep.executions)
    ]
    page = files("rackbook.suite") / "page"
    rows = [row for section in sections for row in section.rows]
    figures = any(figure.spec for section in sections for figure in section.figures)
    return environment.get_template("sweep.html.j2").render(
        version=__version__,
        name=sweep.name,
        sections=sections,
        rows=rows,
        counts={status: sum(row.status == status for row in rows) for status in ("done", "failed", "waiting")},
        latest=max((r["finished_at"] for r in found.values() if r and r["finished_at"]), default=None),
        picture=_address,
        spec=script_json,
        style=Markup((page / "report.css").read_text("utf-8")),  # noqa: S704 - our own file
        script=script_text((page / "report.js").read_text("utf-8")),
        vega=script_text(vega.bundle()) if figures else "",
    )


def _section(sweep: Sweep, name: str, complete: dict[str, Path], found: dict[str, dict[str, Any] | None]) -> Section:
    executions = [e for e in sweep.executions if e.notebook.name == name]
    notebook = executions[0].notebook
    columns = [p.name for p in notebook.parameters if any(p.name in e.swept for e in executions)]
    if len({e.repeat for e in executions}) > 1 and "seed" not in columns:
        columns.append(_REPEAT)
    rows, tiles, read = [], [], 0
    for execution in executions:
        values = tuple(shown(execution.repeat if c == _REPEAT else execution.parameters[c]) for c in columns)
        row = _row(execution, values, found[execution.request])
        rows.append(row)
        if row.status == "done" and read == MOST_READ:
            continue
        content = None
        if row.status == "done":
            read += 1
            try:
                content = load_json(complete[execution.request] / NOTEBOOK)
            except DataError as problem:
                row = rows[-1] = replace(row, status="failed", error=str(problem), cause="damaged")
        tiles.append(multiples.Tile(dict(zip(columns, values, strict=True)), content, row.error))
    unread = sum(row.status == "done" for row in rows) - read
    return Section(notebook, tuple(columns), rows, multiples.figures(tiles), max(0, unread))


def _row(execution: Execution, values: tuple[str, ...], known: dict[str, Any] | None) -> Row:
    """The row of an execution, from its row in the index."""
    if known is None:
        return Row(execution, values, "waiting")
    if known["status"] == "done":
        counts = json.loads(known["verdicts"])
        return Row(execution, values, "done", known["duration_s"], counts=counts, folder=known["folder"])
    error, cause = without_colour(known["error"] or ""), known["cause"] or ""
    return Row(execution, values, "failed", error=error, cause=cause, folder=known["folder"])


def _address(figure: multiples.Figure) -> str:
    """The still picture of a figure as a data address."""
    return "data:image/svg+xml;base64," + base64.b64encode(figure.svg.encode()).decode()
