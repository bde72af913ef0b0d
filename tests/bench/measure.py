"""Measuring on a shared, noisy machine: variants in turn, medians, ratios within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """One line of the bench table.

    Attributes:
        what: what is compared.
        ours: median of ours, in ``unit``.
        reference: median of the reference, in ``unit``.
        unit: of both.
        ratio: how the two compare, as ``goal`` words it.
        goal: what the ratio should be.
        holds: whether it is.
    """

    what: str
    ours: float
    reference: float
    unit: str
    ratio: float
    goal: str
    holds: bool


def at_most(what: str, ours: float, reference: float, unit: str, limit: float) -> Ratio:
    """Ours may take at most ``limit`` times the reference."""
    ratio = ours / reference
    return Ratio(what, ours, reference, unit, ratio, f"≤ {limit:g}×", ratio <= limit)


def faster(what: str, ours: float, reference: float, unit: str, factor: float) -> Ratio:
    """Ours must be at least ``factor`` times faster than the reference."""
    ratio = reference / ours
    return Ratio(what, ours, reference, unit, ratio, f"≥ {factor:g}× faster", ratio >= factor)


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def interleaved(*variants: Callable[[], object], repeats: int = 5) -> list[float]:
    """Median seconds of each variant, run in turn so that a drift of the machine meets all of them."""
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(repeats):
        for variant, record in zip(variants, times, strict=True):
            record.append(seconds(variant))
    return [statistics.median(record) for record in times]
