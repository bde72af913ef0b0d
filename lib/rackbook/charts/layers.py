"""Layers that many charts draw: points, lines and rules that show their origin, stacked bars, numbers at their points.

A color is either one for the whole layer, as text, or an encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from rackbook.charts import theme

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTLINED = ({"stroke": "white", "strokeWidth": 4}, {})
"""Text over lines is written twice: these are the marks' options, first for its outline, then for the text itself."""


def points(
    frame: pl.DataFrame,
    x: alt.X | str,
    y: alt.Y | str,
    shown: Sequence[str],
    *,
    color: Any,
    size: float = 90,
    shape: alt.Shape | None = None,
) -> alt.Chart:
    """Points that show their origin in shape and tooltip.

    Args:
        frame: one row per point, with origin and source.
        x: their encoding across.
        y: their encoding upwards.
        shown: the columns of the tooltip.
        color: theirs.
        size: their area, in square pixels.
        shape: the origin's encoding where the legend lists more than the frame's origins.
    """
    in_mark, in_encoding = _mark_or_encoding(color)
    return (
        alt.Chart(frame)
        .mark_point(filled=True, size=size, opacity=1, color=in_mark)
        .encode(
            x=x,
            y=y,
            color=in_encoding,
            shape=shape or theme.origin_shape(frame["origin"]),
            tooltip=theme.tooltip(*shown),
        )
    )


def lines(
    frame: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    shown: Sequence[str],
    *,
    color: Any,
    dash: alt.StrokeDash | None = None,
    width: alt.typing.Optional[float] = alt.Undefined,
    opacity: alt.typing.Optional[float] = alt.Undefined,
) -> alt.Chart:
    """Lines that show their origin in dash and tooltip.

    Args:
        frame: one row per corner, with origin and source.
        x: their encoding across.
        y: their encoding upwards.
        shown: the columns of the tooltip.
        color: theirs; an encoding gives one line per value.
        dash: the origin's encoding where the legend lists more than the frame's origins.
        width: in pixels, where it is not the theme's.
        opacity: from 0 to 1.
    """
    in_mark, in_encoding = _mark_or_encoding(color)
    return (
        alt.Chart(frame)
        .mark_line(color=in_mark, strokeWidth=width, opacity=opacity)
        .encode(
            x=x,
            y=y,
            color=in_encoding,
            strokeDash=dash or theme.origin_dash(frame["origin"]),
            tooltip=theme.tooltip(*shown),
        )
    )


def rules(
    frame: pl.DataFrame,
    at: alt.X | alt.Y,
    shown: Sequence[str],
    *,
    color: Any,
    width: float,
    dash: alt.StrokeDash | None = None,
) -> alt.Chart:
    """Rules across the whole plot at values to compare with; dash and tooltip show their origin.

    Args:
        frame: one row per rule, with origin and source.
        at: the values: an x encoding for upright rules, a y encoding for level ones.
        shown: the columns of the tooltip.
        color: theirs.
        width: in pixels.
        dash: the origin's encoding where the legend lists more than the frame's origins.
    """
    in_mark, in_encoding = _mark_or_encoding(color)
    return (
        alt.Chart(frame)
        .mark_rule(color=in_mark, strokeWidth=width)
        .encode(
            at, color=in_encoding, strokeDash=dash or theme.origin_dash(frame["origin"]), tooltip=theme.tooltip(*shown)
        )
    )


def stacked_bars(
    frame: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    order: str,
    shown: Sequence[str],
    *,
    color: alt.Color,
    opacity: alt.typing.Optional[float] = alt.Undefined,
) -> alt.Chart:
    """Bars of parts; the tooltip shows their origin, :func:`origin_marks` show it on them.

    Args:
        frame: one row per part, with origin and source.
        x: their encoding across: the length of level bars, the name of upright ones.
        y: their encoding upwards: the name of level bars, the length of upright ones.
        order: the column that the parts of a bar are stacked by; :func:`place` gives it.
        shown: the columns of the tooltip.
        color: which part it is.
        opacity: from 0 to 1.
    """
    return (
        alt.Chart(frame)
        .mark_bar(opacity=opacity)
        .encode(x=x, y=y, color=color, order=f"{order}:O", tooltip=theme.tooltip(*shown))
    )


def origin_marks(
    frame: pl.DataFrame,
    x: alt.X | str,
    y: alt.Y,
    *,
    size: float = 50,
    y_offset: alt.typing.Optional[float] = alt.Undefined,
    shape: alt.Shape | None = None,
) -> alt.Chart:
    """Dark marks that show in their shape the origin of the bars that they lie on; the bars have the tooltip.

    Args:
        frame: one row per mark, with origin.
        x: their encoding across.
        y: their encoding upwards.
        size: their area, in square pixels.
        y_offset: how far below y they lie, in pixels.
        shape: the origin's encoding where the legend lists more than the frame's origins.
    """
    return (
        alt.Chart(frame)
        .mark_point(filled=True, color=theme.INK, size=size, opacity=1, yOffset=y_offset)
        .encode(x=x, y=y, shape=shape or theme.origin_shape(frame["origin"]))
    )


def numbers(
    frame: pl.DataFrame,
    x: alt.X | str,
    y: alt.Y | str,
    name: str,
    digits: str,
    *,
    dx: float = 0,
    dy: float = 0,
    color: Any = theme.INK,
    font_size: alt.typing.Optional[float] = alt.Undefined,
) -> alt.Chart:
    """A column's numbers, written at their points.

    Args:
        frame: one row per number.
        x: the points' encoding across.
        y: the points' encoding upwards.
        name: the column.
        digits: how a number is written, as d3-format has it.
        dx: how far to the right of its point a number begins, in pixels; below 0, how far to the left it ends.
        dy: how far below its point it stands.
        color: theirs.
        font_size: in pixels, where it is not Vega-Lite's.
    """
    in_mark, in_encoding = _mark_or_encoding(color)
    align = "left" if dx > 0 else "right" if dx < 0 else alt.Undefined
    return (
        alt.Chart(frame)
        .mark_text(dx=dx or alt.Undefined, dy=dy or alt.Undefined, align=align, color=in_mark, fontSize=font_size)
        .encode(x=x, y=y, color=in_encoding, text=alt.Text(f"{name}:Q", format=digits))
    )


def place(name: str, order: Sequence[str]) -> pl.Expr:
    """The place of each of a column's values in an order: what stacked bars are stacked by."""
    return pl.col(name).replace_strict({value: number for number, value in enumerate(order)}, return_dtype=pl.Int64)


def middle(name: str, over: str) -> pl.Expr:
    """Where the middle of each part lies when the rows of one ``over`` are stacked in their order."""
    return pl.col(name).cum_sum().over(over) - pl.col(name) / 2


def _mark_or_encoding(color: Any) -> tuple[Any, Any]:
    return (color, alt.Undefined) if isinstance(color, str) else (alt.Undefined, color)
