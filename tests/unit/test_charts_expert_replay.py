"""Charts of balancing replayed: complete, and titled with what their data say."""

import polars as pl
import pytest

from chart_checks import check_chart
from rackbook.charts import expert_replay as charts
from rackbook.errors import DataError

WITHOUT, WITH = "as routed, without EPLB", "as routed, with EPLB"
SOURCE = {"origin": "simulated", "source": "router, seed 1"}
STATES = pl.DataFrame(
    [
        (part, balance_of, value, "published", "S1")
        for part, pair in (("target", (0.35, 0.94)), ("draft", (0.21, 0.89)))
        for balance_of, value in zip((WITHOUT, WITH), pair, strict=True)
    ],
    schema=["part", "balance_of", "balancedness_per_layer_step", "origin", "source"],
    orient="row",
)


def course():
    rows = []
    for part in ("target", "draft"):
        for step, value, window in ((100, 0.3, None), (300, 0.9, 750), (500, 0.8, 750)):
            rows.append(
                {"part": part, "balance_of": WITHOUT, "step": step, "balancedness_per_layer_step": 0.3} | SOURCE
            )
            rows[-1]["window_steps"] = None
            rows.append({"part": part, "balance_of": WITH, "step": step, "balancedness_per_layer_step": value} | SOURCE)
            rows[-1]["window_steps"] = window
    return pl.DataFrame(rows, schema_overrides={"window_steps": pl.Int64})


MOVES = pl.DataFrame(
    [{"part": part, "step": 200, "window_steps": 750, "num_experts_moved": 10} | SOURCE for part in ("target", "draft")]
)


def swept(by, values, **more):
    return pl.DataFrame(
        [
            {
                "part": part,
                by: value,
                "before": 0.3,
                "after": 0.8 + 0.05 * place - 0.05 * (part == "draft"),
                "uniform_balancedness": 0.96,
                **more,
            }
            | SOURCE
            for part in ("target", "draft")
            for place, value in enumerate(values)
        ]
    )


def test_course():
    chart = charts.balancedness_over_steps(course(), MOVES, STATES, subtitle="model, setting")
    spec = check_chart(chart, name="balancedness_over_steps")
    assert spec["title"]["text"] == "The replay is 0.85 (target), 0.85 (draft) balanced after its first rearrangement"
    assert [panel["title"] for panel in spec["hconcat"]] == ["target", "draft"]


def test_memory_names_what_the_printed_figures_need():
    points = swept("memory_steps", [1e4, 1e5, 1e6, 1e7])
    spec = check_chart(charts.balancedness_by_memory(points, STATES, subtitle="s"), name="balancedness_by_memory")
    # 0.80, 0.85, 0.90, 0.95 against 0.94; 0.75, 0.80, 0.85, 0.90 against 0.89
    assert spec["title"]["text"] == (
        "Least memory that comes to the printed figures: 10,000,000 steps (target), 10,000,000 steps (draft)"
    )
    short = charts.balancedness_by_memory(points.filter(pl.col("memory_steps") < 1e6), STATES, subtitle="s")
    assert "not reached here (target), not reached here (draft)" in short.to_dict()["title"]["text"]


def test_redundancy_and_its_bound():
    points = swept("redundant_per_rank", [0, 1, 2], balancedness_bound=0.6)
    spec = check_chart(charts.balancedness_by_redundancy(points, subtitle="s"), name="balancedness_by_redundancy")
    assert spec["title"]["text"] == "With 0 redundant experts per rank no placement exceeds 0.60 (target), 0.60 (draft)"


def test_ep_size():
    spec = check_chart(
        charts.balancedness_by_ep_size(swept("num_ranks", [4, 8]), subtitle="s"), name="balancedness_by_ep_size"
    )
    assert spec["title"]["text"] == (
        "Balancedness on 8 ranks, without → with EPLB: 0.30 → 0.85 (target), 0.30 → 0.80 (draft)"
    )
    assert "log scale" in str(spec)


def test_window():
    rows = [
        {"part": "target", "window_steps": w, "interval_steps": i, "after": after, "rearrangements_per_1000_steps": 1.0}
        | SOURCE
        for w, i, after in ((100, 400, 0.95), (100, 3000, 0.93), (1000, 400, 0.94), (1000, 3000, 0.92))
    ]
    spec = check_chart(charts.balancedness_by_window(pl.DataFrame(rows), subtitle="s"), name="balancedness_by_window")
    assert spec["title"]["text"] == "0.950 with a window of 100 every 400 steps, 0.920 with 1,000 every 3,000"


def test_cost():
    rows = [
        {
            "balancedness_per_layer_step": value,
            "cost_reading": reading,
            "extra_ms": extra,
            "extra_percent": 10 * extra,
            "origin": "modelled",
            "source": "S1",
        }
        for reading, extras in (
            ("the part that more ranks do not shrink", (8, 4, 0.1)),
            ("all of the MoE time", (10, 5, 0.2)),
        )
        for value, extra in zip((0.35, 0.6, 0.94), extras, strict=True)
    ]
    spec = check_chart(
        charts.cost_by_balancedness(
            pl.DataFrame(rows, schema_overrides={"extra_ms": pl.Float64}), STATES, subtitle="s"
        ),
        name="cost_by_balancedness",
    )
    assert spec["title"]["text"] == (
        "A balancedness of 0.35 costs 10.0 ms if all of the MoE time waits, 8.0 ms if part of it"
    )
    assert "axis does not start at 0" in str(spec)


def test_places():
    places = pl.DataFrame(
        [
            {
                "layer": layer,
                "expert_place": place,
                "expert_load_to_mean": value,
                "origin": "measured",
                "source": "run x",
            }
            for layer, values in ((0, (1.5, 0.5)), (1, (1.25, 0.75)))
            for place, value in enumerate(values, 1)
        ]
    )
    spec = check_chart(charts.expert_loads_by_place(places, subtitle="CPU lab"), name="expert_loads_by_place")
    assert spec["title"]["text"] == "The busiest expert of a layer has 1.2 to 1.5 times the mean"


@pytest.mark.parametrize(
    ("draw", "missing"),
    [
        (
            lambda: charts.balancedness_over_steps(course().drop("window_steps"), MOVES, STATES, subtitle=""),
            "window_steps",
        ),
        (lambda: charts.balancedness_over_steps(course(), MOVES.drop("step"), STATES, subtitle=""), "step"),
        (lambda: charts.balancedness_by_memory(swept("memory_steps", [1.0]), STATES.drop("part"), subtitle=""), "part"),
        (
            lambda: charts.balancedness_by_redundancy(swept("redundant_per_rank", [1]), subtitle=""),
            "balancedness_bound",
        ),
        (lambda: charts.balancedness_by_ep_size(swept("num_ranks", [4]).drop("before"), subtitle=""), "before"),
        (lambda: charts.balancedness_by_window(swept("window_steps", [4]), subtitle=""), "interval_steps"),
        (lambda: charts.cost_by_balancedness(STATES, STATES, subtitle=""), "cost_reading"),
        (lambda: charts.expert_loads_by_place(STATES, subtitle=""), "layer"),
    ],
)
def test_missing_columns_are_named(draw, missing):
    with pytest.raises(DataError, match=f"column '{missing}' is missing"):
        draw()
