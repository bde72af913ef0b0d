"""How every chart looks, and how it shows the origin of what it draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt

from rackbook.tables import ORIGINS, column, title

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INK = "#1f2933"
MUTED = "#5f6b7a"
GRID = "#e3e7ec"

# Okabe and Ito's palette, which readers with the common colour deficiencies can tell apart; darkened yellow.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a800", "#7f7f7f",
)  # fmt: skip

ENTITY_COLORS = {
    "vLLM": BLUE,
    "DeepInfer": VERMILLION,
    "SGLang": GREEN,
    "target": BLUE,
    "draft": ORANGE,
    "reproduced": GREEN,
    "consistent": BLUE,
    "inconsistent": ORANGE,
    "refuted": VERMILLION,
    "open": GREY,
    "prefill": PURPLE,
    "decode": SKY,
    "off-peak": SKY,
    "peak": ORANGE,
    "target experts": BLUE,
    "draft experts": ORANGE,
    "attention, dense, routers": PURPLE,
    "LM head": YELLOW,
    "before": GREY,
    "after": BLUE,
    "given": GREEN,
    "waited for": VERMILLION,
    "either": YELLOW,
    "hidden": SKY,
    "proportional to the ranks": ORANGE,
    "ring": VERMILLION,
    "recursive doubling": BLUE,
    "measured list": PURPLE,
    "measured int32": SKY,
    "Gloo all-reduce": VERMILLION,
    "doubling over Gloo": BLUE,
    "vLLM's all-reduce": GREEN,
    "doubling over sockets": SKY,
    "ring over sockets": ORANGE,
    "list → list, new memory": GREY,
    "list → int32, new memory": VERMILLION,
    "list → int32, reused memory": ORANGE,
    "int32 → int32, new memory": GREEN,
    "int32 → int32, reused memory": BLUE,
    "int32 → int32 in chunks, reused memory": SKY,
    "every block": GREY,
    "null blocks skipped": BLUE,
    "row by row": VERMILLION,
    "gathered": ORANGE,
    "packed, then sent": SKY,
    "one packed region": BLUE,
    "GPU": BLUE,
    "gap": VERMILLION,
    "in": BLUE,
    "not in": "#d5dae1",
    "not known": "#f3e2b3",
    "by dates": ORANGE,
    "by content": BLUE,
    "forward pass": BLUE,
    "engine step": PURPLE,
    "target MoE": BLUE,
    "whole step": PURPLE,
    "reading the experts": BLUE,
    "everything else": GREY,
    "all weights": MUTED,
    "experts": BLUE,
    "scales": SKY,
    "embedding, LM head": YELLOW,
    "rest of the sum": GREY,
    "decoding": SKY,
    "waiting and prefill": ORANGE,
    "computing": BLUE,
    "waiting": ORANGE,
    "no request": "#d5dae1",
    "mirror replay": BLUE,
    "lag replay": ORANGE,
    "AgentX, prefill only": PURPLE,
    "every rank busy": BLUE,
    "one rank busy": ORANGE,
    "DEP2": BLUE,
    "DEP4": VERMILLION,
    "round-robin": GREY,
    "least-requests": BLUE,
    "least-tokens": GREEN,
    "uniform": GREY,
    "normal": SKY,
    "exponential": BLUE,
    "lognormal": PURPLE,
    "rare spikes": ORANGE,
    "moe": BLUE,
    "attention_indexer": ORANGE,
    "rest": PURPLE,
    "unassigned": GREY,
    "SWA bounded replay extended to layer 20": BLUE,
    "Engram host table on 2 MB GPU pages": GREEN,
    "DeepSelect top-k in the prefill indexer": ORANGE,
    "all three": VERMILLION,
    "multiplied": BLUE,
    "as routed, without EPLB": VERMILLION,
    "as routed, with EPLB": GREEN,
    "the part that more ranks do not shrink": PURPLE,
    "all of the MoE time": ORANGE,
    "added": ORANGE,
    "specialised": BLUE,
    "baseline": GREY,
}
"""A colour belongs to an entity in every chart."""

ORIGIN_SHAPES = {
    "published": "circle",
    "derived": "diamond",
    "measured": "square",
    "modelled": "cross",
    "simulated": "triangle-up",
}
ORIGIN_DASHES = {"published": [1, 0], "derived": [2, 2], "measured": [1, 0], "modelled": [6, 3], "simulated": [3, 2]}


def configuration() -> alt.theme.ThemeConfig:
    """The Vega-Lite configuration: light, dark ink on white, thin grid, room for titles."""
    font = "DejaVu Sans, Arial, sans-serif"
    return {
        "config": {
            "font": font,
            "background": "white",
            "view": {"continuousWidth": 460, "continuousHeight": 280, "stroke": None},
            "title": {
                "anchor": "start", "fontSize": 14, "fontWeight": 600, "color": INK, "offset": 12,
                "subtitleColor": MUTED, "subtitleFontSize": 11, "subtitlePadding": 4,
            },
            "axis": {
                "labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 11,
                "titleFontWeight": "normal", "gridColor": GRID, "domainColor": MUTED, "tickColor": MUTED,
                "titlePadding": 8,
            },
            "legend": {"labelColor": INK, "titleColor": MUTED, "titleFontWeight": "normal", "labelLimit": 260},
            "header": {"labelColor": INK, "titleColor": MUTED, "labelFontSize": 11},
            "range": {"category": [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, YELLOW, GREY]},
            "point": {"size": 70, "filled": True},
            "line": {"strokeWidth": 2},
        }
    }  # fmt: skip


def origin_shape(origins: Iterable[str] = ORIGINS) -> alt.Shape:
    """Encode the origin as the point's shape; give the origins that are drawn so that the legend lists no other."""
    domain = drawn(origins, ORIGINS)
    return alt.Shape(
        "origin:N",
        title=f"{title('origin')} of points",
        scale=alt.Scale(domain=domain, range=[ORIGIN_SHAPES[o] for o in domain]),
    )


