"""Experiment 14: prices, mixes, the price calendar, break-even, charts."""

from datetime import UTC, date, datetime, timedelta, timezone

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import cost as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import cost as experiment
from rackbook.models import cost
from rackbook.models.price_calendar import BEIJING, PeakHours
from rackbook.tables import COLUMNS

LIST = cost.TokenPrices(0.003, 0.15, 0.60)
RULE = PeakHours(frozenset(range(5)), ((9, 12), (14, 18)))


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def test_revenue_by_hand():
    # 1M tokens/s for an hour are 3,600 million tokens
    assert cost.usd_per_gpu_hour(1e6, 0.01) == pytest.approx(36)
    assert cost.implied_usd_per_mtok(36, 1e6) == pytest.approx(0.01)
    assert cost.break_even_tok_per_s_per_gpu(36, 0.01) == pytest.approx(1e6)
    assert cost.blended_usd_per_mtok(LIST, cost.Mix(0.9, 0.08, 0.02)) == pytest.approx(0.0027 + 0.012 + 0.012)


def test_hit_rate_of_the_input_is_not_the_share_of_all_tokens():
    mix = cost.Mix.of_input(0.9, 0.2)
    assert (mix.cache_hit, mix.cache_miss, mix.output) == pytest.approx((0.72, 0.08, 0.2))


def test_ends_of_the_published_line():
    price = cost.implied_usd_per_mtok(38.96, 954_000)
    assert price == pytest.approx(0.011344, abs=5e-7)
    most, least = cost.mixes_at(LIST, price)
    assert (most.cache_miss, most.output) == (0, pytest.approx(0.013977, abs=1e-6))
    assert (least.cache_miss, least.output) == (pytest.approx(0.056762, abs=1e-6), 0)


def test_a_mean_price_above_the_miss_price_needs_output():
    most, least = cost.mixes_at(LIST, 0.3)
    assert (most.cache_miss, most.output) == (0, pytest.approx(0.297 / 0.597))
    assert (least.cache_hit, least.output) == (0, pytest.approx(0.15 / 0.45))


def test_a_corner_is_the_same_mix_twice():
    assert cost.mixes_at(LIST, 0.6) == (cost.Mix(0, 0, 1), cost.Mix(0, 0, 1))


@given(
    st.tuples(*[st.floats(0, 10)] * 3).filter(lambda p: max(p) - min(p) > 1e-3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_every_mix_of_the_segment_has_the_price(prices, place, between):
    listed = cost.TokenPrices(*prices)
    target = min(max(prices), min(prices) + place * (max(prices) - min(prices)))
    one, other = cost.mixes_at(listed, target)
    mixed = cost.Mix(*(a + between * (b - a) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)))
    assert cost.blended_usd_per_mtok(listed, mixed) == pytest.approx(target, abs=1e-9)
    assert one.output >= other.output


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cost.Mix(0.5, 0.5, 0.5), "a sum of 1.5, allowed: 1"),
        (lambda: cost.Mix(1.2, -0.2, 0), "share of cache_hit: got 1.2, allowed: a number from 0 to 1"),
        (lambda: cost.Mix.of_input(1.5, 0.1), "input_hit_rate: got 1.5"),
        (lambda: cost.TokenPrices(-1, 0, 0), "price of cache_hit: got -1, allowed: a number ≥ 0"),
        (lambda: cost.mixes_at(LIST, 0.7), "usd_per_mtok: got 0.7, allowed: 0.003 to 0.6"),
        (lambda: cost.mixes_at(cost.TokenPrices(1, 1, 1), 1), "all three are 1"),
        (lambda: cost.implied_usd_per_mtok(1, 0), "tok_per_s_per_gpu: got 0"),
        (lambda: cost.break_even_tok_per_s_per_gpu(1, 0), "no throughput breaks even"),
    ],
)
def test_impossible_money_is_refused(call, words):
    with pytest.raises(ParameterError, match=words):
        call()


