"""What the published mirror and lag replays say by arithmetic: losses, rates per GPU, parts of the gap, stagger."""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl

SMALL, LARGE = 2, 4
"""Ranks of the two engines that the source measured."""

ROUNDING_TOK_PER_S = 50.0
"""Half a unit of the last digit of the printed throughputs, in total or per GPU as each is printed."""


def printed_tok_per_s(points: pl.DataFrame, dp_size: int, schedule: str) -> float:
    """A printed throughput of all ranks, in tokens/s."""
    row = points.filter((pl.col("dp_size") == dp_size) & (pl.col("schedule") == schedule))
    return row["total_tok_per_s"].item()


def losses(points: pl.DataFrame) -> pl.DataFrame:
    """What the lag costs, from each printed pair of throughputs.

    Args:
        points: table ``dp_imbalance``.

    Returns:
        dp_size, loss_percent (1 − lag ÷ mirror) and excess_percent (mirror ÷ lag − 1) with the bounds that rounding
        allows (loss_low_percent …), origin "derived", source, formula.
    """
    rows = []
    for dp_size in points["dp_size"].unique().sort().to_list():
        at_mirror, at_lag = (printed_tok_per_s(points, dp_size, schedule) for schedule in ("mirror", "lag"))
        row = {"dp_size": dp_size}
        for bound, rounding in (("_low", -ROUNDING_TOK_PER_S), ("", 0.0), ("_high", ROUNDING_TOK_PER_S)):
            excess = (at_mirror + rounding) / (at_lag - rounding) - 1
            row |= {f"loss{bound}_percent": 100 * excess / (1 + excess), f"excess{bound}_percent": 100 * excess}
        formula = f"{at_lag / 1e3:g}K against {at_mirror / 1e3:g}K tokens/s"
        rows.append(row | {"origin": "derived", "source": points["source"][0], "formula": formula})
    bounds = [f"{what}{bound}_percent" for what in ("loss", "excess") for bound in ("_low", "", "_high")]
    return pl.DataFrame(rows).select("dp_size", *bounds, "origin", "source", "formula")


def per_gpu(points: pl.DataFrame, prefill_only: pl.DataFrame) -> pl.DataFrame:
    """Throughput per GPU of the replays and of the AgentX run.

    Returns:
        setting, dp_size, prefill_tok_per_s_per_gpu, origin, source, formula.
    """
    replays = points.select(
        (pl.col("schedule") + " replay").alias("setting"),
        "dp_size",
        (pl.col("total_tok_per_s") / pl.col("dp_size")).alias("prefill_tok_per_s_per_gpu"),
        pl.lit("derived").alias("origin"),
        "source",
        pl.format("{} tokens/s ÷ {}", "total_tok_per_s", "dp_size").alias("formula"),
    )
    agentx = prefill_only.select(
        pl.col("workload").alias("setting"), "dp_size", "prefill_tok_per_s_per_gpu", "origin", "source", "formula"
    )
    return pl.concat([replays, agentx])


def gap(points: pl.DataFrame, prefill_only: pl.DataFrame) -> pl.DataFrame:
    """How much of the AgentX gap between DEP4 and DEP2 the replays explain.

    Ratios per GPU multiply, so their logarithms add up: the share of a part is its logarithm over that of the whole.

    Returns:
        quantity, ratio_percent with its bounds from rounding, gap_part_percent, origin "derived", source, formula.
    """
    agentx = dict(prefill_only.select("dp_size", "prefill_tok_per_s_per_gpu").iter_rows())
    tok = {(s, n): printed_tok_per_s(points, n, s) / n for s in ("mirror", "lag") for n in (SMALL, LARGE)}
    # each ratio: factors above and below the line, with the rounding of each
    mirrors = _Ratio(((tok["mirror", LARGE], LARGE),), ((tok["mirror", SMALL], SMALL),))
    lags = _Ratio(((tok["lag", LARGE], LARGE),), ((tok["lag", SMALL], SMALL),))
    whole = _Ratio(((agentx[LARGE], 1),), ((agentx[SMALL], 1),))
    waiting, rest = lags.over(mirrors), whole.over(lags)
    rows = [
        ("AgentX gap, the whole", whole, "AgentX DEP4 ÷ DEP2"),
        ("the larger engine, its ranks all equal", mirrors, "mirror DEP4 ÷ DEP2, per GPU"),
        ("DP imbalance", waiting, "lag DEP4 ÷ DEP2 over mirror DEP4 ÷ DEP2"),
        ("not explained by the replays", rest, "AgentX DEP4 ÷ DEP2 over lag DEP4 ÷ DEP2"),
    ]
    return pl.DataFrame(
        [
            {
                "quantity": quantity,
                "ratio_percent": 100 * ratio.value,
                "ratio_low_percent": 100 * ratio.low,
                "ratio_high_percent": 100 * ratio.high,
                "gap_part_percent": 100 * math.log(ratio.value) / math.log(whole.value),
                "origin": "derived",
                "source": points["source"][0],
                "formula": formula,
            }
            for quantity, ratio, formula in rows
        ]
    )


