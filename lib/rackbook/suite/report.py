"""The report: one HTML page with the board, every chart and every verdict, which opens without a network."""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rackbook import __version__, claims
from rackbook.errors import DataError, RackbookError
from rackbook.locations import shown, without_folders
from rackbook.suite import artefacts, excerpt, vega
from rackbook.suite.batch import Folders
from rackbook.suite.notebooks import Notebook, read
from rackbook.suite.outcomes import Outcome, of_executed
from rackbook.suite.verdicts import MARKS, MEANINGS, ORDER

_LARGEST_SVG_BYTES = 400_000


@dataclass(frozen=True)
class Entry:
    """One executed notebook in the report.

    Attributes:
        notebook: title, question and parameters.
        outcome: what became of it.
        sections: its charts with their text.
        verdicts: records of the claims that it judges itself.
        error: traceback if it failed.
    """

    notebook: Notebook
    outcome: Outcome
    sections: list[excerpt.Section]
    verdicts: list[dict[str, Any]]
    error: str

    @property
    def settlements(self) -> list[tuple[str, str | None, int]]:
        """What would settle its open claims: the need, the command if there is one, how many claims."""
        found: dict[tuple[str, str | None], int] = {}
        for record in self.verdicts:
            if record["needs"]:
                key = (record["needs"], record["command"])
                found[key] = found.get(key, 0) + 1
        return [(needs, command, count) for (needs, command), count in found.items()]


def prepare() -> None:
    """Read what every page needs besides the notebooks; what is wrong with it, :func:`write` says."""
    with contextlib.suppress(RackbookError):
        claims.register()
        vega.bundle()


def write(folders: Folders) -> list[str]:
    """Write the report from the executed notebooks of a folder, failed ones included.

    Args:
        folders: where they lie and where the page goes.

    Returns:
        What lies among them and could not be read; the page lists it too.

    Raises:
        DataError: there is no executed notebook.
    """
    entries, problems = read_all(folders)
    if not entries and not problems:
        hint = "run `rackbook run` first, or name its folder with --out"
        raise DataError(f"{shown(folders.notebooks)}: no executed notebook; {hint}")
    page = render(entries, problems, folders)
    folders.report.parent.mkdir(parents=True, exist_ok=True)
    partial = folders.report.with_suffix(".partial")
    partial.write_text(page, "utf-8")
    partial.replace(folders.report)
    return problems


def read_all(folders: Folders) -> tuple[list[Entry], list[str]]:
    """Executed notebooks by number, and complaints about files that are not."""
    entries, problems = [], []
    for path in sorted(folders.notebooks.glob("*.ipynb")):
        try:
            outcome, content = of_executed(path)
            own = [r for r in artefacts.verdicts(content) or [] if r["topic"] == path.stem.partition("_")[2]]
            entries.append(Entry(read(path), outcome, excerpt.sections(content), own, excerpt.error(content)))
        except DataError as problem:
            problems.append(str(problem))
    return entries, problems


def render(entries: list[Entry], problems: list[str], folders: Folders) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rackbook", "suite/page"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"value": claims.shown_value, "parameter": shown_parameter, "private": without_folders}
    groups = {word: [(e, r) for e in entries for r in e.verdicts if r["verdict"] == word] for word in ORDER}
    board = [pair for rows in groups.values() for pair in rows]
    judged = {r["id"] for _, r in board}
    latest = max((e.outcome.finished_at for e in entries), default="")
    last_run = next((e.outcome.run for e in entries if e.outcome.finished_at == latest), "")
    page = files("rackbook.suite") / "page"
    try:
        unjudged = [c for c in claims.register().claims if c.id not in judged]
    except DataError as problem:  # a broken register makes every notebook fail, which the report must be able to say
        unjudged, problems = [], [*problems, str(problem)]
    return environment.get_template("report.html.j2").render(
        version=__version__,
        entries=entries,
        failed=[e for e in entries if not e.outcome.succeeded],
        problems=problems,
        board=board,
        counts={word: len(rows) for word, rows in groups.items()},
        groups=[(word, rows) for word, rows in groups.items() if rows],
        unjudged=unjudged,
        marks=MARKS,
        meanings=MEANINGS,
        latest=latest,
        last_run=last_run,
        machines=sorted({_machine(e.outcome) for e in entries}),
        picture=lambda entry, chart: picture(folders.charts / entry.outcome.notebook, chart),
        spec=script_json,
        style=Markup((page / "report.css").read_text("utf-8")),  # noqa: S704 - our own file
        script=script_text((page / "report.js").read_text("utf-8")),
        vega=script_text(vega.bundle()) if any(s.charts for e in entries for s in e.sections) else "",
    )


def _machine(outcome: Outcome) -> str:
    m = outcome.machine
    return f"{m['cores']} cores, {m['system']}, Python {m['python']}"


def shown_parameter(value: Any) -> str:
    """A parameter's value as a person reads it; a path of the user loses the folders above it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(shown_parameter(item) for item in value) or "(empty)"
    return without_folders(str(value)) or "(empty)"


def picture(folder: Path, chart: artefacts.ChartOutput) -> str:
    """The still picture of a chart as a data address: the vector file if it is there and not huge, else the bitmap."""
    file = folder / f"{chart.name}.svg"
    if file.is_file() and file.stat().st_size <= _LARGEST_SVG_BYTES:
        return "data:image/svg+xml;base64," + base64.b64encode(file.read_bytes()).decode()
    return "data:image/png;base64," + "".join(chart.png.split())


def script_json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


def script_text(code: str) -> Markup:
    """A script that cannot end its element early."""
    return Markup(code.replace("</script", "<\\/script").replace("<!--", "<\\!--"))  # noqa: S704 - escaped here
