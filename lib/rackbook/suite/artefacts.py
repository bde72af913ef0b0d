"""The files that a notebook leaves beside it: each chart as specification, vector picture and bitmap."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook import pictures
from rackbook.errors import DataError
from rackbook.pictures import VEGALITE_MIME

VERDICTS_MIME = "application/vnd.rackbook.verdicts+json"  # as in rackbook.claims, whose import takes half a second

_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")


@dataclass(frozen=True)
class ChartOutput:
    """One chart in an executed notebook.

    Attributes:
        cell: index of its cell.
        name: from the specification; the stem of its files.
        spec: the Vega-Lite specification.
        png: the bitmap, base64.
    """

    cell: int
    name: str
    spec: dict[str, Any]
    png: str


class ChartError(DataError):
    """A chart that cannot be written.

    Attributes:
        cell: index of its cell.
    """

    def __init__(self, cell: int, message: str) -> None:
        super().__init__(message)
        self.cell = cell


def outputs(content: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every output that has data, with the index of its cell."""
    for index, cell in enumerate(content["cells"]):
        for output in cell.get("outputs", []):
            if "data" in output:
                yield index, output["data"]


def charts(content: dict[str, Any]) -> list[ChartOutput]:
    """The charts of an executed notebook, in order.

    Raises:
        ChartError: a chart without a name, with one that is no file name, or with that of another chart.
    """
    found: dict[str, ChartOutput] = {}
    for index, data in outputs(content):
        if VEGALITE_MIME not in data:
            continue
        spec = data[VEGALITE_MIME]
        name = spec.get("name", "")
        if not _NAME.fullmatch(name):
            raise ChartError(index, f"a chart has the name {name!r}, allowed: snake_case, set by properties(name=…)")
        if name in found:
            raise ChartError(index, f"two charts have the name {name!r}; a notebook must name each its own")
        png = data.get("image/png", "")
        found[name] = ChartOutput(index, name, spec, "".join(png) if isinstance(png, list) else png)
    return list(found.values())


def verdicts(content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The verdicts that the last code cell shows, as :meth:`rackbook.claims.Verdicts.records` gives them.

    None means that the notebook did not reach its end: an empty table is still a list.
    """
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for output in code[-1].get("outputs", []) if code else []:
        if VERDICTS_MIME in output.get("data", {}):
            return output["data"][VERDICTS_MIME]
    return None


def add_pictures(content: dict[str, Any]) -> None:
    """Draw the charts whose kernel left the picture to us, in place.

    Raises:
        ChartError: a chart that cannot be drawn.
    """
    for index, data in outputs(content):
        if VEGALITE_MIME in data and "image/png" not in data:
            try:
                data["image/png"] = pictures.png(data[VEGALITE_MIME])
            except ValueError as problem:
                name = data[VEGALITE_MIME].get("name", "without name")
                raise ChartError(index, f"chart {name} cannot be drawn: {problem}") from None


def write_charts(content: dict[str, Any], folder: Path) -> list[Path]:
    """Write a notebook's charts; what an earlier run left in the folder goes.

    Args:
        content: the executed notebook, with its pictures.
        folder: that of this notebook alone.

    Returns:
        The files: ``<chart>.vl.json``, ``<chart>.svg`` and ``<chart>.png`` for each chart.

    Raises:
        ChartError: a chart without a proper name, or one that cannot be drawn.
    """
    shutil.rmtree(folder, ignore_errors=True)
    found = charts(content)
    if not found:
        return []
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for chart in found:
        try:
            svg = pictures.svg(chart.spec)
        except ValueError as problem:
            raise ChartError(chart.cell, f"chart {chart.name} cannot be drawn: {problem}") from None
        (partial / f"{chart.name}.vl.json").write_text(
            json.dumps(chart.spec, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8"
        )
        (partial / f"{chart.name}.svg").write_text(svg, "utf-8")
        (partial / f"{chart.name}.png").write_bytes(base64.b64decode(chart.png))
    partial.rename(folder)
    return sorted(folder.iterdir())
