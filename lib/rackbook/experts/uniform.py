"""Tables of what chance alone does: the batch of a decode step under uniform routing, drawn and approximated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import polars as pl

from rackbook.experts.balancedness import (
    balancedness_of_sums,
    balancedness_per_layer_step,
    estimate_mean,
    ratio_of_sums,
    uniform_balancedness_approximation,
    uniform_controls,
)
from rackbook.experts.routing import sample_rank_loads
from rackbook.tables import schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

PER_LAYER_STEP = "mean over layers and steps of (mean ÷ max)"
SUMS = "sum of the means ÷ sum of the maxima"
SUMMED_LOADS = "mean ÷ max of the loads summed over all steps"
_MODEL_HAS_NONE = "a formula has neither draws nor an interval"

Part = Literal["target", "draft"]


class Sampling(Protocol):
    """How much is drawn.

    Attributes:
        draws: batches at the chosen setting.
        sweep_draws: batches per point of a sweep.
        confidence: coverage of the intervals.
        seed: of every draw.
    """

    @property
    def draws(self) -> int: ...  # noqa: D102
    @property
    def sweep_draws(self) -> int: ...  # noqa: D102
    @property
    def confidence(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Batch:
    """One decode step of all ranks in one part of the model; the fields are columns of ``uniform_balance``."""

    part: Part
    num_ranks: int
    requests_per_rank: int
    tokens_per_request: int
    num_experts: int
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Tokens over all ranks."""
        return self.num_ranks * self.requests_per_rank * self.tokens_per_request

    def draw(self, num_draws: int, seed: int) -> NDArray[np.int64]:
        """Rank loads under uniform routing, shape (num_draws, num_ranks).

        The batch itself is part of the seed, so that a point does not depend on what else is drawn.
        """
        sizes = (self.num_ranks, self.requests_per_rank, self.tokens_per_request, self.num_experts, self.top_k)
        return sample_rank_loads(
            num_ranks=self.num_ranks,
            num_tokens=self.num_tokens,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_draws=num_draws,
            seed=np.random.default_rng([seed, num_draws, *sizes]),
        )

    def approximation(self) -> float:
        """Balancedness under uniform routing without drawing."""
        return uniform_balancedness_approximation(
            num_ranks=self.num_ranks, num_tokens=self.num_tokens, num_experts=self.num_experts, top_k=self.top_k
        )


def uniform_balance(batch: Batch, num_draws: int, params: Sampling) -> pl.DataFrame:
    """Balancedness of one batch under uniform routing, drawn and approximated.

    Args:
        batch: the batch.
        num_draws: how often it is drawn.
        params: gives seed and confidence.

    Returns:
        Table ``uniform_balance``: one row of origin "simulated" and one of origin "modelled".
    """
    return estimated(batch, batch.draw(num_draws, params.seed), params)


def estimated(batch: Batch, loads: NDArray[np.int64], params: Sampling) -> pl.DataFrame:
    """As :func:`uniform_balance`, of loads that are drawn already; shape (draws, ranks)."""
    controls = uniform_controls(loads, num_tokens=batch.num_tokens, num_experts=batch.num_experts, top_k=batch.top_k)
    estimate = estimate_mean(balancedness_per_layer_step(loads), params.confidence, controls=controls)
    return schema("uniform_balance").frame(
        [
            vars(batch)
            | {
                "balancedness_per_layer_step": estimate.mean,
                "balancedness_low": estimate.low,
                "balancedness_high": estimate.high,
                "num_draws": estimate.num_draws,
                "origin": "simulated",
                "source": _drawn(params),
            },
            vars(batch)
            | {
                "balancedness_per_layer_step": batch.approximation(),
                "origin": "modelled",
                "source": "Levin 1981",
                "formula": "largest of equal boxes, effective number of balls",
                "missing_reason": _MODEL_HAS_NONE,
            },
        ]
    )


def sweep(batches: list[Batch], column: str, values: list[int] | range, params: Sampling) -> pl.DataFrame:
    """Balancedness of uniform routing while one size of the batch changes.

    Args:
        batches: one per part.
        column: the size that changes.
        values: what it takes; numbers of ranks that do not divide a part's experts are left out for that part.
        params: gives sweep_draws, seed and confidence.

    Returns:
        Table ``uniform_balance``.
    """
    changed = [Batch(**(vars(batch) | {column: value})) for batch in batches for value in values]
    return pl.concat(
        [
            uniform_balance(batch, params.sweep_draws, params)
            for batch in changed
            if batch.num_experts % batch.num_ranks == 0
        ]
    )


