"""The report of a sweep: tables over the swept parameters and each chart once per setting, on equal axes.

One HTML file that opens without a network. What failed stands in its place, as a failure, and what is out of date is
told from what counts.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

from rackbook import __version__, claims
from rackbook.errors import DataError
from rackbook.locations import without_folders
from rackbook.suite import multiples, vega
from rackbook.suite.executions import Execution, shown
from rackbook.suite.index import SCHEMA, YES_NO
from rackbook.suite.notebooks import Notebook, load_json
from rackbook.suite.outcomes import without_colour
from rackbook.suite.report import script_json, script_text, shown_parameter
from rackbook.suite.store import NOTEBOOK, Store
from rackbook.suite.sweeps import Sweep
from rackbook.suite.verdicts import MARKS, ORDER


@dataclass(frozen=True)
class Row:
    """One execution in the table.

    Attributes:
        execution: what was asked for.
        values: its swept values as text, in the order of the columns.
        status: one of :data:`STATUSES`.
        duration_s: None if it is not done.
        error: why it failed.
        cause: kind of failure.
        counts: verdicts in its notebook by word.
        folder: where its files are, relative to the sweep's folder.
        claims: what its notebook found about each claim, as in the index; empty if it is not done.
    """

    execution: Execution
    values: tuple[str, ...]
    status: str
    duration_s: float | None = None
    error: str = ""
    cause: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    folder: str = ""
    claims: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Point:
    """What one execution found about a claim, as text.

    Attributes:
        values: swept values of the execution, in the order of the columns.
        found: the value, in the unit of the claim.
        difference: from what is published; empty where it means nothing.
        verdict: how the two compare.
        basis: how it was found.
    """

    values: tuple[str, ...]
    found: str
    difference: str
    verdict: str
    basis: str


@dataclass(frozen=True)
class Compared:
    """A claim beside what the executions found about it.

    Attributes:
        statement: the claim.
        published: its value, as text.
        unit: of all values.
        span: the smallest and the largest value found.
        counts: executions by verdict.
        points: what each execution found.
    """

    statement: str
    published: str
    unit: str
    span: str
    counts: dict[str, int]
    points: list[Point]


@dataclass(frozen=True)
class Section:
    """One notebook of the sweep.

    Attributes:
        notebook: the notebook.
        columns: names of the swept parameters.
        rows: its executions.
        figures: its charts.
        unread: executions whose charts were not looked at, because there are too many.
        compared: the claims that were measured, or that came out differently between the executions.
        num_same: claims that came out the same in each.
    """

    notebook: Notebook
    columns: tuple[str, ...]
    rows: list[Row]
    figures: list[multiples.Figure]
    unread: int
    compared: list[Compared]
    num_same: int

    def unit(self, column: str) -> str:
        """Unit of a column; empty without one."""
        unit = self.notebook.parameter(column).unit if column != _REPEAT else "-"
        return "" if unit in ("-", "path") else unit


STATUSES = ("done", "failed", "outdated", "waiting")
"""Words of the index: there is a result that counts, a failure, a result that is out of date, or nothing."""

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
    by_status: dict[str, dict[str, dict[str, Any]]] = {status: {} for status in STATUSES}
    for row in sorted(known.values(), key=lambda row: (row["finished_at"] is not None, row["finished_at"])):
        by_status[row["status"]][row["request"]] = row
    found = {
        e.request: known.get(f"{results.executions.name}/{complete[e.request].name}")
        if e.request in complete
        else by_status["failed"].get(e.request) or by_status["outdated"].get(e.request)
        for e in sweep.executions
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rackbook", "suite/page"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"private": without_folders, "parameter": shown_parameter}
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
        counts={status: sum(row.status == status for row in rows) for status in STATUSES},
        marks=MARKS,
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
        error = "the result there is, is out of date" if row.status == "outdated" else row.error
        tiles.append(multiples.Tile(dict(zip(columns, values, strict=True)), content, error))
    unread = sum(row.status == "done" for row in rows) - read
    compared, num_same = _compared(rows)
    return Section(notebook, tuple(columns), rows, multiples.figures(tiles), max(0, unread), compared, num_same)


def _compared(rows: list[Row]) -> tuple[list[Compared], int]:
    """The claims worth a table, in the order of the notebook, and how many others there are."""
    found: dict[str, list[tuple[Row, dict[str, Any]]]] = {}
    for row in rows:
        for claim in row.claims:
            found.setdefault(claim["claim"], []).append((row, claim))
    worth = [
        pairs
        for pairs in found.values()
        if len({(claim["found"], claim["verdict"]) for _, claim in pairs}) > 1
        or any(claim["basis"] == "measured" for _, claim in pairs)
    ]
    return [_claim(pairs) for pairs in worth], len(found) - len(worth)


def _claim(pairs: list[tuple[Row, dict[str, Any]]]) -> Compared:
    first = pairs[0][1]
    yes_no = first["unit"] == YES_NO

    def text(value: float | None) -> str:
        return claims.shown_value(bool(value) if yes_no and value is not None else value)

    points = []
    for row, claim in pairs:
        difference = ""
        if claim["found"] is not None and not yes_no:
            same = math.isclose(claim["found"], claim["published"], rel_tol=1e-12)  # 9.53 - 8.93 is not 0.6 in binary
            difference = claims.shown_value(0.0 if same else claim["found"] - claim["published"], signed=True)
        points.append(Point(row.values, text(claim["found"]), difference, claim["verdict"], claim["basis"] or "–"))
    values = sorted(claim["found"] for _, claim in pairs if claim["found"] is not None)
    ends = dict.fromkeys(text(value) for value in (values[0], values[-1])) if values else ["–"]
    words = [claim["verdict"] for _, claim in pairs]
    counts = {word: words.count(word) for word in ORDER if word in words}
    unit = "" if yes_no else first["unit"]
    span = (" and " if yes_no else " to ").join(ends)
    return Compared(first["statement"], text(first["published"]), unit, span, counts, points)


def _row(execution: Execution, values: tuple[str, ...], known: dict[str, Any] | None) -> Row:
    """The row of an execution, from its row in the index."""
    if known is None:
        return Row(execution, values, "waiting")
    if known["status"] == "outdated":
        return Row(execution, values, "outdated", folder=known["folder"])
    if known["status"] == "done":
        return Row(
            execution, values, "done", known["duration_s"], counts=json.loads(known["verdicts"]),
            folder=known["folder"], claims=tuple(known["claims"] or ()),
        )  # fmt: skip
    error, cause = without_colour(known["error"] or ""), known["cause"] or ""
    return Row(execution, values, "failed", error=error, cause=cause, folder=known["folder"])


def _address(figure: multiples.Figure) -> str:
    """The still picture of a figure as a data address."""
    return "data:image/svg+xml;base64," + base64.b64encode(figure.svg.encode()).decode()
