"""Experiment 07: the ladder, the synchronisation, the burst and the load, charts, verdicts."""

from dataclasses import fields
from functools import cached_property

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import cpu_overhead as charts
from rackbook.claims import shown_value
from rackbook.errors import DataError
from rackbook.experiments import cpu_overhead as experiment
from rackbook.experiments import cpu_overhead_load as load
from rackbook.hostwork import measured
from rackbook.hostwork.admission import draw_arrivals, simulate
from rackbook.hostwork.cap_sweep import compare_caps
from rackbook.tables import COLUMNS

SHORT = {"caps": [1, 8]}


@pytest.fixture(scope="module", autouse=True)
def short_sample():
    """Two repeats of three seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "WINDOW_S", 3.0)
        patch.setattr(load, "REPEATS", 2)
        yield


@pytest.fixture(scope="module")
def evidence(short_sample):
    return experiment.collect(experiment.Params(**SHORT))


def row(frame, **where):
    return frame.filter(*(pl.col(name) == value for name, value in where.items())).row(0, named=True)


def test_every_shown_column_is_in_the_vocabulary_and_says_where_it_comes_from(evidence):
    given = [getattr(evidence, field.name) for field in fields(evidence)]
    frames = [value for value in given if isinstance(value, pl.DataFrame)]
    lazy = [name for name, member in vars(type(evidence)).items() if isinstance(member, cached_property)]
    frames += [getattr(evidence, name) for name in lazy]
    frames += [experiment.hops(evidence), load.published_cap_against_none(evidence)]
    assert len(frames) == 25
    for frame in frames:
        assert set(frame.columns) <= set(COLUMNS)
        assert frame.height > 0
        assert frame.select("origin", "source").null_count().row(0) == (0, 0)


def test_the_ladder_has_every_metric_that_is_printed_before_and_after(evidence):
    got = {
        (r["pr"], r["unit"]): r["after_to_before"]
        for r in evidence.gains.to_dicts()
        if r["quantity"] != "Decode step time"
    }
    assert got == pytest.approx(
        {
            (61121, "tokens/s/GPU"): 440 / 141,
            (61121, "tokens/s"): 159 / 40,
            (61767, "ms"): 1.5 / 10.8,
            (61725, "tokens/s/GPU"): 516 / 460,
            (61725, "tokens/s"): 153 / 109,
            (61725, "requests"): 4 / 140,
            (59908, "ms"): 6.0 / 38.8,
        }
    )
    assert evidence.gains.height == 8


def test_the_parts_of_the_sync_add_up(evidence):
    for stage, total in (("before", 10.8), ("after", 1.5)):
        assert evidence.sync_split.filter(pl.col("stage") == stage)["dp_sync_ms"].sum() == pytest.approx(total)


def test_the_hidden_share_carries_the_rounding_of_the_printed_figures(evidence):
    share = row(evidence.sync_bounds, quantity="hidden share of the saved sync")
    # least: 2.96 of 9.2 ms waited for; most: 2.94 of 9.4 ms
    assert (share["low"], share["high"]) == pytest.approx((100 * (1 - 2.96 / 9.2), 100 * (1 - 2.94 / 9.4)))
    assert share["low"] < 100 * 6.35 / 9.3 < share["high"]


def test_curves_of_the_sync_pass_through_their_points(evidence):
    at_32 = evidence.sync_growth.filter((pl.col("num_ranks") == 32) & (pl.col("origin") == "modelled"))
    assert dict(at_32.select("growth_law", "dp_sync_ms").iter_rows()) == pytest.approx(
        {"proportional to the ranks": 10.8, "ring": 10.8, "recursive doubling": 1.5}
    )
    assert experiment.hops(evidence).select("num_hops", "growth_law").rows() == [
        (62, "ring"),
        (5, "recursive doubling"),
    ]


@pytest.mark.parametrize(("max_ranks", "last"), [(2, 32), (32, 32), (72, 64), (256, 256)])
def test_curves_stop_at_the_last_power_of_two_and_reach_the_printed_point(evidence, max_ranks, last):
    curves = experiment.sync_growth(evidence.points, max_ranks)
    assert curves.filter(pl.col("origin") == "modelled")["num_ranks"].max() == last


def test_admission_costs_and_stalls_by_hand(evidence):
    assert evidence.admission_costs["ns_per_token"].to_list() == pytest.approx(
        [38.8e6 / 875_520, 38.8e6 / 855_000, 6e6 / 875_520, 6e6 / 855_000]
    )
    assert evidence.stalls["stall_ms"].to_list() == pytest.approx([5432, 155.2, 840, 24])


@pytest.mark.parametrize(("cost", "each"), [("before", 38.8), ("after", 6.0)])
def test_the_simulated_burst_stalls_as_the_arithmetic_says(evidence, cost, each):
    for cap, admissions in (("none", 140), ("4", 4), ("1", 1)):
        burst = row(evidence.burst_trade, admission_cost=cost, cap=cap)
        steps = -(-140 // admissions)
        assert burst["step_max_ms"] - 13.15 == pytest.approx(admissions * each)
        assert burst["delay_max_ms"] == pytest.approx(140 * each + steps * 13.15)


def test_the_sweep_tries_the_published_cap_and_none_beside_the_given_ones(evidence):
    for _, case in evidence.sweep.group_by("arrivals", "admission_cost"):
        assert case["cap"].to_list() == ["1", "4", "8", "none"]
    assert evidence.sweep.height == 4 * 4


def test_a_smaller_cap_never_lengthens_the_longest_step(evidence):
    for _, case in evidence.sweep.group_by("arrivals", "admission_cost"):
        longest = case["step_max_ms"].to_list()
        assert longest == sorted(longest)
        # a step cannot exceed base + cap · cost
        for r in case.filter(pl.col("cap") != "none").to_dicts():
            assert r["step_max_ms"] <= 13.15 + int(r["cap"]) * r["ns_per_token"] * 131_072e-6 + 1e-9


def test_statistics_pool_the_repeats_and_leave_out_steps_after_the_window(evidence, monkeypatch):
    monkeypatch.setattr(load, "WINDOW_S", 0.3)
    monkeypatch.setattr(load, "REPEATS", 3)
    params = experiment.Params(requests_per_s=4000.0, caps=[4], seed=8, bursts=[0.5, 140, 1])
    got = row(load.sweep(evidence.points, params), arrivals="partly in bursts", admission_cost="before", cap="4")
    runs = [
        simulate(
            draw_arrivals(
                np.random.default_rng([8, 1, repeat]),
                num_ranks=32,
                requests_per_s=4000,
                window_s=0.3,
                prompt_tokens=131_072,
                burst_share=0.5,
                burst_size=140,
            ),
            cap=4,
            ns_per_token=38.8e6 / 875_520,
            base_step_ms=13.15,
        )
        for repeat in range(3)
    ]
    steps = [run.step_ms[run.step_start_ms < 300] for run in runs]
    assert sum(run.step_ms.size for run in runs) > 2 * sum(map(len, steps)), "the load must outlast the window"
    delays = [run.delay_ms for run in runs]
    assert got["num_steps"] == sum(map(len, steps))
    assert got["step_mean_ms"] == pytest.approx(np.concatenate(steps).mean())
    assert got["step_p50_ms"] == pytest.approx(np.percentile(np.concatenate(steps), 50))
    assert got["delay_p99_ms"] == pytest.approx(np.percentile(np.concatenate(delays), 99))
    assert got["delay_max_ms"] == pytest.approx(max(delay.max() for delay in delays))
    each = [np.percentile(delay, 99) for delay in delays]
    assert (got["delay_p99_low_ms"], got["delay_p99_high_ms"]) == pytest.approx((min(each), max(each)))
    assert min(each) < max(each), "repeats are independent"
    assert got["num_waiting"] == sum(run.num_waiting for run in runs) > 0


def test_statistics_are_ordered(evidence):
    for r in evidence.sweep.to_dicts():
        for what in ("step", "delay"):
            assert r[f"{what}_p50_ms"] <= r[f"{what}_p99_ms"] <= r[f"{what}_max_ms"]
            assert r[f"{what}_p99_low_ms"] <= r[f"{what}_p99_high_ms"] <= r[f"{what}_max_ms"]
        assert 13.15 <= r["step_mean_ms"] <= r["step_max_ms"]


def test_the_seed_decides(evidence):
    again = experiment.collect(experiment.Params(**SHORT))
    assert again.sweep.equals(evidence.sweep)
    other = experiment.collect(experiment.Params(**SHORT, seed=1))
    assert not other.sweep["delay_p99_ms"].equals(evidence.sweep["delay_p99_ms"])
    assert other.burst_trade.equals(evidence.burst_trade), "nothing is random in the one burst"


@pytest.mark.parametrize(
    "change",
    [
        {"num_ranks": 4},
        {"base_step_ms": 20.0},
        {"requests_per_s": 90.0},
        {"prompt_tokens": 65_536},
        {"bursts": [1.0, 140, 1]},
        {"bursts": [0.25, 30, 1]},
        {"bursts": [0.25, 140, 32]},
        {"ns_per_token": 20.0},
    ],
    ids=str,
)
def test_every_parameter_of_the_load_changes_the_sweep(evidence, change):
    params = experiment.Params(**(SHORT | change))
    other = load.sweep(evidence.points, params)
    same = evidence.sweep.drop("source")
    assert not other.drop("source").equals(same)


def test_no_bursts_leave_one_kind_of_arrivals(evidence):
    sweep = load.sweep(evidence.points, experiment.Params(**SHORT, bursts=[0.0, 140, 1]))
    assert sweep["arrivals"].unique().to_list() == ["one by one"]


def test_a_window_without_requests_has_no_delay(evidence, monkeypatch):
    monkeypatch.setattr(load, "WINDOW_S", 0.02)
    params = experiment.Params(requests_per_s=1e-6, caps=[1])
    sweep = load.sweep(evidence.points, params)
    assert sweep["delay_p99_ms"].null_count() == sweep.height
    assert sweep["step_max_ms"].to_list() == [13.15] * sweep.height


def test_hidden_work_of_a_whole_admission_leaves_single_admissions_free():
    one = 44.4 * 131_072e-6
    streams = [
        draw_arrivals(np.random.default_rng(3), num_ranks=32, requests_per_s=180, window_s=3, prompt_tokens=131_072)
    ]
    found = compare_caps(streams, caps=[1], ns_per_token={"before": 44.3}, base_step_ms=13.15, hidden_ms=one)
    assert found["step_max_ms"].to_list() == pytest.approx([13.15])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"caps": [0, 4]}, "different whole numbers ≥ 1"),
        ({"caps": [4, 4]}, "different whole numbers ≥ 1"),
        ({"num_ranks": 4, "bursts": [0.5, 140, 5]}, "ranks that share it from 1 to num_ranks = 4"),
        ({"bursts": [1.1, 140, 1]}, "bursts: got .1.1, 140.0, 1.0., allowed: a share from 0 to 1"),
        ({"bursts": [0.5, 1.5, 1]}, "whole requests of a burst"),
        ({"bursts": [0.5]}, "bursts: got .0.5., allowed"),
        ({"rank_counts": [2, 300]}, "allowed: different whole numbers from 2 to 256"),
        ({"rank_counts": [4, 4]}, "allowed: different whole numbers from 2 to 256"),
        ({"own_step": ["6.0"]}, "own_step\n.*got ..6.0.., allowed: nothing, or the forward pass in ms"),
        ({"own_step": ["engine.log", "9"]}, "allowed: nothing, or the forward pass in ms"),
        ({"own_step": ["6", "9", "much"]}, "allowed: nothing, or the forward pass in ms"),
        ({"cap": 4}, "Extra inputs"),
    ],
)
def test_bad_parameters_are_refused(bad, words):
    with pytest.raises(ValidationError, match=words):
        experiment.Params(**bad)


OPEN = {
    "kv_reads_before", "kv_reads_after", "kv_reads_p90_before", "kv_reads_p90_after",
    "sync_before_ms", "sync_after_ms", "step_before_ms", "step_after_ms", "burst_requests", "cap_before", "cap_after",
    "cap_p90_before", "cap_p90_after", "admission_before_ms", "admission_after_ms", "admission_grows_with_prompt",
}  # fmt: skip
BY_THE_RUN = "gloo_grows_linearly"
"""Open unless the recorded run had a core for every rank."""


@pytest.mark.parametrize("params", [SHORT, SHORT | {"base_step_ms": 30.0, "slo_step_ms": 9.0, "ns_per_token": 1.0}])
def test_verdicts_do_not_depend_on_the_parameters(params):
    judged = list(experiment.CHECKS.judge(experiment.collect(experiment.Params(**params))))
    verdicts = {v.claim.id.split(".")[1]: v.verdict for v in judged}
    by_the_run = verdicts.pop(BY_THE_RUN)
    assert {name for name, verdict in verdicts.items() if verdict == "open"} == OPEN
    assert {verdict for name, verdict in verdicts.items() if name not in OPEN} == {"consistent"}
    times = measured.all_reduces(experiment.live.recorded(experiment.TOPIC)).filter(regime=measured.OWN_CORE)
    assert by_the_run == "open" or times["num_ranks"].n_unique() >= 4
    assert all(v.settlement for v in judged if v.verdict == "open"), "an open claim says what would settle it"
    found = {v.claim.id.split(".")[1]: shown_value(v.finding.found) for v in judged}
    assert found["host_growth_share_percent"] == "89.44"
    assert found["ring_hop_ms"] == "0.1742"


def test_what_was_open_for_want_of_data_says_so(evidence):
    notes = {v.claim.id.split(".")[1]: v.finding.note for v in experiment.CHECKS.judge(evidence)}
    assert "1.47 ms apart" in notes["host_growth_share_percent"]


def test_charts(evidence):
    ladder = check_chart(charts.fixes_before_after(evidence.points, subtitle="printed"), name="fixes_before_after")
    assert [len(r["hconcat"]) for r in ladder["vconcat"]] == [2, 2, 3, 1], "one small chart per metric"
    split = check_chart(
        charts.sync_waited_for_and_hidden(evidence.sync_split, subtitle="x"), name="sync_waited_for_and_hidden"
    )
    assert "6.35 ms" in split["title"]["text"]
    steps = check_chart(charts.step_by_sync(evidence.step_by_sync, evidence.points, subtitle="x"), name="step_by_sync")
    assert "does not start at 0" in str(steps)
    check_chart(charts.sync_by_ranks(evidence.sync_growth, subtitle="x"), name="sync_by_ranks")
    check_chart(charts.burst_trade(evidence.burst_trade, published_cap=4, subtitle="x"), name="burst_trade")
    load = check_chart(
        charts.step_and_delay_by_cap(evidence.sweep, published_cap=4, subtitle="x"), name="step_and_delay_by_cap"
    )
    case = {"arrivals": "partly in bursts", "admission_cost": "before"}
    uncapped, capped = (row(evidence.sweep, **case, cap=cap)["step_max_ms"] for cap in ("none", "4"))
    assert load["title"]["text"] == (
        "With arrivals partly in bursts, a cap of 4 (dotted) takes the longest step from "
        f"{uncapped:,.0f} to {capped:,.0f} ms, before the admission fixes"
    )


def test_the_title_of_the_caps_names_the_arrivals_that_it_speaks_of(evidence):
    calm = evidence.sweep.filter(pl.col("arrivals") == "one by one").with_columns(arrivals=pl.lit("as in the trace"))
    last = pl.concat([evidence.sweep, calm])
    for frame, kind in ((last, "partly in bursts"), (calm, "as in the trace")):
        spec = charts.step_and_delay_by_cap(frame, published_cap=4, subtitle="x").to_dict()
        assert spec["title"]["text"].startswith(
            f"With arrivals {kind}, a cap of 4 (dotted) takes the longest step from "
        )


def test_the_given_cost_is_drawn_in_its_own_colour():
    evidence = experiment.collect(experiment.Params(**SHORT, ns_per_token=20.0))
    spec = charts.step_and_delay_by_cap(evidence.sweep, published_cap=4, subtitle="x").to_dict()
    assert "'given'" in str(spec)
    assert evidence.sweep["admission_cost"].unique(maintain_order=True).to_list() == ["before", "after", "given"]


@pytest.mark.parametrize(
    ("draw", "column"),
    [
        (lambda e: charts.fixes_before_after(e.points.drop("step_ms"), subtitle=""), "step_ms"),
        (lambda e: charts.sync_waited_for_and_hidden(e.sync_split.drop("sync_part"), subtitle=""), "sync_part"),
        (lambda e: charts.sync_by_ranks(e.sync_growth.drop("growth_law"), subtitle=""), "growth_law"),
        (lambda e: charts.burst_trade(e.burst_trade.drop("cap"), published_cap=4, subtitle=""), "cap"),
        (
            lambda e: charts.step_and_delay_by_cap(e.sweep.drop("delay_p50_ms"), published_cap=4, subtitle=""),
            "delay_p50_ms",
        ),
    ],
)
def test_charts_refuse_a_frame_without_their_columns(evidence, draw, column):
    with pytest.raises(DataError, match=f"column '{column}' is missing, got columns"):
        draw(evidence)
