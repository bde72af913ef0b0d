"""What every chart must satisfy; each chart test calls :func:`check_chart` with real or hand-made data."""

from __future__ import annotations

from typing import Any

import vl_convert

from rackbook.charts import rendering, theme
from rackbook.tables import COLUMNS, ORIGINS


def check_chart(chart: Any, *, name: str) -> dict[str, Any]:
    """Assert that a chart is complete, and return its specification.

    The specification validates and renders, it has the name, a title and a subtitle; every field it encodes exists
    in its data or comes from a transform; every quantitative axis is titled with the words and the unit of a column
    of the vocabulary; the origin is visible (a field, or said in the title or subtitle).
    """
    spec = rendering.normalized(chart.to_dict())
    assert spec["name"] == name
    assert spec["title"]["text"]
    assert spec["title"]["subtitle"]
    datasets = spec.get("datasets", {})
    units = list(_units(spec, spec.get("data"), set()))
    assert units, "the chart draws nothing"
    titled: dict[str, bool] = {}
    for unit, data, made in units:
        rows = _rows(data, datasets)
        columns = set(rows[0]) if rows else None
        for channel, definition in _encodings(unit):
            field = definition.get("field")
            if field is None:
                continue
            plain = field.replace("\\", "")
            if columns is not None:
                assert plain in columns | made, f"{channel} encodes {field!r}, the data has {sorted(columns)}"
            if channel in ("x", "y") and definition.get("type") == "quantitative":
                titled[channel] = titled.get(channel, False) | _is_titled(definition)
    assert all(titled.values()), f"no title on the axis of {[c for c, found in titled.items() if not found]}"
    words = str(spec["title"]) + str([definition for unit, _, _ in units for _, definition in _encodings(unit)])
    assert "origin" in words or any(origin in words for origin in ORIGINS), "the origin is not visible"
    used = {key for key in ("independent",) if key in str(spec.get("resolve", {}).get("scale", {}))}
    assert not (used and "layer" in spec), "two scales in one layered chart"
    png = vl_convert.vegalite_to_png(spec | {"config": theme.configuration()["config"] | spec.get("config", {})})
    assert png.startswith(b"\x89PNG")
    return spec


def _is_titled(definition: dict[str, Any]) -> bool:
    """Whether an axis is titled explicitly; the title must be a column's. Layers share the title that one gives."""
    title = definition.get("title") or (definition.get("axis") or {}).get("title")
    if title is None:
        return "title" in definition
    titles = {column.title for column in COLUMNS.values()}
    assert any(title.startswith(t) for t in titles), f"axis title {title!r} is not a column's title"
    return True


def _encodings(unit: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    pairs = []
    for channel, definition in unit.get("encoding", {}).items():
        for one in definition if isinstance(definition, list) else [definition]:
            if isinstance(one, dict):
                pairs.append((channel, one))
    return pairs


def _units(spec: dict[str, Any], data: Any, made: set[str]):
    data = spec.get("data", data)
    made = made | {name for t in spec.get("transform", []) for name in _made(t)}
    children = [child for key in ("layer", "hconcat", "vconcat", "concat") for child in spec.get(key, [])] + (
        [spec["spec"]] if "spec" in spec else []
    )
    if children:
        inherited = spec.get("encoding", {})
        for child in children:
            merged = child | {"encoding": inherited | child.get("encoding", {})} if inherited else child
            yield from _units(merged, data, made)
    elif "mark" in spec:
        yield spec, data, made


def _made(transform: dict[str, Any]) -> set[str]:
    names = transform.get("as", [])
    found = {names} if isinstance(names, str) else set(names)
    for group in ("aggregate", "joinaggregate", "window"):
        if isinstance(transform.get(group), list):
            found |= {entry["as"] for entry in transform[group]}
    return found


def _rows(data: Any, datasets: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if isinstance(data, dict) and "name" in data:
        return datasets.get(data["name"], [])
    if isinstance(data, dict) and isinstance(data.get("values"), list):
        return data["values"]
    return []
