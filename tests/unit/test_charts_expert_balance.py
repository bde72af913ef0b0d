"""Charts of expert balance: complete, and titled with what their data say."""

import polars as pl
import pytest

from chart_checks import check_chart
from rackbook.charts import expert_balance as charts
from rackbook.errors import DataError
from rackbook.tables import schema


def uniform(part, value, origin="simulated", **sizes):
    row = {
        "part": part,
        "num_ranks": 32,
        "requests_per_rank": 72,
        "tokens_per_request": 5,
        "num_experts": 384,
        "top_k": 6,
        "balancedness_per_layer_step": value,
        "origin": origin,
        "source": "seed 1",
    } | sizes
    if origin == "modelled":
        return row | {"formula": "f", "missing_reason": "no draws"}
    return row | {"balancedness_low": value - 0.001, "balancedness_high": value + 0.001, "num_draws": 100}


STATES = pl.DataFrame(
    [
        ("target", "without", 0.5, 2.0, "published", "S1"),
        ("draft", "without", 0.25, 4.0, "published", "S1"),
        ("target", "drawn", 0.9604, 1.04, "simulated", "seed 1"),
        ("draft", "drawn", 0.941, 1.06, "simulated", "seed 1"),
    ],
    schema=["part", "balance_of", "balancedness_per_layer_step", "busiest_to_mean", "origin", "source"],
    orient="row",
)


def by_ranks():
    return schema("uniform_balance").frame(
        [
            uniform(part, value - 0.01 * (part == "draft"), origin, num_ranks=ranks)
            for part in ("target", "draft")
            for ranks, value in ((2, 0.99), (32, 0.961), (64, 0.956))
            for origin in ("simulated", "modelled")
        ]
    )


def by_tokens():
    return schema("uniform_balance").frame(
        [
            uniform(part, base + 0.004 * tokens, origin, tokens_per_request=tokens)
            for part, base in (("target", 0.94), ("draft", 0.91))
            for tokens in range(1, 9)
            for origin in ("simulated", "modelled")
        ]
    )


PRINTED = pl.DataFrame(
    [("target", 0.96, 0.955, 0.965, "published", "S1"), ("draft", 0.92, 0.9175, 0.9215, "published", "S1")],
    schema=["part", "balancedness_per_layer_step", "balancedness_low", "balancedness_high", "origin", "source"],
    orient="row",
)


def order():
    return pl.DataFrame(
        {
            "part": ["target", "target", "draft", "draft"],
            "load_place": [1, 2, 1, 2],
            "load_to_mean": [1.04, 0.96, 1.063, 0.937],
            "load_to_mean_low": [1.02, 0.94, 1.03, 0.9],
            "load_to_mean_high": [1.06, 0.98, 1.1, 0.97],
            "num_draws": [100] * 4,
            "origin": ["simulated"] * 4,
            "source": ["seed 1"] * 4,
        }
    )


def draws():
    return pl.DataFrame(
        {
            "part": ["target", "target", "draft"],
            "balancedness_low": [0.95, 0.96, 0.9],
            "balancedness_high": [0.96, 0.97, 0.95],
            "share_of_draws_percent": [40.0, 60.0, 100.0],
            "num_draws": [100] * 3,
            "origin": ["simulated"] * 3,
            "source": ["seed 1"] * 3,
        }
    )


def test_states():
    spec = check_chart(charts.balancedness_by_state(STATES, subtitle="DEP32"), name="balancedness_by_state")
    assert spec["title"]["text"] == (
        "The draft without: its busiest rank has on average at least 4.0 times the mean load"
    )
    assert spec["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0, 1]


@pytest.mark.parametrize("by", ["num_ranks", "requests_per_rank"])
def test_by_size(by):
    points = by_ranks().rename({"num_ranks": by, by: "num_ranks"}) if by != "num_ranks" else by_ranks()
    spec = check_chart(charts.balancedness_by_size(points, by, subtitle="72 requests"), name=f"balancedness_by_{by}")
    label = {"num_ranks": "ranks", "requests_per_rank": "requests per rank"}[by]
    assert spec["title"]["text"] == f"By chance alone the target is 0.990 balanced with 2, 0.956 with 64 {label}"
    titles = str(spec)
    assert "log scale" in titles
    assert "axis does not start at 0" in titles


def test_by_tokens_names_what_fits():
    chart = charts.balancedness_by_tokens(by_tokens(), PRINTED, subtitle="DEP32")
    spec = check_chart(chart, name="balancedness_by_tokens")
    # 0.94 + 0.004 n in 0.955 … 0.965: 4, 5, 6; 0.91 + 0.004 n in 0.9175 … 0.9215: 2
    assert spec["title"]["text"] == "The printed baselines fit 4, 5 or 6 tokens of the target and 2 tokens of the draft"
    none = PRINTED.with_columns(balancedness_low=pl.lit(0.1), balancedness_high=pl.lit(0.2))
    title = charts.balancedness_by_tokens(by_tokens(), none, subtitle="").to_dict()["title"]["text"]
    assert "no number of tokens of the target" in title


def test_draws():
    means = schema("uniform_balance").frame([uniform("target", 0.961), uniform("draft", 0.94)])
    spec = check_chart(charts.balancedness_of_draws(draws(), means, subtitle="DEP32"), name="balancedness_of_draws")
    assert spec["title"]["text"].endswith("0.95 to 0.97 (target), 0.90 to 0.95 (draft)")
    assert spec["layer"][0]["encoding"]["y2"] == {"datum": 0}


def test_order():
    spec = check_chart(charts.load_by_place(order(), subtitle="DEP32"), name="load_by_place")
    assert spec["title"]["text"].endswith("4.0 % (target), 6.3 % (draft)")


def test_one_part_alone_is_drawn():
    chart = charts.balancedness_by_size(by_ranks().filter(pl.col("part") == "draft"), "num_ranks", subtitle="draft")
    spec = check_chart(chart, name="balancedness_by_num_ranks")
    assert "the draft is 0.980" in spec["title"]["text"]


@pytest.mark.parametrize(
    ("draw", "missing"),
    [
        (lambda: charts.balancedness_by_state(STATES.drop("source"), subtitle=""), "source"),
        (lambda: charts.balancedness_by_size(by_ranks().drop("num_draws"), "num_ranks", subtitle=""), "num_draws"),
        (lambda: charts.balancedness_by_tokens(by_tokens(), PRINTED.drop("part"), subtitle=""), "part"),
        (lambda: charts.balancedness_of_draws(draws().drop("origin"), by_ranks(), subtitle=""), "origin"),
        (lambda: charts.load_by_place(order().drop("load_place"), subtitle=""), "load_place"),
    ],
)
def test_missing_columns_are_named(draw, missing):
    with pytest.raises(DataError, match=f"column '{missing}' is missing"):
        draw()
