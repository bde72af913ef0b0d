"""What the two published losses say about the law of the step times, ranks being independent."""

from __future__ import annotations

import polars as pl

from rackbook.models import order_statistics
from rackbook.models.dp_loss import LARGE, SMALL


def published_ratio(found: pl.DataFrame) -> tuple[float, float, float]:
    """Excess on 4 ranks ÷ excess on 2, with its bounds from rounding: low, value, high."""
    at = {row["dp_size"]: row for row in found.iter_rows(named=True)}
    return (
        at[LARGE]["excess_low_percent"] / at[SMALL]["excess_high_percent"],
        at[LARGE]["excess_percent"] / at[SMALL]["excess_percent"],
        at[LARGE]["excess_high_percent"] / at[SMALL]["excess_low_percent"],
    )


def laws(found: pl.DataFrame) -> pl.DataFrame:
    """How the cost of waiting would grow with the ranks under several laws of step times, beside the published pair.

    Returns:
        law, num_ranks, excess_to_two_ranks, low, high (rounding of the published pair), origin, source, formula.
    """
    low, value, high = published_ratio(found)
    sigma = order_statistics.parameter_of(order_statistics.lognormal, LARGE, value, (0.05, 4.0))
    curves: dict[str, tuple[order_statistics.Excess, str]] = {
        "uniform": (order_statistics.uniform, "R/(R + 1) − 1/2"),
        "normal": (order_statistics.normal, "expected largest of R standard normal draws"),
        "exponential": (order_statistics.exponential, "1/2 + … + 1/R"),
        "lognormal": (order_statistics.lognormal(sigma), f"sigma {sigma:.2f}, chosen to meet the published pair"),
        "rare spikes": (order_statistics.spikes(1e-3), "one step in 1,000 is longer; R − 1 in the limit"),
    }
    rows = [
        {
            "law": law,
            "num_ranks": num_ranks,
            "excess_to_two_ranks": order_statistics.ratio(excess, num_ranks),
            "origin": "modelled",
            "source": "order statistics",
            "formula": formula,
        }
        for law, (excess, formula) in curves.items()
        for num_ranks in range(2, 9)
    ]
    pair = {
        "law": "published",
        "origin": "derived",
        "source": found["source"][0],
        "formula": "excess on these ranks ÷ excess on 2",
    }
    rows += [
        pair | {"num_ranks": SMALL, "excess_to_two_ranks": 1.0, "low": 1.0, "high": 1.0},
        pair | {"num_ranks": LARGE, "excess_to_two_ranks": value, "low": low, "high": high},
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def fitted_laws(found: pl.DataFrame) -> pl.DataFrame:
    """What a law would have to look like to give both published losses, ranks being independent.

    Returns:
        law, quantity, value, low, high (rounding of the printed throughputs), unit, origin "modelled", source, formula.
    """
    ratios = published_ratio(found)
    excess = found.filter(pl.col("dp_size") == SMALL)["excess_percent"].item() / 100
    sigmas = [order_statistics.parameter_of(order_statistics.lognormal, LARGE, r, (0.05, 4.0)) for r in ratios]
    spike = [order_statistics.parameter_of(order_statistics.spikes, LARGE, r, (1e-9, 0.99)) for r in ratios]
    # mean 1 + s·p; two ranks wait s·p·(1 − p) of it
    longer = [excess / (p * (1 - p) - excess * p) for p in spike]
    rows = [
        ("two values", "steps that are long", "%", [100 * p for p in spike], "1 + q + q² = ratio, q = 1 − p"),
        ("two values", "how much longer they are", "%", [100 * s for s in longer], "s·p·q ÷ (1 + s·p) = excess on 2"),
        ("lognormal", "sigma of the part that varies", "-", sigmas, "expected largest of 4 and of 2 draws"),
    ]  # fmt: skip
    return pl.DataFrame(
        [
            {
                "law": law,
                "quantity": quantity,
                "value": values[1],
                "low": min(values),
                "high": max(values),
                "unit": unit,
                "origin": "modelled",
                "source": found["source"][0],
                "formula": formula,
            }
            for law, quantity, unit, values, formula in rows
        ]
    )
