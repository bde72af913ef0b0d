"""What can expert balancing recover?

The published balancedness before and after EPLB, the balancedness that uniform random routing of the same batch
reaches by chance alone (drawn here, and approximated without drawing), and how much of the gap between them EPLB
closes, as far as the printed digits determine it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rackbook import catalog, published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import DataError
from rackbook.experts.balancedness import (
    balancedness_of_sums,
    balancedness_per_layer_step,
    estimate_mean,
    ratio_of_sums,
    recovered_fraction,
    recovered_range,
    uniform_balancedness_approximation,
    uniform_controls,
)
from rackbook.experts.routing import experts_per_rank, sample_rank_loads
from rackbook.tables import schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

CHECKS = Checks("expert_balance")
MODEL = "deepseek-v4.1-flash"
CHOICES_PER_READING = 30_000_000
"""Draws at the published setting go on until so many experts were chosen: then the interval of the mean is about
± 0.0005 for every reading, far below half a unit of the printed digits."""

HALF_UNIT = 0.005
"""Half a unit of the last digit in which the source prints a balancedness."""

WITHOUT, WITH = "as routed, without EPLB", "as routed, with EPLB"
UNIFORM_PRINTED, UNIFORM_DRAWN = "uniform routing, printed", "uniform routing, drawn here"
PRINTED, DRAWN = "print", "draws made here"
PER_LAYER_STEP = "mean over layers and steps of (mean ÷ max)"
SUMS = "sum of the means ÷ sum of the maxima"
SUMMED_LOADS = "mean ÷ max of the loads summed over all steps"
_MODEL_HAS_NONE = "a formula has neither draws nor an interval"


class Params(BaseModel):
    """Parameters of notebook 06."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(default=32, ge=2, description="expert-parallel size; divides both numbers of experts")
    requests_per_rank: int = Field(default=72, ge=1, description="decoding requests on each rank")
    tokens_per_request: int = Field(default=6, ge=1, description="tokens of a request that the target checks in a step")
    experts: int = Field(default=384, ge=1, description="routed experts of a target layer")
    top_k: int = Field(default=6, ge=1, description="experts per token in the target")
    draft_tokens_per_request: int = Field(default=5, ge=1, description="tokens of a request that the draft computes")
    draft_experts: int = Field(default=128, ge=1, description="routed experts of a draft layer")
    draft_top_k: int = Field(default=3, ge=1, description="experts per token in the draft")
    draws: int = Field(default=400, ge=10, description="batches drawn at this setting; each is one layer in one step")
    sweep_draws: int = Field(default=60, ge=10, description="batches drawn per point of a sweep")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="coverage of the intervals")
    seed: int = Field(default=1, ge=0, description="seed of every draw")

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        common = math.gcd(self.experts, self.draft_experts)
        if common % self.ranks:
            allowed = [n for n in range(2, common + 1) if common % n == 0]
            raise ValueError(
                f"{self.experts} experts of the target and {self.draft_experts} of the draft cannot both be spread "
                f"evenly over {self.ranks} ranks; ranks that divide both: {', '.join(map(str, allowed)) or '(none)'}"
            )
        for part, experts, top_k in (
            ("the target", self.experts, self.top_k),
            ("the draft", self.draft_experts, self.draft_top_k),
        ):
            if top_k > experts:
                raise ValueError(f"{part} sends a token to {top_k} of {experts} experts; at most {experts} are there")
        return self

    def batch(self, part: Literal["target", "draft"]) -> Batch:
        """The batch of one part of the model."""
        if part == "target":
            return Batch(part, self.ranks, self.requests_per_rank, self.tokens_per_request, self.experts, self.top_k)
        tokens, experts, top_k = self.draft_tokens_per_request, self.draft_experts, self.draft_top_k
        return Batch(part, self.ranks, self.requests_per_rank, tokens, experts, top_k)


