"""Charts of notebook 05, on small hand-made frames."""

import polars as pl
import pytest

from chart_checks import check_chart
from rackbook.charts import dp_imbalance
from rackbook.errors import DataError

SIMULATED = {"origin": "simulated", "source": "seed 1"}


def losses():
    return pl.DataFrame(
        {
            "dp_size": [2, 4],
            "loss_percent": [5.9, 13.6],
            "origin": ["derived"] * 2,
            "source": ["S1"] * 2,
            "formula": ["a", "b"],
        }
    )


def predictions(sizes=(2, 4, 8)):
    rows = [
        {"setting": "default costs", "dp_size": n, "loss_percent": n * 1.0, "loss_low_percent": n * 0.9}
        | {"loss_high_percent": n * 1.2, "whole_run_loss_percent": n * 1.5, **SIMULATED}
        for n in sizes
    ]
    return pl.DataFrame(rows)


def sensitivity():
    rows = [
        {"varied": varied, "setting": setting, "dp_size": n, "loss_percent": loss, "loss_low_percent": loss}
        | {"loss_high_percent": loss, "excess_percent": loss, **SIMULATED}
        | {"missing_reason": None if loss else f"no common window: {n} s"}
        for varied, setting, factor in (
            ("all defaults", "all defaults", 1),
            ("cost of depth", "2 ×", 3),
            ("lag", "9 s", None),
        )
        for n in (2, 4)
        for loss in [factor and float(n * factor)]
    ]
    return pl.DataFrame(rows)


def spans():
    rows = [
        {"schedule": schedule, "rank": rank, "step": 0, "activity": activity, "from_s": from_s, "to_s": to_s}
        | {"num_prefill_tokens": 5, "mean_depth_tokens": 2.0, **SIMULATED}
        for schedule, rank, activity, from_s, to_s in (
            ("mirror", 0, "computing", 0.0, 1.0),
            ("lag", 0, "computing", 0.0, 0.7),
            ("lag", 0, "waiting", 0.7, 1.0),
        )
    ]
    return pl.DataFrame(rows)


def rows_of(spec, field):
    """The data sets of a specification that have a field."""
    return [rows for rows in spec["datasets"].values() if rows and field in rows[0]]


def test_ranks_over_time():
    chart = dp_imbalance.ranks_over_time(spans(), name="ranks", headline="h", subtitle="simulated")
    spec = check_chart(chart, name="ranks")
    color = spec["spec"]["encoding"]["color"]["scale"]
    assert color["domain"] == ["computing", "waiting"], "the legend lists no activity that is not drawn"
    assert "axis does not start" not in spec["spec"]["encoding"]["x"]["title"]
    later = spans().with_columns(pl.col("from_s") + 5, pl.col("to_s") + 5)
    spec = check_chart(dp_imbalance.ranks_over_time(later, name="r", headline="h", subtitle="simulated"), name="r")
    assert "axis does not start at 0" in spec["spec"]["encoding"]["x"]["title"]


def test_loss_by_ranks_shows_both_and_the_range():
    spec = check_chart(
        dp_imbalance.loss_by_ranks(losses(), predictions(), sensitivity(), subtitle="s"), name="loss_by_ranks"
    )
    assert (
        spec["title"]["text"]
        == "On 2 and 4 ranks: published 5.9 % and 13.6 %, simulated with default costs 2.0 % and 4.0 %"
    )
    spans_of_range = [rows for rows in rows_of(spec, "loss_low_percent") if "setting" not in rows[0]]
    assert spans_of_range == [
        [
            {"dp_size": 2, "loss_low_percent": 2.0, "loss_high_percent": 6.0},
            {"dp_size": 4, "loss_low_percent": 4.0, "loss_high_percent": 12.0},
        ]
    ]
    assert "log scale" in str(spec)


def test_loss_by_ranks_does_not_claim_what_was_not_simulated():
    chart = dp_imbalance.loss_by_ranks(losses(), predictions((4, 8)), sensitivity(), subtitle="s")
    assert (
        check_chart(chart, name="loss_by_ranks")["title"]["text"]
        == "Throughput lost to DP imbalance by number of ranks"
    )