def draws_in_bins(batch: Batch, loads: NDArray[np.int64], params: Sampling, *, most_bins: int = 30) -> pl.DataFrame:
    """How the balancedness of single draws scatters.

    The mean load is fixed, so balancedness takes one value per largest load, a whole number. Each bin holds as many of
    these values as the next; bins of equal width would hold now more of them, now fewer, and show a comb.

    Args:
        batch: what was drawn.
        loads: shape (draws, ranks).
        params: gives the seed.
        most_bins: largest number of bins.

    Returns:
        part, balancedness_low, balancedness_high, share_of_draws_percent, num_draws (all draws), origin, source; bins
        without a draw are left out.
    """
    largest = loads.max(axis=1)
    step = -(-(int(largest.max()) - int(largest.min()) + 1) // most_bins)
    edges = np.arange(largest.min() - 0.5, largest.max() + step, step)
    counts = np.histogram(largest, edges)[0]
    return (
        pl.DataFrame(
            {
                "balancedness_low": loads[0].mean() / edges[1:],
                "balancedness_high": np.minimum(loads[0].mean() / edges[:-1], 1),
                "share_of_draws_percent": 100 * counts / len(loads),
            }
        )
        .with_columns(pl.lit(len(loads), pl.Int64).alias("num_draws"), *_labels(batch, params))
        .filter(pl.col("share_of_draws_percent") > 0)
    )


def loads_in_order(batch: Batch, loads: NDArray[np.int64], params: Sampling) -> pl.DataFrame:
    """The ranks of each draw in order of their load, relative to the mean: what chance does to each place.

    Args:
        batch: what was drawn.
        loads: shape (draws, ranks).
        params: gives the seed.

    Returns:
        part, load_place (1 is the busiest rank of a draw), load_to_mean (mean over draws), load_to_mean_low and
        load_to_mean_high (nine in ten draws lie between), num_draws, origin, source.
    """
    ordered = -np.sort(-loads, axis=1) / loads.mean(axis=1, keepdims=True)
    low, high = np.quantile(ordered, (0.05, 0.95), axis=0)
    return pl.DataFrame(
        {
            "load_place": np.arange(1, batch.num_ranks + 1),
            "load_to_mean": ordered.mean(axis=0),
            "load_to_mean_low": low,
            "load_to_mean_high": high,
        }
    ).with_columns(pl.lit(len(loads), pl.Int64).alias("num_draws"), *_labels(batch, params))


def definitions(batch: Batch, loads: NDArray[np.int64], params: Sampling) -> pl.DataFrame:
    """Three quantities called balancedness, on the same draws: alike steps, and steps of two sizes.

    Args:
        batch: what was drawn.
        loads: shape (draws, ranks).
        params: gives draws and seed.

    Returns:
        part, setting, definition, balancedness, origin, source.
    """
    few_requests = max(1, batch.requests_per_rank // 8)
    few = Batch(**(vars(batch) | {"requests_per_rank": few_requests})).draw(params.draws, params.seed)
    return pl.DataFrame(
        [
            {"setting": setting, "definition": definition, "balancedness": value}
            for setting, drawn in (
                (f"every step has {batch.requests_per_rank} requests per rank", loads),
                (f"every second step has only {few_requests}", np.concatenate([loads, few])),
            )
            for definition, value in (
                (PER_LAYER_STEP, float(balancedness_per_layer_step(drawn).mean())),
                (SUMS, ratio_of_sums(drawn)),
                (SUMMED_LOADS, balancedness_of_sums(drawn)),
            )
        ]
    ).with_columns(*_labels(batch, params))


def _drawn(params: Sampling) -> str:
    return f"uniform routing, seed {params.seed}"


def _labels(batch: Batch, params: Sampling) -> list[pl.Expr]:
    return [
        pl.lit(batch.part).alias("part"),
        pl.lit("simulated").alias("origin"),
        pl.lit(_drawn(params)).alias("source"),
    ]
