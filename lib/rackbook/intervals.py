"""Confidence intervals over repeated runs; a run, never a request, is the unit that repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rackbook.errors import DataError


@dataclass(frozen=True)
class Interval:
    """An estimate and how far it can be off.

    Attributes:
        estimate: mean or median, in the unit of the values.
        low: lower bound; None where the values are too few to give one.
        high: upper bound; None where the values are too few to give one.
        num_values: repeats that entered.
        confidence: coverage of the interval, between 0 and 1.
    """

    estimate: float
    low: float | None
    high: float | None
    num_values: int
    confidence: float


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of repeats with Student's t interval; independent, roughly normal repeats are assumed.

    Args:
        values: one number per repeat.
        confidence: coverage.

    Raises:
        DataError: no value, one that is not finite, or a confidence outside (0, 1).
    """
    found = _checked(values, confidence)
    mean = math.fsum(found) / len(found)
    if len(found) < 2:
        return Interval(mean, None, None, 1, confidence)
    half = _t(confidence, len(found) - 1) * math.sqrt(_variance(found, mean) / len(found))
    return Interval(mean, mean - half, mean + half, len(found), confidence)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Median of repeats with the interval between two order statistics; no law of the values is assumed.

    The bounds are the k-th smallest and the k-th largest value for the largest k whose coverage, 1 − 2·P(B < k) with
    B binomial(n, 1/2), still reaches the confidence. At 95 % that takes six values; with fewer there are no bounds.

    Args:
        values: one number per repeat.
        confidence: coverage, reached or exceeded.

    Raises:
        DataError: as :func:`mean_interval`.
    """
    found = sorted(_checked(values, confidence))
    n = len(found)
    median = (found[(n - 1) // 2] + found[n // 2]) / 2
    rank, below = 0, 0.0  # P(B < rank)
    while rank < n // 2:
        below += math.exp(math.lgamma(n + 1) - math.lgamma(rank + 1) - math.lgamma(n - rank + 1) - n * math.log(2))
        if 1 - 2 * below < confidence:
            break
        rank += 1
    if rank == 0:
        return Interval(median, None, None, n, confidence)
    return Interval(median, found[rank - 1], found[n - rank], n, confidence)


def _t(confidence: float, freedom: int) -> float:
    from scipy import special  # costs more to import than most commands take

    return float(special.stdtrit(freedom, 0.5 + confidence / 2))


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def _checked(values: Sequence[float], confidence: float) -> list[float]:
    if not 0 < confidence < 1:
        raise DataError(f"confidence: got {confidence}, allowed: between 0 and 1, e.g. 0.95")
    found = [math.nan if v is None else float(v) for v in values]
    if not found:
        raise DataError("an interval needs at least one value, got none")
    if wrong := [v for v in found if not math.isfinite(v)]:
        raise DataError(
            f"an interval needs finite values, got {wrong[0]} among {len(found)}; drop no run: find out why"
        )
    return found
