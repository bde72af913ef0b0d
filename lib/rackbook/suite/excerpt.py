"""What the report takes from an executed notebook: its charts, each with its section and how to read it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import mistune

from rackbook.suite.artefacts import ChartError, ChartOutput, charts
from rackbook.suite.notebooks import source
from rackbook.suite.outcomes import without_colour

READING = "**Reading it.**"
RESULT = "Result and limits"

_NOTEBOOK_LINK = re.compile(r"(?:\./)?(\d\d_\w+)\.ipynb")


@dataclass
class Section:
    """One question of a notebook.

    Attributes:
        heading: the question.
        lead: what the notebook says before the chart, HTML.
        charts: the charts, in order.
        readings: how to read them, HTML.
    """

    heading: str
    lead: str = ""
    charts: list[ChartOutput] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)


def sections(content: dict[str, Any]) -> list[Section]:
    """The sections that have charts, and the closing one.

    A "Reading it" belongs to the chart before it; one that explains a table alone is left to the notebook.
    """
    try:
        by_cell: dict[int, list[ChartOutput]] = {}
        for chart in charts(content):
            by_cell.setdefault(chart.cell, []).append(chart)
    except ChartError:
        by_cell = {}  # the notebook failed for this, and says so
    found: list[Section] = [Section("")]
    unread = False
    for index, cell in enumerate(content["cells"]):
        if index in by_cell:
            found[-1].charts += by_cell[index]
            unread = True
        if cell["cell_type"] != "markdown":
            continue
        for part in re.split(r"^(?=## )", source(cell), flags=re.MULTILINE):
            text = part.strip()
            if text.startswith("## "):
                heading, _, rest = text.removeprefix("## ").partition("\n")
                found.append(Section(heading.strip()))
                unread, text = False, rest.strip()
                if not text.startswith(READING):
                    found[-1].lead = markdown(text)
                    continue
            if text.startswith(READING) and unread:
                found[-1].readings.append(markdown(text))
                unread = False
    return [s for s in found if s.charts or s.heading == RESULT]


def error(content: dict[str, Any]) -> str:
    """The traceback of the failing cell, without colours; empty if no cell has an error."""
    for cell in content["cells"]:
        for output in cell.get("outputs", []):
            if output.get("output_type") == "error":
                return without_colour("\n".join(output.get("traceback") or [f"{output['ename']}: {output['evalue']}"]))
    return ""


class _Renderer(mistune.HTMLRenderer):
    """HTML for a page that stands alone: no picture from elsewhere, links between notebooks stay in the page."""

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if match := _NOTEBOOK_LINK.fullmatch(url.partition("#")[0]):
            return f'<a href="#{match[1]}">{text}</a>'
        if url.startswith(("https://", "http://")):
            return super().link(text, url, title)
        return text

    def image(self, text: str, url: str, title: str | None = None) -> str:  # noqa: ARG002 - mistune's signature
        return mistune.escape(text)

    def heading(self, text: str, level: int, **_: Any) -> str:
        return f"<h{min(level + 2, 6)}>{text}</h{min(level + 2, 6)}>\n"


_markdown = mistune.create_markdown(renderer=_Renderer(escape=True), plugins=["table"])


def markdown(text: str) -> str:
    """Markdown as HTML; HTML in it is shown as text."""
    return str(_markdown(text)).strip()
