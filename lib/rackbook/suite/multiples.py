"""Small multiples: the same chart of several executions side by side, on the same axes."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rackbook import pictures
from rackbook.suite.artefacts import ChartError, charts

COLUMNS = 2
MOST = 36
"""Most charts in one figure; more are too small to compare and too much for a page."""

_SHARED = ("$schema", "config", "datasets", "params", "name")
_COMPOSED = ("hconcat", "vconcat", "concat", "facet", "repeat")
_TITLE_PX, _WIDEST_PX = 13, 400


@dataclass(frozen=True)
class Tile:
    """One execution.

    Attributes:
        values: its swept values as text, by parameter.
        content: its executed notebook; None if it is not complete.
        error: why it failed; empty if it did not.
    """

    values: dict[str, str]
    content: dict[str, Any] | None
    error: str

    @property
    def title(self) -> str:
        """What tells it from the others."""
        return ", ".join(f"{name} {value}" for name, value in self.values.items()) or "defaults"


@dataclass(frozen=True)
class Figure:
    """One chart over the executions.

    Attributes:
        name: of the chart.
        title: what it shows, from the chart of the first execution.
        subtitle: hardware, model and sample; empty where it differs between the tiles, which then have their own.
        spec: Vega-Lite specification of all tiles.
        svg: the picture of it.
        missing: title and error of the executions that have no such chart.
        left_out: how many are not drawn because there are too many.
        same: the chart is the same in every execution, and drawn once.
        shared: the axes, x and y, that are the same in all tiles.
    """

    name: str
    title: str
    subtitle: str
    spec: dict[str, Any]
    svg: str
    missing: list[tuple[str, str]] = field(default_factory=list)
    left_out: int = 0
    same: bool = False
    shared: tuple[str, ...] = ()


def figures(tiles: Sequence[Tile]) -> list[Figure]:
    """One figure per chart of the notebook, in the notebook's order."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for number, tile in enumerate(tiles):
        try:
            for chart in charts(tile.content) if tile.content else ():
                found.setdefault(chart.name, {})[number] = chart.spec
        except ChartError:
            continue
    return [_figure(name, specs, tiles) for name, specs in found.items()]


def _figure(name: str, specs: dict[int, dict[str, Any]], tiles: Sequence[Tile]) -> Figure:
    missing = [(t.title, t.error or "has not run yet") for i, t in enumerate(tiles) if i not in specs]
    same: dict[str, list[int]] = {}
    for number, spec in specs.items():
        same.setdefault(json.dumps(spec, sort_keys=True), []).append(number)
    drawn = [(_shared_title([tiles[i] for i in numbers]), specs[numbers[0]]) for numbers in same.values()]
    title, subtitle = _titles(drawn[0][1])
    if len(drawn) == 1:
        return Figure(name, title, subtitle, drawn[0][1], pictures.svg(drawn[0][1]), missing, same=len(specs) > 1)
    if len({_titles(spec)[1] for _, spec in drawn}) > 1:
        subtitle = ""
    shown = drawn[:MOST]
    composed = any(key in spec for _, spec in shown for key in _COMPOSED)
    for shared in ((),) if composed else (("x", "y"), ("x",), ("y",), ()):
        spec = _together(name, shown, shared, columns=1 if composed else COLUMNS, conditions=not subtitle)
        try:
            svg = pictures.svg(spec)
        except ValueError:  # an axis of categories cannot be shared where each category has a fixed width
            if not shared:
                raise
            continue
        return Figure(name, title, subtitle, spec, svg, missing, len(drawn) - len(shown), shared=shared)
    raise AssertionError("the last attempt returns or raises")


def _together(
    name: str, drawn: list[tuple[str, dict[str, Any]]], shared: tuple[str, ...], *, columns: int, conditions: bool
) -> dict[str, Any]:
    """One specification of several charts; their data move to the top, where Vega-Lite looks for them by name.

    Args:
        name: of the chart.
        drawn: title and specification of each tile.
        shared: axes that all tiles have in common.
        columns: tiles in a row.
        conditions: whether each tile says under which conditions it holds.
    """
    first = drawn[0][1]
    datasets: dict[str, Any] = {}
    parts = []
    for title, spec in drawn:
        datasets |= spec.get("datasets", {})
        part = {key: copy.deepcopy(value) for key, value in spec.items() if key not in _SHARED}
        if isinstance(part.get("width"), int):
            part["width"] = min(part["width"], _WIDEST_PX)
        below = [line for line in _titles(spec)[: 1 + conditions] if line]
        part["title"] = {"text": title, "subtitle": below, "anchor": "start", "fontSize": _TITLE_PX}
        parts.append(part)
    together = {
        "$schema": first["$schema"],
        "name": name,
        "config": first.get("config", {}),
        "concat": parts,
        "columns": columns,
        "spacing": 30,
    }
    if datasets:
        together["datasets"] = datasets
    if shared:
        together["resolve"] = {"scale": dict.fromkeys((*shared, "color", "shape"), "shared")}
    return together


def _shared_title(tiles: list[Tile]) -> str:
    """What tells tiles with the same chart from the others: the values that they have in common, and how many."""
    if len(tiles) == 1:
        return tiles[0].title
    common = {name: v for name, v in tiles[0].values.items() if all(t.values[name] == v for t in tiles)}
    words = [f"{name} {value}" for name, value in common.items()]
    return ", ".join([*words, f"the same in {len(tiles)} executions"])


def _titles(spec: dict[str, Any]) -> tuple[str, str]:
    title = spec.get("title", "")
    if isinstance(title, dict):
        return _line(title.get("text", "")), _line(title.get("subtitle", ""))
    return _line(title), ""


def _line(text: Any) -> str:
    return " ".join(text) if isinstance(text, list) else str(text)