@dataclass(frozen=True)
class _Ratio:
    """A quotient of throughputs per GPU; each comes with the GPUs over which its printed total was divided."""

    above: tuple[tuple[float, int], ...]
    below: tuple[tuple[float, int], ...]

    def over(self, other: _Ratio) -> _Ratio:
        return _Ratio(self.above + other.below, self.below + other.above)

    def _at(self, sign: int) -> float:
        def product(factors: tuple[tuple[float, int], ...], direction: int) -> float:
            return math.prod(value + direction * ROUNDING_TOK_PER_S / gpus for value, gpus in factors)

        return product(self.above, sign) / product(self.below, -sign)

    @property
    def value(self) -> float:
        return self._at(0)

    @property
    def low(self) -> float:
        return self._at(-1)

    @property
    def high(self) -> float:
        return self._at(1)


def mirror_tok_per_s_per_gpu(points: pl.DataFrame) -> float:
    """The rate that the cost per token is calibrated on: the mirror replay of the smaller engine, per GPU."""
    return printed_tok_per_s(points, SMALL, "mirror") / SMALL


def stagger_loss(num_ranks: int, lag_s: float, run_s: float) -> float:
    """Share of the whole run's throughput that the stagger of a lag replay costs when no step waits for anyone.

    The last rank begins (ranks − 1) · lag later and so ends later; the tokens are the same.

    Args:
        num_ranks: data-parallel ranks.
        lag_s: delay from one rank to the next, in s.
        run_s: length of the mirrored run, in s.
    """
    stagger_s = (num_ranks - 1) * lag_s
    return stagger_s / (run_s + stagger_s)


def run_s_of_stagger_loss(num_ranks: int, lag_s: float, lost: float) -> float:
    """Length in s of a mirrored run whose lag replay would lose this share to the stagger alone.

    Args:
        num_ranks: data-parallel ranks.
        lag_s: delay from one rank to the next, in s.
        lost: share of the throughput, between 0 and 1.
    """
    return (num_ranks - 1) * lag_s * (1 - lost) / lost


def stagger(found: pl.DataFrame, points: pl.DataFrame) -> pl.DataFrame:
    """How long a mirrored run would be whose lag replay loses the published share to the stagger of the ranks alone.

    The source does not print how long its runs were, nor whether it left the stagger out.

    Args:
        found: the published losses.
        points: table ``dp_imbalance``, for the published lag.

    Returns:
        dp_size, loss_percent, run_s, stagger_loss_percent of a run of ten minutes, origin "modelled", source, formula.
    """
    lag_s = points.filter(pl.col("schedule") == "lag")["lag_s_per_rank"].unique().item()
    return pl.DataFrame(
        [
            {
                "dp_size": row["dp_size"],
                "loss_percent": row["loss_percent"],
                "run_s": run_s_of_stagger_loss(row["dp_size"], lag_s, row["loss_percent"] / 100),
                "stagger_loss_percent": 100 * stagger_loss(row["dp_size"], lag_s, 600.0),
                "origin": "modelled",
                "source": row["source"],
                "formula": "(ranks − 1) · lag ÷ (run + (ranks − 1) · lag) = loss",
            }
            for row in found.iter_rows(named=True)
        ]
    )