def at(text):
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("instant", "peak"),
    [
        ("2026-10-19T08:59:59+08:00", False),
        ("2026-10-19T09:00:00+08:00", True),
        ("2026-10-19T11:59:59+08:00", True),
        ("2026-10-19T12:00:00+08:00", False),
        ("2026-10-19T13:59:59+08:00", False),
        ("2026-10-19T14:00:00+08:00", True),
        ("2026-10-19T17:59:59+08:00", True),
        ("2026-10-19T18:00:00+08:00", False),
        ("2026-10-24T10:00:00+08:00", False),  # Saturday
        ("2026-10-19T01:30:00+00:00", True),  # 09:30 in Beijing
        ("2026-10-18T19:30:00-06:00", True),  # the same moment, Sunday evening elsewhere
        ("2026-10-25T16:30:00+00:00", False),  # Monday 00:30 in Beijing
    ],
)
def test_peak_by_hand(instant, peak):
    assert RULE.is_peak(at(instant)) is peak


def test_a_holiday_has_no_peak():
    rule = PeakHours(RULE.weekdays, RULE.hours, frozenset({date(2026, 10, 1)}))
    assert not rule.is_peak(at("2026-10-01T10:00:00+08:00"))
    assert rule.is_peak(at("2026-10-02T10:00:00+08:00"))


def test_a_week_has_35_peak_hours_wherever_it_starts():
    for hours in (0, 5, 77.25):
        start = datetime(2026, 10, 19, tzinfo=UTC) + timedelta(hours=hours)
        assert RULE.peak_hours_between(start, start + timedelta(days=7)) == pytest.approx(35)


@given(st.integers(0, 14 * 24 * 60), st.integers(0, 7 * 24 * 60), st.integers(0, 7 * 24 * 60), st.integers(-12, 14))
def test_peak_hours_add_up_and_agree_with_is_peak(start, first, second, offset):
    zone = timezone(timedelta(hours=offset))
    begin = datetime(2026, 9, 28, tzinfo=zone) + timedelta(minutes=start)
    middle, end = begin + timedelta(minutes=first), begin + timedelta(minutes=first + second)
    whole = RULE.peak_hours_between(begin, end)
    parts = RULE.peak_hours_between(begin, middle) + RULE.peak_hours_between(middle, end)
    assert whole == pytest.approx(parts)
    minute = RULE.peak_hours_between(begin, begin + timedelta(minutes=1)) * 60
    assert minute == pytest.approx(float(RULE.is_peak(begin)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RULE.is_peak(datetime(2026, 10, 19, 9)), "without a time zone, allowed: with one, as in 2026-10-19"),
        (lambda: RULE.peak_hours_between(at("2026-10-20T00:00+08:00"), at("2026-10-19T00:00+08:00")), "not before"),
        (lambda: PeakHours(frozenset({7}), ()), r"weekdays: got \[7\], allowed: 0 \(Monday\) to 6"),
        (lambda: PeakHours(frozenset(), ((14, 18), (9, 12))), "in order, that do not overlap"),
    ],
)
def test_bad_calendars_are_refused(call, words):
    with pytest.raises(ParameterError, match=words):
        call()


def test_the_clock_of_the_rule_has_no_summer_time():
    assert {BEIJING.utcoffset(at(f"2026-{m:02}-01T00:00+00:00")) for m in range(1, 13)} == {timedelta(hours=8)}


def test_week_is_shown_on_another_clock(evidence):
    seoul = experiment.collect(experiment.Params(shown_utc_offset_h=9))
    for frame, first in ((evidence.week, 9), (seoul.week, 10)):
        peaks = frame.filter((pl.col("weekday") == "Mon") & (pl.col("price_period") == "peak"))
        assert peaks["hour_of_day"].min() == first
        assert (frame["price_period"] == "peak").sum() == 35


def test_a_holiday_lowers_the_week():
    params = experiment.Params(holidays=["2026-10-20"])
    evidence = experiment.collect(params)
    assert dict(evidence.weekly.select("price_period", "hours_per_week").iter_rows())["peak"] == 28


