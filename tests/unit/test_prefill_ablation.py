"""Experiment 04: how gains combine, what the total leaves, time per token, switches, charts."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import prefill_ablation as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import prefill_ablation as experiment
from rackbook.models.gains import COMPOSITIONS, combined, from_time_cut, remaining

K = 1024
GAINS = st.lists(st.floats(0.1, 200), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def composed(evidence, gains_of, composition):
    return evidence.compositions.filter((pl.col("gains_of") == gains_of) & (pl.col("composition") == composition)).row(
        0, named=True
    )


def test_combining_by_hand():
    assert combined([50, 20], "multiplied") == pytest.approx(80)
    assert combined([50, 20], "added") == 70
    assert from_time_cut(50) == pytest.approx(100)
    assert remaining(80, 50, "multiplied") == pytest.approx(20)


@given(GAINS, st.sampled_from(COMPOSITIONS))
def test_what_remains_undoes_the_combination_and_the_order_does_not_matter(gains, composition):
    total = combined(gains, composition)
    assert combined(gains[::-1], composition) == pytest.approx(total)
    if len(gains) > 1:
        assert remaining(total, gains[0], composition) == pytest.approx(combined(gains[1:], composition))
    assert combined(gains, "multiplied") >= combined(gains, "added") - 1e-9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: combined([1], "averaged"), "composition: got 'averaged', allowed: multiplied, added"),
        (lambda: combined([], "added"), "at least one"),
        (lambda: combined([-100], "added"), "each > -100"),
        (lambda: from_time_cut(100), "got 100, allowed: < 100"),
    ],
)
def test_gains_that_make_no_sense_are_refused(call, words):
    with pytest.raises(ParameterError, match=words):
        call()


def test_the_gain_of_all_from_the_two_throughputs(evidence):
    (row,) = evidence.total_points.to_dicts()
    assert row["gain_percent"] == pytest.approx(100 * (102.5 / 71.2 - 1))
    assert row["min_gain_percent"] == pytest.approx(100 * (102.45 / 71.25 - 1))
    assert row["min_gain_percent"] < 43.9 < row["max_gain_percent"], "the printed 43.9 is within the rounding"


def test_a_total_is_known_only_where_throughputs_are_printed(evidence):
    totals = {row["new_tokens"]: row for row in evidence.totals_by_size.to_dicts()}
    assert [totals[n * K]["origin"] for n in (4, 32, 64)] == ["published", "published", "derived"]
    assert (totals[4 * K]["min_total_gain_percent"], totals[4 * K]["max_total_gain_percent"]) == (35.6, 43.9)


def test_combined_gains_meet_the_total_at_32k_only_and_in_both_ways(evidence):
    product = composed(evidence, "32K new tokens", "multiplied")
    assert product["gain_percent"] == pytest.approx(100 * (1.199 * 1.028 * 1.156 - 1))
    assert product["min_residual_points"] == pytest.approx(35.6 - product["gain_percent"])
    assert product["min_gain_percent"] == pytest.approx(100 * (1.1985 * 1.0275 * 1.1555 - 1))
    assert composed(evidence, "32K new tokens", "added")["gain_percent"] == pytest.approx(38.3)
    met = evidence.compositions.filter("inside_total")["gains_of"].to_list()
    assert met == ["32K new tokens", "32K new tokens"]
    above, below = (composed(evidence, "64K new tokens", way) for way in COMPOSITIONS)
    assert below["min_residual_points"] > 0 > above["max_residual_points"], "the total lies between sum and product"


def test_a_larger_error_of_the_single_gains_changes_what_meets_the_total():
    loose = experiment.collect(experiment.Params(gain_error_percent=1.0))
    assert composed(loose, "64K new tokens", "multiplied")["inside_total"]
    assert not composed(loose, "4K new tokens", "multiplied")["inside_total"]


def test_what_the_total_leaves_for_the_two_others(evidence):
    multiplied = evidence.others.filter(pl.col("composition") == "multiplied")
    at = {row["new_tokens"]: row for row in multiplied.to_dicts()}
    assert at[4 * K]["min_other_gain_percent"] == pytest.approx(100 * (1.356 / 1.101 - 1))
    assert at[64 * K]["max_other_gain_percent"] == pytest.approx(100 * ((102.55 / 71.15) / 1.231 - 1))
    assert at[4 * K]["other_gain_percent"] == pytest.approx(100 * (1.028 * 1.156 - 1))
    assert at[4 * K]["min_other_gain_percent"] > at[64 * K]["max_other_gain_percent"]


def test_the_ladder_is_built_fix_by_fix_and_follows_new_tokens(evidence):
    assert evidence.ladder["multiplied_gain_percent"].to_list() == pytest.approx(
        [19.9, 100 * (1.199 * 1.028 - 1), 100 * (1.199 * 1.028 * 1.156 - 1)]
    )
    assert evidence.ladder["added_gain_percent"].to_list() == pytest.approx([19.9, 22.7, 38.3])
    small = experiment.collect(experiment.Params(new_tokens=4 * K))
    assert small.ladder["gain_percent"].to_list() == [10.1, 2.8, 15.6]
    with pytest.raises(ParameterError, match="new_tokens: got 8192, allowed: 4096, 32768, 65536, .*interpolated"):
        experiment.collect(experiment.Params(new_tokens=8 * K))


def test_the_parts_of_the_time_add_up_in_both_orders(evidence):
    for (_,), order in evidence.times.group_by("reading"):
        assert order["us_per_token"].sum() == pytest.approx(1e6 / 71200)
    saved = evidence.times.filter(pl.col("time_of") == "saved by SWA replay")["us_per_token"].to_list()
    assert saved == pytest.approx([1e6 / 71200 * (1 - 1 / 1.231), 1e6 / 102500 * 0.231])


def test_read_as_cuts_of_the_time_the_figures_fit_another_size(evidence):
    cuts = evidence.readings.filter(pl.col("reading") == "cuts of the time")
    assert cuts["gain_percent"][0] == pytest.approx(100 * (1 / (0.899 * 0.972 * 0.844) - 1))
    assert cuts["inside_total"].to_list() == [True, False, False]
    assert evidence.readings.filter(pl.col("reading") != "cuts of the time")["inside_total"].to_list() == [
        False,
        True,
        False,
    ]


def test_your_own_gains_are_combined_beside():
    own = experiment.collect(experiment.Params(own_gains_percent=[10, 20], own_total_gain_percent=32))
    assert composed(own, "your gains", "multiplied")["inside_total"]
    assert composed(own, "your gains", "added")["min_residual_points"] == pytest.approx(1.95)
    assert own.totals_by_size["origin"][-1] == "measured"
    without = experiment.collect(experiment.Params(own_gains_percent=[10, 20]))
    row = composed(without, "your gains", "multiplied")
    assert (row["inside_total"], row["min_residual_points"]) == (None, None)
    assert row["missing_reason"] == "no own_total_gain_percent to compare with"
    with pytest.raises(ParameterError, match="own_total_gain_percent: got 5 without own_gains_percent"):
        experiment.collect(experiment.Params(own_total_gain_percent=5))


def test_every_fix_has_its_switch_and_none_switches_it_alone(evidence):
    assert evidence.switches["pr"].to_list() == [59894, 62359, 62240]
    assert not evidence.switches["alone"].any()
    assert evidence.switches["switch_off"][0] == "--no-swa-bounded-replay"


def switches_file(folder, monkeypatch, change):
    text = (experiment.DATA / "prefill_switches.toml").read_text("utf-8")
    (folder / "prefill_switches.toml").write_text(change(text))
    monkeypatch.setattr(experiment, "DATA", folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("Engram host table", "Engram host tables"), "unknown fix: got 'Engram host tables on 2"),
        (lambda t: t[: t.rindex("[[switch]]")], "no entry for the fix 'DeepSelect top-k in the prefill indexer'"),
        (lambda t: t.replace("alone = false", "alone = 'no idea'", 1), "field switch.0.alone: got 'no idea'"),
        (lambda t: t.replace("vllm-wheel-code", "vllm-weel-code"), "unknown source: got 'vllm-weel-code'"),
    ],
)
def test_bad_switches_are_refused(tmp_path, monkeypatch, evidence, change, words):
    switches_file(tmp_path, monkeypatch, change)
    with pytest.raises(DataError, match=words):
        experiment.switches(evidence.points)


@pytest.mark.parametrize(
    "bad",
    [
        {"new_tokens": 0},
        {"gain_error_percent": -1},
        {"own_gains_percent": [-100.0]},
        {"own_gains_percent": [float("nan")]},
        {"own_total_gain_percent": float("inf")},
        {"gains": []},
    ],
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        experiment.Params(**bad)


def test_verdicts_do_not_depend_on_the_parameters(evidence):
    other = experiment.collect(
        experiment.Params(new_tokens=4 * K, gain_error_percent=5, own_gains_percent=[1], own_total_gain_percent=9)
    )
    assert experiment.CHECKS.judge(other).records() == experiment.CHECKS.judge(evidence).records()


LAYERS = {
    "replay_boundary_layer": 20, "kv_compressing_layers": 4, "model_layers": 40, "encoder_layers": 20,
    "decoder_layers": 20, "sliding_window_tokens": 128,
}  # fmt: skip


def test_verdicts(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    unsettled = {name for name, verdict in verdicts.items() if verdict.verdict == "open"}
    assert unsettled == {
        "swa_replay_4k_percent", "swa_replay_32k_percent", "swa_replay_64k_percent", "engram_pages_percent",
        "deepselect_percent", "total_low_percent", "before_64k", "after_64k", "index_compression", "indexer_latents",
        "indexer_blocks", "indexer_block_latents",
    }  # fmt: skip
    assert all(verdicts[name].settlement for name in unsettled), "an open claim says what would settle it"
    found = {name: verdicts[name].finding.found for name in LAYERS}
    assert found == LAYERS
    assert {v.verdict for name, v in verdicts.items() if name not in unsettled} == {"consistent"}
    assert verdicts["product_32k"].finding.found == pytest.approx(1.199 * 1.028 * 1.156)
    assert verdicts["full_index_layers"].finding.note.startswith(
        "layers below 20 that compress their own KV: [2, 8, 14]"
    )
    assert "38.3 %, lies inside as well" in verdicts["product_in_range"].finding.note


def test_charts(evidence):
    spec = check_chart(
        charts.gain_by_new_tokens(evidence.points, evidence.totals, evidence.total_points, subtitle="s"),
        name="gain_by_new_tokens",
    )
    assert "gains 10.1 to 23.1 %, all three 35.6 to 43.9 %" in spec["title"]["text"]
    drawn = [row for data in spec["datasets"].values() for row in data if "gain_percent" in row]
    assert sorted(row["gain_percent"] for row in drawn if row["new_tokens"] is None) == [2.8, 15.6]
    at_32k = evidence.totals_by_size.filter(pl.col("new_tokens") == 32 * K)
    spec = check_chart(
        charts.fixes_one_after_the_other(evidence.ladder, at_32k, subtitle="s"), name="fixes_one_after_the_other"
    )
    assert "42.5 %: inside the 35.6 to 43.9 %" in spec["title"]["text"]
    spec = check_chart(
        charts.combined_gains(evidence.compositions, evidence.totals_by_size, subtitle="s"), name="combined_gains"
    )
    assert spec["title"]["text"] == "Multiplied, the gains meet the total at: 32K; added, at: 32K"
    spec = check_chart(charts.gain_left_for_the_others(evidence.others, subtitle="s"), name="gain_left_for_the_others")
    assert "23.2 to 30.7 % at 4K new tokens, 16.8 to 17.1 % at 64K new tokens" in spec["title"]["text"]
    spec = check_chart(charts.time_per_token(evidence.times, subtitle="s"), name="time_per_token")
    assert spec["title"]["text"] == "Of 4.29 µs saved per token, 2.25 to 2.64 are saved by SWA replay"


def test_charts_with_your_own_gains():
    own = experiment.collect(experiment.Params(own_gains_percent=[10, 20], own_total_gain_percent=32))
    spec = check_chart(charts.combined_gains(own.compositions, own.totals_by_size, subtitle="s"), name="combined_gains")
    assert "at: 32K, your gains; added, at: 32K" in spec["title"]["text"]


def test_a_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="time_per_token: column 'time_of' is missing"):
        charts.time_per_token(evidence.times.drop("time_of"), subtitle="")
