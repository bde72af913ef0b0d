"""Pareto frontiers of serving points: which points may be compared, and which of those are not beaten.

A frontier answers "what is the most throughput at this speed per user" for one system under one workload.
Points whose conditions differ, or are not stated, answer different questions and share no frontier unless
that is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.errors import DataError, ParameterError, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def comparable(points: pl.DataFrame, must_be_equal: Sequence[str], within: Sequence[str]) -> pl.Series:
    """Name the curve that each point belongs to.

    Two points share a curve if all conditions are stated and equal. A condition that is null is not known,
    and not known is not equal: such a point shares a curve only with points of the same ``within`` that state
    and leave out the same conditions: one experiment of one source keeps its conditions fixed.

    Args:
        points: one row per point, with all the named columns.
        must_be_equal: the conditions.
        within: columns that identify one experiment of one source.

    Returns:
        Curve names, in row order: ``"curve 1"``, ``"curve 2"``, … in the order in which they appear.

    Raises:
        ParameterError: a column that ``points`` does not have.
    """
    for name in (*must_be_equal, *within):
        if name not in points.columns:
            raise ParameterError(one_of(name, points.columns, "condition"))
    numbers: dict[tuple[object, ...], int] = {}
    curves = []
    for row in points.iter_rows(named=True):
        conditions = tuple(row[name] for name in must_be_equal)
        experiment = tuple(row[name] for name in within) if None in conditions else ()
        curves.append(f"curve {numbers.setdefault((conditions, experiment), len(numbers) + 1)}")
    return pl.Series("curve", curves, dtype=pl.String)


def on_frontier(points: pl.DataFrame, first: str, second: str, *, by: str | None = None) -> pl.Series:
    """Say which points no other point of their group beats; more is better on both axes.

    A point is beaten if another is at least as good on both axes and better on one: tied on one and worse on
    the other is beaten, tied on both is not. A point with a null or NaN on an axis is never on a frontier and
    beats nobody.

    Args:
        points: one row per point.
        first: column of the first axis.
        second: column of the second axis.
        by: column whose values separate the groups; None for a single group.

    Returns:
        True or false per row, in row order.

    Raises:
        DataError: a column is missing.
    """
    for name in (first, second, *([by] if by else [])):
        if name not in points.columns:
            raise DataError(one_of(name, points.columns, "column"))
    rows = list(zip(points[first], points[second], points[by] if by else [None] * points.height, strict=True))
    complete = [a is not None and b is not None and a == a and b == b for a, b, _ in rows]
    found = []
    for (a, b, group), usable in zip(rows, complete, strict=True):
        rivals = (r for r, known in zip(rows, complete, strict=True) if known and r[2] == group)
        found.append(usable and not any(x >= a and y >= b and (x > a or y > b) for x, y, _ in rivals))
    return pl.Series("on_frontier", found, dtype=pl.Boolean)