def test_flat_week_by_hand(evidence):
    earned = dict(evidence.weekly.select("price_period", "usd_per_gpu_hour").iter_rows())
    by_hand = 954e3 * 3600e-6 * (0.965 * 0.003 + 0.028 * 0.15 + 0.007 * 0.6)
    assert earned["off-peak"] == pytest.approx(by_hand)
    assert earned["peak"] == pytest.approx(2 * by_hand)
    assert earned[None] == pytest.approx(by_hand * (133 + 2 * 35) / 168)


def test_line_and_sensitivity_meet(evidence):
    ends = evidence.line[[0, -1]]
    assert ends["output_share_percent"].to_list() == pytest.approx([1.3977, 0], abs=1e-4)
    assert ends["cache_miss_share_percent"].to_list() == pytest.approx([0, 5.6762], abs=1e-4)
    # the line o(m), in percent, from p = 0.003 h + 0.15 m + 0.6 o and h + m + o = 1
    for row in evidence.line.to_dicts():
        on_line = (100 * (row["usd_per_mtok"] - 0.003) - 0.147 * row["cache_miss_share_percent"]) / 0.597
        assert row["output_share_percent"] == pytest.approx(on_line, abs=1e-9)
    all_hits = evidence.sensitivity.filter(pl.col("input_hit_rate_percent") == 100)
    below = all_hits.filter(pl.col("usd_per_gpu_hour") < 38.96)["output_share_percent"].max()
    above = all_hits.filter(pl.col("usd_per_gpu_hour") > 38.96)["output_share_percent"].min()
    assert below < 1.3977 < above


def test_slopes_by_hand(evidence):
    off_peak = evidence.slopes.filter(pl.col("price_period") == "off-peak")
    assert dict(off_peak.select("token_kind", "usd_per_gpu_hour_per_point").iter_rows()) == pytest.approx(
        {"cache miss": 954e3 * 36e-6 * 0.147, "output": 954e3 * 36e-6 * 0.597}
    )


def test_break_even_is_where_revenue_meets_cost(evidence):
    for row in evidence.margins.to_dicts():
        ratio = row["total_tok_per_s_per_gpu"] / 954e3
        assert ratio * row["usd_per_gpu_hour"] == pytest.approx(row["gpu_hour_cost_usd"])
    all_hits = evidence.margins.filter(pl.col("input_hit_rate_percent") == 100)
    off_peak = 0.993 * 0.003 + 0.007 * 0.6
    assert all_hits["usd_per_mtok"].item() == pytest.approx(off_peak * (133 + 2 * 35) / 168)
    assert evidence.break_even.filter(pl.col("gpu_hour_cost_usd") == 0)["total_tok_per_s_per_gpu"].unique().item() == 0


def test_own_prices_and_mix():
    params = experiment.Params(
        off_peak_usd_per_mtok=[1.0, 2.0, 4.0], peak_usd_per_mtok=[1.0, 2.0, 4.0], hit_share=0.5, output_share=0.25,
        tok_per_s_per_gpu=1000.0, revenue_usd_per_gpu_hour=7.2,
    )  # fmt: skip
    evidence = experiment.collect(params)
    assert evidence.mix["usd_per_gpu_hour"].to_list() == pytest.approx([3.6 * 2.0] * 2)
    assert evidence.weekly["usd_per_gpu_hour"].to_list() == pytest.approx([7.2] * 3)
    assert evidence.prices.select("origin", "source").unique().rows() == [("modelled", "parameters")]
    assert experiment.collect(experiment.Params()).prices["origin"].unique().to_list() == ["published"]
    assert evidence.line["source"].unique().to_list() == ["parameters+parameters"]