def test_loss_by_ranks_leaves_missing_losses_out():
    none = pl.lit(None, pl.Float64).alias("loss_percent")
    chart = dp_imbalance.loss_by_ranks(
        losses(), predictions().with_columns(none), sensitivity().with_columns(none), subtitle="simulated"
    )
    spec = check_chart(chart, name="loss_by_ranks")
    assert spec["title"]["text"] == "Throughput lost to DP imbalance by number of ranks"
    assert {r["setting"] for rows in rows_of(spec, "setting") for r in rows} == {"published"}


def test_loss_by_assumption_leaves_missing_losses_out():
    spec = check_chart(
        dp_imbalance.loss_by_assumption(sensitivity(), losses(), subtitle="simulated"), name="loss_by_assumption"
    )
    (drawn,) = rows_of(spec, "label")
    assert [r["label"] for r in drawn] == ["all defaults"] * 2 + ["cost of depth: 2 ×"] * 2
    assert spec["title"]["subtitle"] == ["simulated", "Without a loss (no common window): lag: 9 s"]


def test_throughput_per_gpu_names_the_largest_drop():
    rows = [
        {
            "setting": setting,
            "dp_size": n,
            "prefill_tok_per_s_per_gpu": value,
            "origin": "derived",
            "source": "S1",
            "formula": "f",
        }
        for setting, values in (("mirror replay", (100.0, 95.0)), ("lag replay", (100.0, 80.0)))
        for n, value in zip((2, 4), values, strict=True)
    ]
    spec = check_chart(
        dp_imbalance.throughput_per_gpu_by_ranks(pl.DataFrame(rows), subtitle="s"), name="throughput_per_gpu_by_ranks"
    )
    assert "20.0 % less in lag replay" in spec["title"]["text"]
    assert {r["label"] for rows in rows_of(spec, "label") for r in rows} == {"−5.0 %", "−20.0 %"}


def test_waiting_by_ranks():
    rows = [
        {"law": law, "num_ranks": n, "excess_to_two_ranks": value, "low": low, "high": high}
        | {"origin": origin, "source": "s", "formula": "f"}
        for law, n, value, low, high, origin in (
            ("normal", 2, 1.0, None, None, "modelled"),
            ("normal", 4, 1.8, None, None, "modelled"),
            ("published", 2, 1.0, 1.0, 1.0, "derived"),
            ("published", 4, 2.5, 2.4, 2.6, "derived"),
        )
    ]
    spec = check_chart(dp_imbalance.waiting_by_ranks(pl.DataFrame(rows), subtitle="s"), name="waiting_by_ranks")
    assert "2.50 times" in spec["title"]["text"]


def test_ttft_by_load_reports_the_highest_load():
    rows = [
        {
            "policy": policy,
            "load_percent": load,
            "num_ranks": 4,
            "ttft_p50_s": 1.0,
            "ttft_p99_s": tail,
            "wait_percent": 5.0,
        }
        | {"ttft_p99_low_s": tail, "ttft_p99_high_s": tail, **SIMULATED}
        for policy, load, tail in (("round-robin", 50.0, 2.0), ("round-robin", 90.0, 6.0), ("least-tokens", 90.0, 3.0))
    ]
    spec = check_chart(dp_imbalance.ttft_by_load(pl.DataFrame(rows), subtitle="s"), name="ttft_by_load")
    assert spec["title"]["text"] == "P99 time to first token at 90 % load: round-robin 6 s, least-tokens 3 s"


@pytest.mark.parametrize(
    ("function", "frames"),
    [
        (dp_imbalance.loss_by_ranks, (losses().drop("loss_percent"), predictions(), sensitivity())),
        (dp_imbalance.loss_by_assumption, (sensitivity().drop("loss_percent"), losses())),
        (dp_imbalance.ttft_by_load, (losses(),)),
        (dp_imbalance.waiting_by_ranks, (losses(),)),
        (dp_imbalance.throughput_per_gpu_by_ranks, (losses(),)),
    ],
)
def test_a_frame_without_its_columns_is_refused(function, frames):
    with pytest.raises(DataError, match=rf"{function.__name__}.*: column '\w+' is missing, got columns: "):
        function(*frames, subtitle="s")
