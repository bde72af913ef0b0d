"""What DP imbalance costs, from pairs of replays: the loss of each pair, its mean, and how sure it is.

The unit that repeats is a pair, never a request. The same code reads a measured replay and a simulated one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from rackbook import intervals
from rackbook.errors import DataError
from rackbook.replay import throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

MIRROR, LAG, AGAIN = "mirror", "lag", "mirror again"
COMPARISONS = {"lag with mirror": LAG, "mirror with mirror": AGAIN}
"""What a mirror replay is compared with, by the name of the comparison."""

_PAIR = {
    "comparison": pl.String,
    "pair": pl.Int64,
    "loss_percent": pl.Float64,
    "whole_run_loss_percent": pl.Float64,
    "window_s": pl.Float64,
    "busy_percent": pl.Float64,
    "doubt": pl.String,
}
_SUMMARY = {
    "comparison": pl.String,
    "num_pairs": pl.Int64,
    "loss_percent": pl.Float64,
    "loss_from_percent": pl.Float64,
    "loss_to_percent": pl.Float64,
    "pair_spread_points": pl.Float64,
    "pairs_needed": pl.Int64,
    "busy_percent": pl.Float64,
    "missing_reason": pl.String,
}

LEAST_PAIRS = 4
"""Fewer pairs do not tell their spread: that of two is under an eighth of the true one in every tenth experiment."""


def order(num_pairs: int, *, control: bool = True) -> list[tuple[int, str]]:
    """The replays of an experiment: pairs in turn, every other one backwards, so that a slow drift meets both alike.

    Args:
        num_pairs: at least one.
        control: a second mirror replay joins each pair.

    Returns:
        Pair and replay in order of running: mirror, lag, mirror again; mirror again, lag, mirror; …
    """
    forwards = [MIRROR, LAG, *([AGAIN] if control else [])]
    return [
        (pair, schedule) for pair in range(num_pairs) for schedule in (forwards if pair % 2 == 0 else forwards[::-1])
    ]


def replays(requests: pl.DataFrame, doubts: dict[int, str]) -> pl.DataFrame:
    """How fast each replay went.

    Args:
        requests: replay, pair, schedule and the columns of :attr:`rackbook.replay.client.Replayed.requests`.
        doubts: why a replay may not be used, by its number.

    Returns:
        replay, pair, schedule, num_requests, run_s, window_s, window_tok_per_s, whole_run_tok_per_s, busy_percent,
        lateness_p99_ms, doubt. What was not measured is null; a replay with a request that has no answer gets a doubt.
    """
    rows = []
    for (replay, pair, schedule), own in requests.group_by("replay", "pair", "schedule", maintain_order=True):
        late = (own["sent_s"] - own["scheduled_s"]).drop_nulls()
        row = {"replay": replay, "pair": pair, "schedule": schedule, "num_requests": own["done_s"].drop_nulls().len()}
        row["lateness_p99_ms"] = None if late.is_empty() else 1e3 * late.quantile(0.99, interpolation="linear")
        row["doubt"] = doubts.get(replay)
        try:
            found = throughput.measured(own)
            row |= {
                "run_s": found.run_s,
                "window_s": found.to_s - found.from_s,
                "window_tok_per_s": found.window_tok_per_s,
                "whole_run_tok_per_s": found.whole_tok_per_s,
                "busy_percent": found.busy_percent,
            }
        except DataError as problem:
            row["doubt"] = row["doubt"] or str(problem)
        rows.append(row)
    numbers = ("run_s", "window_s", "window_tok_per_s", "whole_run_tok_per_s", "busy_percent", "lateness_p99_ms")
    schema = {"replay": pl.Int64, "pair": pl.Int64, "schedule": pl.String, "num_requests": pl.Int64}
    return pl.DataFrame(rows, schema=schema | dict.fromkeys(numbers, pl.Float64) | {"doubt": pl.String})


def losses(requests: pl.DataFrame, doubts: dict[int, str]) -> pl.DataFrame:
    """The loss of each pair.

    Args:
        requests: as for :func:`replays`; warm-ups and probes are left out.
        doubts: why a replay may not be used, by its number.

    Returns:
        comparison, pair, loss_percent (:func:`rackbook.replay.throughput.same_work_loss`), whole_run_loss_percent
        (stagger included), window_s, busy_percent (of the mirror replay: what its ranks have left is where a loss can
        hide), doubt. Without a usable pair of replays the loss is null and says why.
    """
    rows = []
    for comparison, other in COMPARISONS.items():
        for pair in sorted(requests.filter(pl.col("schedule") == other)["pair"].unique().to_list()):
            row: dict[str, object] = {"comparison": comparison, "pair": pair}
            mirror, lagged = (
                requests.filter((pl.col("pair") == pair) & (pl.col("schedule") == schedule))
                for schedule in (MIRROR, other)
            )
            numbers = {*mirror["replay"].to_list(), *lagged["replay"].to_list()}
            row["doubt"] = "; ".join(doubts[n] for n in sorted(numbers) if n in doubts) or None
            if mirror.is_empty():
                row["doubt"] = row["doubt"] or "no mirror replay in this pair"
            if row["doubt"] is None:
                try:
                    row |= _loss(mirror, lagged)
                except DataError as problem:
                    row["doubt"] = str(problem)
            rows.append(row)
    return pl.DataFrame(rows, schema=_PAIR)


def _loss(mirror: pl.DataFrame, lagged: pl.DataFrame) -> dict[str, float]:
    one, other = throughput.measured(mirror), throughput.measured(lagged)
    return {
        "loss_percent": 100 * throughput.same_work_loss(mirror, lagged),
        "whole_run_loss_percent": 100 * (1 - other.whole_tok_per_s / one.whole_tok_per_s),
        "window_s": other.to_s - other.from_s,
        "busy_percent": one.busy_percent,
    }


def summary(pairs: pl.DataFrame, confidence: float = 0.95) -> pl.DataFrame:
    """The mean loss of the usable pairs with its interval, and how many pairs a loss of 1 % would take.

    Args:
        pairs: of :func:`losses`.
        confidence: coverage of the interval.

    Returns:
        By comparison: num_pairs, loss_percent, loss_from_percent and loss_to_percent (Student's t over pairs; null with
        fewer than two), pair_spread_points, pairs_needed (:func:`pairs_needed`; null with fewer than
        :data:`LEAST_PAIRS`), busy_percent (mean of the pairs), missing_reason.
    """
    rows = []
    for comparison in pairs["comparison"].unique(maintain_order=True).to_list():
        usable = pairs.filter((pl.col("comparison") == comparison) & pl.col("doubt").is_null())
        of = usable["loss_percent"].to_list()
        row: dict[str, object] = {"comparison": comparison, "num_pairs": len(of)}
        if of:
            found = intervals.mean_interval(of, confidence)
            row |= {
                "loss_percent": found.estimate,
                "loss_from_percent": found.low,
                "loss_to_percent": found.high,
                "pair_spread_points": spread(of),
                "busy_percent": usable["busy_percent"].mean(),
            }
        if len(of) < LEAST_PAIRS:
            row["missing_reason"] = f"pairs needed: fewer than {LEAST_PAIRS} pairs"
        elif (needed := pairs_needed(of, confidence=confidence)) is None:
            row["missing_reason"] = "pairs needed: more than 10,000"
        else:
            row["pairs_needed"] = needed
        rows.append(row)
    return pl.DataFrame(rows, schema=_SUMMARY)


def spread(losses_percent: Sequence[float]) -> float | None:
    """Standard deviation of the loss of a pair; None with fewer than two."""
    if len(losses_percent) < 2:
        return None
    mean = math.fsum(losses_percent) / len(losses_percent)
    return math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses_percent) / (len(losses_percent) - 1))


def pairs_needed(
    losses_percent: Sequence[float], loss_percent: float = 1.0, *, confidence: float = 0.95, power: float = 0.8
) -> int | None:
    """How many pairs would show a loss, at the spread that these pairs have.

    The smallest n at which a two-sided t test of n pairs finds the loss with the power, in the usual approximation
    n ≥ ((t(confidence) + t(power)) · spread ÷ loss)², both quantiles with n − 1 degrees of freedom.

    Args:
        losses_percent: of the pairs at hand.
        loss_percent: the loss to find.
        confidence: of the test.
        power: chance to find it.

    Returns:
        None where the spread is not known, or is so large that ten thousand pairs would not do.
    """
    from scipy import special  # costs more to import than most commands take

    if (deviation := spread(losses_percent)) is None:
        return None
    for n in range(2, 10_001):
        quantiles = special.stdtrit(n - 1, 0.5 + confidence / 2) + special.stdtrit(n - 1, power)
        if n >= (float(quantiles) * deviation / loss_percent) ** 2:
            return n
    return None