OWN = {"off_peak_usd_per_mtok": [0.1, 1.0, 3.0], "peak_usd_per_mtok": [0.1, 1.0, 3.0]}
FLAT = {"off_peak_usd_per_mtok": [1.0] * 3, "peak_usd_per_mtok": [1.0] * 3}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tok_per_s_per_gpu": 10_000.0}, "usd_per_mtok: got 1.08222, allowed: 0.003 to 0.6"),
        (OWN, "usd_per_mtok: got 0.011344, allowed: 0.1 to 3"),
        (FLAT, "all three are 1, so the price says nothing about the mix"),
    ],
)
def test_a_revenue_that_no_mix_earns_leaves_all_else(given, reason):
    params = experiment.Params(**given)
    found = experiment.collect(params)
    (line,) = found.line.to_dicts()
    assert reason in line["missing_reason"]
    assert line["usd_per_gpu_hour"] == 38.96
    assert line["output_share_percent"] is line["cache_miss_share_percent"] is None
    for row in found.margins.to_dicts():
        paid = row["total_tok_per_s_per_gpu"] * 3600e-6 * row["usd_per_mtok"]
        assert paid == pytest.approx(row["gpu_hour_cost_usd"])
    spec = check_chart(
        charts.mixes_of_one_revenue(found.line, found.mix.head(1), subtitle="own"), name="mixes_of_one_revenue"
    )
    assert spec["title"]["text"] == "No line of mixes that earn 38.96 USD per GPU-hour"
    assert reason in spec["title"]["subtitle"][1]
    assert not [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]


def test_a_missing_reason_is_only_where_something_is_missing(evidence):
    assert evidence.line.height == 51
    for name in ("line", "break_even", "margins"):
        assert getattr(evidence, name)["missing_reason"].null_count() == getattr(evidence, name).height


def test_tokens_that_earn_nothing_have_no_break_even():
    free_hits = {"off_peak_usd_per_mtok": [0.0, 1.0, 3.0], "peak_usd_per_mtok": [0.0, 1.0, 3.0], "output_share": 0.0}
    params = experiment.Params(**free_hits, input_hit_rates=[0.5, 1.0])
    found = experiment.collect(params)
    half, all_hits = found.margins.to_dicts()
    assert half["total_tok_per_s_per_gpu"] == pytest.approx(10 / 3600e-6 / 0.5)
    assert all_hits["total_tok_per_s_per_gpu"] is None
    assert "earn nothing" in all_hits["missing_reason"]
    for shown in (found.break_even, found.break_even.filter(pl.col("input_hit_rate_percent") == 100)):
        check_chart(
            charts.break_even_throughput(shown, experiment.at_hand(params), subtitle="own"),
            name="break_even_throughput",
        )


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"off_peak_usd_per_mtok": [1.0]}, "got 1 prices, allowed: three"),
        ({"off_peak_usd_per_mtok": [1.0, 2.0, 4.0]}, "peak_usd_per_mtok\n.*allowed: both or none"),
        ({"peak_usd_per_mtok": [1.0, 2.0, 4.0]}, "peak_usd_per_mtok\n.*allowed: both or none"),
        (OWN | {"peak_usd_per_mtok": [-1.0, 1.0, 1.0]}, "peak_usd_per_mtok.0\n.*greater than or equal to 0"),
        (
            {"hit_share": 0.9, "output_share": 0.2},
            "output_share\n.*got 0.2, allowed: at most 0.1, what hit_share 0.9 leaves",
        ),
        ({"hit_share": 0.995}, "output_share\n.*at most 0.005"),
        ({"week_of": "19.10.2026"}, "week_of\n.*got '19.10.2026', allowed: a day as YYYY-MM-DD"),
        ({"holidays": ["2026-02-27", "2026-02-30"]}, "holidays\n.*got '2026-02-30', allowed: a day"),
        ({"input_hit_rates": []}, "input_hit_rates"),
        ({"input_hit_rates": [0.5, 1.5]}, "input_hit_rates.1\n.*less than or equal to 1"),
        ({"shown_utc_offset_h": 15}, "shown_utc_offset_h"),
        ({"hit_share": 1.1}, "hit_share"),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(bad, words):
    with pytest.raises(ValidationError, match=words):
        experiment.Params(**bad)