@dataclass(frozen=True)
class Batch:
    """One decode step of all ranks in one part of the model; the fields are columns of ``uniform_balance``."""

    part: Literal["target", "draft"]
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


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        params: as given.
        points: table ``expert_balance``, published rows.
        settings: table ``expert_balance_eplb``, published rows.
        at_published: table ``uniform_balance`` at the published setting, in every reading of what the source does not
            print; independent of the parameters but for seed and confidence.
        states: per part, balancedness_per_layer_step and busiest_to_mean of each ``balance_of``: published without and
            with EPLB, uniform routing as printed and as drawn here.
        recovered: per part and ``uniform_from``: before, after, uniform_balancedness, recovered_percent and the bounds
            that the printed digits leave.
    """

    params: Params
    points: pl.DataFrame
    settings: pl.DataFrame
    at_published: pl.DataFrame
    states: pl.DataFrame
    recovered: pl.DataFrame

    @cached_property
    def by_tokens(self) -> pl.DataFrame:
        """Table ``uniform_balance`` at the published setting, by tokens_per_request."""
        return sweep(published_readings(self.points)[:2], "tokens_per_request", range(1, 9), self.params)

    @cached_property
    def here(self) -> pl.DataFrame:
        """Table ``uniform_balance`` at the chosen setting."""
        return pl.concat([_estimated(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def draws(self) -> pl.DataFrame:
        """At the chosen setting, share_of_draws_percent by part and bin (balancedness_low to balancedness_high)."""
        return pl.concat([draws_in_bins(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def order(self) -> pl.DataFrame:
        """At the chosen setting, load_to_mean by part and load_place, with the range of nine in ten draws."""
        return pl.concat([loads_in_order(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def definitions(self) -> pl.DataFrame:
        """At the chosen setting, balancedness by part, setting and definition, on the same draws."""
        return pl.concat([definitions(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def by_ranks(self) -> pl.DataFrame:
        """Table ``uniform_balance``, chosen setting but for num_ranks."""
        return sweep(self._batches, "num_ranks", _ranks_of_sweep(self.params), self.params)

    @cached_property
    def by_requests(self) -> pl.DataFrame:
        """Table ``uniform_balance``, chosen setting but for requests_per_rank."""
        values = sorted({*(2**n for n in range(8)), self.params.requests_per_rank})
        return sweep(self._batches, "requests_per_rank", values, self.params)

    @property
    def _batches(self) -> list[Batch]:
        return [self.params.batch("target"), self.params.batch("draft")]

    @cached_property
    def _loads(self) -> list[tuple[Batch, NDArray[np.int64]]]:
        return [(batch, batch.draw(self.params.draws, self.params.seed)) for batch in self._batches]


def collect(params: Params) -> Evidence:
    """Gather the published points and draw their baselines; the chosen setting is drawn when it is first looked at.

    Raises:
        DataError: the published tables or the catalog are not what they should be.
    """
    points = published.read("expert_balance")
    readings = published_readings(points)
    at_published = pl.concat(
        [
            uniform_balance(reading, max(10, CHOICES_PER_READING // (reading.num_tokens * reading.top_k)), params)
            for reading in readings
        ]
    )
    states = balance_states(points, at_published)
    return Evidence(
        params=params,
        points=points,
        settings=published.read("expert_balance_eplb"),
        at_published=at_published,
        states=states,
        recovered=recovered(states, at_published),
    )


def published_readings(points: pl.DataFrame) -> list[Batch]:
    """The published uniform baselines as batches, in every reading of what the source does not print.

    Printed are ranks, requests per rank and top-k. Not printed are the tokens per request: read here as one token and
    the drafts of a step for the target, and the drafts for the draft. The draft's experts are those of the model's
    recipe; the other readings give it as many as the target has.

    Args:
        points: table ``expert_balance``.

    Returns:
        The target, the draft, and three more readings of the draft: the target's experts with the same tokens, with one
        more, and with one token.
    """
    model = catalog.model(MODEL)
    drafted, many, few = model.draft.block_tokens.known, model.experts.num_routed.known, model.draft.num_routed.known
    target, draft = (_uniform_row(points, part) for part in ("target", "draft"))
    sizes = {row["part"]: (row["ep_size"], row["requests_per_rank"]) for row in (target, draft)}
    return [
        Batch("target", *sizes["target"], 1 + drafted, many, target["top_k"]),
        Batch("draft", *sizes["draft"], drafted, few, draft["top_k"]),
        *(
            Batch("draft", *sizes["draft"], tokens, many, draft["top_k"])
            for tokens in dict.fromkeys((drafted, drafted + 1, 1))
        ),
    ]


def uniform_balance(batch: Batch, num_draws: int, params: Params) -> pl.DataFrame:
    """Balancedness of one batch under uniform routing, drawn and approximated.

    Args:
        batch: the batch.
        num_draws: how often it is drawn.
        params: gives seed and confidence.

    Returns:
        Table ``uniform_balance``: one row of origin "simulated" and one of origin "modelled".
    """
    return _estimated(batch, batch.draw(num_draws, params.seed), params)


def _estimated(batch: Batch, loads: NDArray[np.int64], params: Params) -> pl.DataFrame:
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


def sweep(batches: list[Batch], column: str, values: list[int] | range, params: Params) -> pl.DataFrame:
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


def balance_states(points: pl.DataFrame, at_published: pl.DataFrame) -> pl.DataFrame:
    """The four balancedness figures of each part side by side.

    The mean over draws of max ÷ mean is at least the inverse of the mean of mean ÷ max (Jensen's inequality), so
    busiest_to_mean, that inverse, bounds the busiest rank's average excess from below.

    Args:
        points: table ``expert_balance``.
        at_published: table ``uniform_balance`` of :func:`published_readings`.

    Returns:
        part, balance_of, balancedness_per_layer_step, busiest_to_mean, origin, source; by part.
    """
    rows = []
    for part in ("target", "draft"):
        drawn = _first(at_published, part, "simulated")
        for balance_of, row in (
            (WITHOUT, _published_row(points, part, "observed", "static")),
            (WITH, _published_row(points, part, "observed", "eplb")),
            (UNIFORM_PRINTED, _uniform_row(points, part)),
            (UNIFORM_DRAWN, drawn),
        ):
            value = row["balancedness_per_layer_step"]
            rows.append(
                {
                    "part": part,
                    "balance_of": balance_of,
                    "balancedness_per_layer_step": value,
                    "busiest_to_mean": 1 / value,
                    "origin": row["origin"],
                    "source": row["source"],
                }
            )
    return pl.DataFrame(rows)


def recovered(states: pl.DataFrame, at_published: pl.DataFrame) -> pl.DataFrame:
    """Part of the gap to uniform routing that EPLB closes, with the range that the printed digits allow.

    A printed figure stands for everything that rounds to it; a figure that was drawn stands for its interval.

    Args:
        states: as :func:`balance_states` returns it.
        at_published: table ``uniform_balance`` of :func:`published_readings`.

    Returns:
        part, uniform_from, before, after, uniform_balancedness, recovered_percent, recovered_low_percent,
        recovered_high_percent, formula, origin ("derived" from printed figures alone, "simulated" where uniform routing
        was drawn), source.
    """
    rows = []
    for part in ("target", "draft"):
        value = dict(
            states.filter(pl.col("part") == part).select("balance_of", "balancedness_per_layer_step").iter_rows()
        )
        drawn = _first(at_published, part, "simulated")
        before, after = value[WITHOUT], value[WITH]
        for uniform_from, uniform, bounds, origin, source in (
            (PRINTED, value[UNIFORM_PRINTED], _rounds_to(value[UNIFORM_PRINTED]), "derived", "S1"),
            (
                DRAWN,
                value[UNIFORM_DRAWN],
                (drawn["balancedness_low"], drawn["balancedness_high"]),
                "simulated",
                f"S1, {drawn['source']}",
            ),
        ):
            low, high = recovered_range(_rounds_to(before), _rounds_to(after), bounds)
            rows.append(
                {
                    "part": part,
                    "uniform_from": uniform_from,
                    "before": before,
                    "after": after,
                    "uniform_balancedness": uniform,
                    "recovered_percent": 100 * recovered_fraction(before, after, uniform),
                    "recovered_low_percent": 100 * low,
                    "recovered_high_percent": 100 * high,
                    "formula": f"({after:g} − {before:g}) ÷ ({uniform:.4g} − {before:g})",
                    "origin": origin,
                    "source": source,
                }
            )
    return pl.DataFrame(rows)


def draws_in_bins(batch: Batch, loads: NDArray[np.int64], params: Params, *, most_bins: int = 30) -> pl.DataFrame:
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


def loads_in_order(batch: Batch, loads: NDArray[np.int64], params: Params) -> pl.DataFrame:
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


def definitions(batch: Batch, loads: NDArray[np.int64], params: Params) -> pl.DataFrame:
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


def printed_baselines(evidence: Evidence) -> pl.DataFrame:
    """The printed balancedness of uniform routing, with all that rounds to it.

    Returns:
        part, balancedness_per_layer_step, balancedness_low, balancedness_high, origin, source.
    """
    value = pl.col("balancedness_per_layer_step")
    return evidence.states.filter(pl.col("balance_of") == UNIFORM_PRINTED).select(
        "part",
        value,
        (value - HALF_UNIT).alias("balancedness_low"),
        (value + HALF_UNIT).alias("balancedness_high"),
        "origin",
        "source",
    )


def _drawn(params: Params) -> str:
    return f"uniform routing, seed {params.seed}"


def _labels(batch: Batch, params: Params) -> list[pl.Expr]:
    return [
        pl.lit(batch.part).alias("part"),
        pl.lit("simulated").alias("origin"),
        pl.lit(_drawn(params)).alias("source"),
    ]


def _ranks_of_sweep(params: Params) -> list[int]:
    most = max(64, params.ranks)
    return [n for n in range(2, most + 1) if 0 in (params.experts % n, params.draft_experts % n)]


def _rounds_to(printed: float) -> tuple[float, float]:
    return printed - HALF_UNIT, printed + HALF_UNIT


def _published_row(points: pl.DataFrame, part: str, routing: str, placement: str) -> dict[str, object]:
    rows = points.filter(
        (pl.col("part") == part) & (pl.col("routing") == routing) & (pl.col("placement") == placement)
    ).to_dicts()
    if len(rows) != 1:
        raise DataError(
            f"expert_balance: got {len(rows)} rows of part {part}, routing {routing}, placement {placement}; expected 1"
        )
    return rows[0]


def _uniform_row(points: pl.DataFrame, part: str) -> dict[str, object]:
    return _published_row(points, part, "uniform", "static")


def _first(at_published: pl.DataFrame, part: str, origin: str) -> dict[str, object]:
    return at_published.filter((pl.col("part") == part) & (pl.col("origin") == origin)).row(0, named=True)


@CHECKS("target_top_k", "draft_top_k")
def _top_k(_: Evidence) -> Finding:
    return Finding(None, note="a setting of the source; no other figure here determines it")


def _drawn_check(place: int) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        row = evidence.at_published.filter(pl.col("origin") == "simulated").row(place, named=True)
        half = (row["balancedness_high"] - row["balancedness_low"]) / 2
        note = (
            f"{row['balancedness_per_layer_step']:.4f} ± {half:.4f}, {row['num_draws']} draws of {row['num_ranks']} "
            f"ranks × {row['requests_per_rank']} requests × {row['tokens_per_request']} tokens, "
            f"{row['top_k']} of {row['num_experts']} experts"
        )
        return Finding(row["balancedness_per_layer_step"], "simulated", note)

    return check


for _place, _names in enumerate(
    (
        ("uniform_target", "simulated_target"),
        ("uniform_draft", "simulated_draft_128_experts"),
        ("simulated_draft",),
        ("simulated_draft_6_tokens",),
        ("simulated_draft_1_token",),
    )
):
    CHECKS(*_names)(_drawn_check(_place))


@CHECKS("target_without_eplb", "target_with_eplb", "draft_without_eplb", "draft_with_eplb")
def _real_routing(_: Evidence) -> Finding:
    return OPEN


def _setting_check(column: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        others = evidence.settings.filter(pl.col("source") != "S1")
        if others[column].n_unique() != 1:
            return Finding(None, note=f"the other sources do not agree: {others[column].to_list()}")
        sources = ", ".join(sorted(others["source"].unique()))
        return Finding(others[column][0], "derived", f"printed by {sources} as well")

    return check


CHECKS("eplb_interval_steps")(_setting_check("interval_steps"))
CHECKS("eplb_window_steps")(_setting_check("window_steps"))


def _recovered_check(part: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        row = evidence.recovered.filter((pl.col("part") == part) & (pl.col("uniform_from") == PRINTED)).row(
            0, named=True
        )
        note = f"{row['formula']}; the printed digits allow {_range(row)}"
        return Finding(row["recovered_percent"], "derived", note)

    return check


def _range(row: dict[str, float]) -> str:
    return f"{row['recovered_low_percent']:.1f} to {row['recovered_high_percent']:.1f} %"


for _part in ("target", "draft"):
    CHECKS(f"recovered_{_part}_percent", f"recovered_{_part}_derived_percent")(_recovered_check(_part))


@CHECKS("target_experts_per_rank")
def _target_experts(evidence: Evidence) -> Finding:
    return _held(catalog.model(MODEL).experts.num_routed.known, 0, evidence)


@CHECKS("draft_experts_per_rank")
def _draft_experts(evidence: Evidence) -> Finding:
    return _held(catalog.model(MODEL).draft.num_routed.known, 0, evidence)


@CHECKS("slots_per_rank")
def _slots(evidence: Evidence) -> Finding:
    ranks = _ranks(evidence)
    redundant = evidence.settings.filter(pl.col("ep_size") == ranks)["num_redundant_experts"]
    return _held(catalog.model(MODEL).experts.num_routed.known, redundant.item(), evidence)


def _held(num_experts: int, num_redundant: int, evidence: Evidence) -> Finding:
    ranks = _ranks(evidence)
    note = f"({num_experts} + {num_redundant}) ÷ {ranks}" if num_redundant else f"{num_experts} ÷ {ranks}"
    return Finding(float(experts_per_rank(num_experts + num_redundant, ranks)), "derived", note)


def _ranks(evidence: Evidence) -> int:
    return _uniform_row(evidence.points, "target")["ep_size"]