def origin_dash(origins: Iterable[str] = ORIGINS) -> alt.StrokeDash:
    """Encode the origin as the line's dash."""
    domain = drawn(origins, ORIGINS)
    return alt.StrokeDash(
        "origin:N",
        title=f"{title('origin')} of lines",
        scale=alt.Scale(domain=domain, range=[ORIGIN_DASHES[o] for o in domain]),
    )


def entity_color(name: str, entities: Sequence[str]) -> alt.Color:
    """Encode a column of entities in their own colours.

    Args:
        name: the column.
        entities: the values that are drawn, in legend order.

    Raises:
        KeyError: an entity has no colour of its own yet.
    """
    return alt.Color(
        f"{name}:N",
        title=title(name),
        scale=alt.Scale(domain=list(entities), range=[ENTITY_COLORS[e] for e in entities]),
    )


def stable_opacity() -> alt.Opacity:
    """Encode whether a measurement was stable: one that was not is faint."""
    return alt.Opacity("stable:N", title=title("stable"), scale=alt.Scale(domain=[True, False], range=[1, 0.3]))


def drawn(values: Iterable[str], order: Sequence[str]) -> list[str]:
    """Those of an order that are among the values: what a legend lists."""
    there = set(values)
    return [value for value in order if value in there]


def x(name: str, **options: Any) -> alt.X:
    """A quantitative x axis, titled from the vocabulary."""
    return alt.X(f"{name}:Q", title=_axis_title(name, options), **options)


def y(name: str, **options: Any) -> alt.Y:
    """A quantitative y axis, titled from the vocabulary."""
    return alt.Y(f"{name}:Q", title=_axis_title(name, options), **options)


def _axis_title(name: str, options: dict[str, Any]) -> str:
    scale = options.get("scale")
    scale = scale.to_dict() if isinstance(scale, alt.Scale) else {}
    notes = [f"{scale['type']} scale"] if scale.get("type") in ("log", "symlog", "pow", "sqrt") else []
    if scale.get("type") != "log" and not _starts_at_zero(scale):
        notes.append("axis does not start at 0")
    return ", ".join([title(name), *notes])


def _starts_at_zero(scale: dict[str, Any]) -> bool:
    """Whether a linear axis shows 0, as it does where neither ``zero`` nor a domain says otherwise."""
    low, high = (scale.get(end) for end in ("domainMin", "domainMax"))
    if isinstance(domain := scale.get("domain"), list):
        low, high = min(domain), max(domain)
    return scale.get("zero") is not False and (low is None or low <= 0) and (high is None or high >= 0)


def tooltip(*names: str) -> list[alt.Tooltip]:
    """Tooltips for the named columns, with titles and units, always ending with origin and source."""
    kinds = {"Int64": "Q", "Float64": "Q", "String": "N", "Boolean": "N", "Date": "T"}
    shown = dict.fromkeys((*names, "origin", "source"))
    return [
        alt.Tooltip(
            f"{name}:{kinds[column(name).dtype.__name__]}",
            title=title(name),
            **({"format": ",.4~g"} if column(name).dtype.__name__ == "Float64" else {}),
        )
        for name in shown
    ]


def headline(text: str, subtitle: str | list[str]) -> alt.TitleParams:
    """A chart's title: the finding or the measure, then hardware, model and sample in the subtitle."""
    return alt.TitleParams(text=text, subtitle=subtitle)


def note(text: str) -> alt.TitleParams:
    """The quiet title of one panel among several: what it is, or how to read it."""
    return alt.TitleParams(text, fontSize=10, fontWeight="normal", color=MUTED, offset=2)