def test_shares_may_be_all_tokens():
    assert (
        experiment.collect(experiment.Params(hit_share=0.9, output_share=0.1)).mix["cache_miss_share_percent"][0] == 0
    )


def test_frames_use_the_vocabulary(evidence):
    for name in vars(evidence):
        frame = getattr(evidence, name)
        assert set(frame.columns) <= set(COLUMNS), name
        assert {"origin", "source"} <= set(frame.columns), name


def test_verdicts_do_not_depend_on_the_parameters(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    assert verdicts["usd_per_gpu_hour"].verdict == verdicts["output_peak"].verdict == "open"
    assert verdicts["two_roads_agree"].verdict == verdicts["tokens_are_logical"].verdict == "consistent"
    assert verdicts["max_output_share_percent"].finding.found == pytest.approx(1.3977, abs=1e-4)
    assert verdicts["output_from_price"].finding.found == pytest.approx(13_334, abs=1)
    other = experiment.collect(
        experiment.Params(tok_per_s_per_gpu=5e5, hit_share=0.5, output_share=0.5, holidays=["2026-10-21"])
    )
    assert experiment.CHECKS.judge(other).records() == experiment.CHECKS.judge(evidence).records()


def test_charts(evidence):
    line = check_chart(
        charts.mixes_of_one_revenue(evidence.line, evidence.mix.head(1), subtitle="GB300"), name="mixes_of_one_revenue"
    )
    assert "38.96 USD" in line["title"]["text"]
    check_chart(
        charts.revenue_by_output_share(evidence.sensitivity, evidence.points, subtitle="GB300"),
        name="revenue_by_output_share",
    )
    week = check_chart(charts.price_week(evidence.week, subtitle="derived"), name="price_week")
    assert week["title"]["text"].startswith("35 of the week's 168 hours are peak (20.8%)")
    at_hand = experiment.at_hand(experiment.Params())
    check_chart(
        charts.break_even_throughput(evidence.break_even, at_hand, subtitle="GB300"), name="break_even_throughput"
    )


def test_a_mark_far_above_the_lines_does_not_press_them_flat(evidence):
    params = experiment.Params(**OWN)
    found = experiment.collect(params)
    spec = check_chart(
        charts.break_even_throughput(found.break_even, experiment.at_hand(params), subtitle="own"),
        name="break_even_throughput",
    )
    highest = found.break_even["total_tok_per_s_per_gpu"].max()
    assert spec["layer"][0]["encoding"]["y"]["scale"]["domain"] == [0, pytest.approx(1.1 * highest)]
    assert spec["layer"][-1]["mark"]["text"] == "954,000 lies above"
    few = experiment.collect(experiment.Params(tok_per_s_per_gpu=10_000.0)).sensitivity
    spec = check_chart(
        charts.revenue_by_output_share(few, evidence.points, subtitle="own"), name="revenue_by_output_share"
    )
    assert [layer["mark"]["type"] for layer in spec["layer"]] == ["line", "text"]
    assert spec["layer"][-1]["mark"]["text"] == "38.96 lies above"


def test_a_name_stands_where_there_is_room(evidence):
    def side(mix):
        spec = charts.mixes_of_one_revenue(evidence.line, mix.head(1), subtitle="s").to_dict()
        texts = [layer for layer in spec["layer"] if layer["mark"]["type"] == "text"]
        named = {row["label"]: layer for layer in texts for row in spec["datasets"][layer["data"]["name"]]}
        return next(layer["mark"]["align"] for label, layer in named.items() if "example" in label)

    assert side(evidence.mix) == "left"
    assert side(experiment.collect(experiment.Params(hit_share=0.8)).mix) == "right"


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="price_week: column 'price_period' is missing"):
        charts.price_week(evidence.week.drop("price_period"), subtitle="")
