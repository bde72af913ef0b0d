"""Repeated measurements of several variants in turn, until the spread is small enough or the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rackbook.errors import ParameterError
from rackbook.intervals import Interval, median_interval

MIN_REPEATS = 6
"""The fewest values from which a median has an interval at 95 %."""

LEAST_NS = 200_000
"""A short piece of work is repeated until a sample is about so long, so that the clock does not count."""


@dataclass(frozen=True)
class Samples:
    """The repeats of one variant.

    Attributes:
        values: one per repeat, in order.
        interval: of their median.
        tight: whether the interval is as narrow as was asked for; if not, the budget ended first.
    """

    values: tuple[float, ...]
    interval: Interval
    tight: bool


def interleaved(
    variants: Mapping[str, Callable[[], float]],
    *,
    budget_s: float,
    relative_halfwidth: float = 0.03,
    max_repeats: int = 200,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Samples]:
    """Measure each variant once per round, starting with another one each round, so that a drift hits all alike.

    Rounds end when the interval of every variant is narrow enough, or with the budget; every variant has at least one
    value, and all have as many.

    Args:
        variants: by name, a function that measures once and returns the value.
        budget_s: time for all rounds; the round in which it ends is finished.
        relative_halfwidth: half the width of the median's 95 % interval over the median, at most.
        max_repeats: rounds, at most.
        clock: monotonic seconds.

    Raises:
        ParameterError: no variant, or a budget or a number of repeats that is not positive.
    """
    if not variants or not budget_s > 0 or max_repeats < 1:
        raise ParameterError(
            f"got {len(variants)} variants, budget_s = {budget_s!r}, max_repeats = {max_repeats!r}; "
            "allowed: one variant or more, a budget > 0, one repeat or more"
        )
    names = list(variants)
    values: dict[str, list[float]] = {name: [] for name in names}
    end = clock() + budget_s
    for turn in range(max_repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(float(variants[name]()))
        if clock() >= end or (
            turn + 1 >= MIN_REPEATS and all(_is_tight(found, relative_halfwidth) for found in values.values())
        ):
            break
    return {
        name: Samples(tuple(found), median_interval(found), _is_tight(found, relative_halfwidth))
        for name, found in values.items()
    }


def cpu_us(work: Callable[[], object]) -> float:
    """CPU time of this thread in µs for one call: the mean of as many as make a sample, after one to find that."""
    before = time.thread_time_ns()
    work()
    times = max(1, LEAST_NS // max(time.thread_time_ns() - before, 1))
    before = time.thread_time_ns()
    for _ in range(times):
        work()
    return (time.thread_time_ns() - before) / times * 1e-3


def _is_tight(values: list[float], relative_halfwidth: float) -> bool:
    found = median_interval(values)
    if found.low is None or found.high is None:
        return False
    return found.high - found.low <= 2 * relative_halfwidth * abs(found.estimate)
