"""Experiment 03: the form a + b/EP, what it predicts, the roofline, the cross-checks, charts."""

import math

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook import catalog
from rackbook.charts import wide_ep_scaling as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import wide_ep_scaling as experiment
from rackbook.models.ep_scaling import fit_ep_scaling, popularity_read_in
from rackbook.models.memory import mxfp4_bytes, routed_entries, routed_gb, weights_gib_per_gpu
from rackbook.models.speculation import experts_touched
from rackbook.tables import COLUMNS


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def by(frame, key):
    return {row[key]: row for row in frame.to_dicts()}


# the form


def test_the_fit_by_hand():
    # 2 ms that stay and 8 ms that are shared: 10 at one GPU, 4 at four
    scaling = fit_ep_scaling([1, 4], [10.0, 4.0], rest_ms=6.0)
    assert scaling.constant_ms == pytest.approx(2.0)
    assert scaling.shared_ms == pytest.approx(8.0)
    assert scaling.step_ms([2, 8]).tolist() == pytest.approx([12.0, 9.0])
    assert scaling.gain(1, 2) == pytest.approx(16 / 12 - 1)
    assert scaling.greatest_ratio(1) == pytest.approx(16 / 8)


def test_the_gain_of_a_jump_is_that_of_its_doublings_in_a_row():
    # 18, 12 and 9 ms: half as fast again, then a third faster; √2 in the mean
    scaling = fit_ep_scaling([1, 2], [18.0 - 6.0, 12.0 - 6.0], rest_ms=6.0)
    assert scaling.gain_per_doubling(1, 4) == pytest.approx(2**0.5 - 1)
    assert scaling.gain_per_doubling(1, 2) == pytest.approx(scaling.gain(1, 2))


def test_the_published_fit(evidence):
    assert evidence.scaling.constant_ms == pytest.approx(4.942857, abs=1e-6)
    assert evidence.scaling.shared_ms == pytest.approx(33.828571, abs=1e-6)
    assert evidence.scaling.moe.degrees_of_freedom == 0, "two points leave no error bar"


def test_rounding_moves_the_time_by_the_interpolation_weights(evidence):
    # between the points the weights sum to one; at 1/EP = 0 they are -1/7 and 8/7
    assert evidence.scaling.rounding_ms(8, 0.05) == pytest.approx(0.05)
    assert evidence.scaling.rounding_ms(math.inf, 0.05) == pytest.approx(0.05 * 9 / 7)
    assert evidence.scaling.shared_rounding_ms(0.05) == pytest.approx(0.1 / (1 / 4 - 1 / 32))


def test_rounding_needs_two_points():
    three = fit_ep_scaling([1, 2, 4], [10.0, 6.0, 4.0], rest_ms=1.0)
    with pytest.raises(ParameterError, match="got 3 fitted times, allowed: 2"):
        three.rounding_ms(2, 0.05)


@given(st.floats(0.1, 50), st.floats(0.1, 200), st.floats(0.1, 50), st.floats(0.01, 0.95))
def test_a_doubling_to_the_size_of_a_gain_gains_that(constant, shared, rest, gain):
    scaling = fit_ep_scaling([1, 2], [constant + shared, constant + shared / 2], rest)
    size = scaling.size_of_gain(gain)
    assert scaling.gain(size / 2, size) == pytest.approx(gain, rel=1e-6)
    assert scaling.gain(size, 2 * size) < gain


def test_an_impossible_gain_is_refused(evidence):
    with pytest.raises(ParameterError, match="got 1, allowed: between 0 and 1"):
        evidence.scaling.size_of_gain(1.0)


# sizes and doublings


def test_throughput_per_gpu_by_hand(evidence):
    sizes = by(evidence.sizes, "ep_size")
    assert sizes[32]["throughput_per_gpu_ratio"] == pytest.approx(23.4 / 16.0)
    assert sizes[4]["output_tok_per_s_per_gpu"] == pytest.approx(64 * 3.51 / 0.0234)
    assert sizes[32]["step_share_percent"] == pytest.approx(37.5)


def test_only_what_is_printed_is_not_modelled(evidence):
    assert {s: r["origin"] for s, r in by(evidence.sizes, "ep_size").items()} == {
        4: "derived", 8: "modelled", 16: "modelled", 32: "derived", 64: "modelled",
    }  # fmt: skip
    other = experiment.collect(experiment.Params(rest_ms=9.0))
    assert other.sizes["origin"].unique().to_list() == ["modelled"], "a step with another rest is not the source's"
    moe = evidence.steps.filter((pl.col("component") == "target MoE") & (pl.col("origin") == "published"))
    assert sorted(moe.select("ep_size", "step_ms").iter_rows()) == [(4, 13.4), (32, 6.0)]


def test_gains_shrink_and_the_threshold_marks_them(evidence):
    gains = evidence.doublings["gain_per_doubling_percent"].to_list()
    assert gains == pytest.approx([22.057, 12.395, 6.607, 3.416], abs=1e-3)
    assert evidence.doublings["below_threshold"].to_list() == [False, False, True, True]
    # b/16 - b/32
    assert evidence.doublings["gpu_saving_ms"][2] == pytest.approx(33.828571 / 32, abs=1e-6)


def test_a_jump_is_converted_to_doublings():
    evidence = experiment.collect(experiment.Params(ep_sizes=[4, 32]))
    (row,) = evidence.doublings.to_dicts()
    assert row["gain_percent"] == pytest.approx(46.25)
    assert 1 + row["gain_per_doubling_percent"] / 100 == pytest.approx(1.4625 ** (1 / 3))


# the roofline


def test_the_implied_bandwidth_by_hand(evidence):
    rows = by(evidence.bandwidth, "quantity")
    implied = rows["bandwidth that b implies, with scales"]
    assert implied["value"] == pytest.approx(543.2e9 / 2 * 17 / 16 / 33.828571e-3 / 1e12, rel=1e-6)
    assert implied["low"] > rows["bandwidth of the memory"]["value"], "the rounding does not explain it"
    without = rows["bandwidth that b implies, without scales"]
    assert without["low"] < 8 < without["high"], "without scales the rounding does"


def test_floor_and_what_is_left_besides(evidence):
    rows = by(evidence.roofline, "ep_size")
    assert rows[4]["hbm_floor_ms"] == pytest.approx(288.575 / (4 * 8))
    assert rows[4]["beside_read_ms"] == pytest.approx(13.4 - 288.575 / 32)
    assert rows[32]["beside_read_ms"] > rows[4]["beside_read_ms"], "b is shorter than the reading"
    assert {row["origin"] for row in rows.values()} == {"modelled"}, "the floor is, also beside a printed time"
    assert rows[32]["hbm_use_percent"] == pytest.approx(100 * 288.575 / 256 / 6.0)


def test_bandwidth_comes_from_the_hardware_or_the_parameter(evidence):
    slow = experiment.collect(experiment.Params(hardware="h200"))
    ratio = slow.roofline["hbm_floor_ms"] / evidence.roofline["hbm_floor_ms"]
    assert ratio.to_list() == pytest.approx([8 / 4.8] * 5)
    given_ = experiment.collect(experiment.Params(bandwidth_tb_per_s=4.8))
    assert given_.roofline["hbm_floor_ms"].to_list() == pytest.approx(slow.roofline["hbm_floor_ms"].to_list())
    formula = by(given_.bandwidth, "quantity")["bandwidth of the memory"]["formula"]
    assert formula == "as given, instead of the 8 TB/s of GB300"
    assert given_.memory.filter(pl.col("reading").str.starts_with("b read at 4.8 TB/s")).height == 2


def test_unknown_hardware_is_named():
    with pytest.raises(ValidationError, match="got 'gb30'.*Did you mean"):
        experiment.Params(hardware="gb30")


def test_few_requests_do_not_read_every_expert():
    evidence = experiment.collect(experiment.Params(requests_per_gpu=1))
    row = by(evidence.coverage_at, "ep_size")[4]
    assert row["checked_tokens"] == 24
    assert row["experts_touched_percent"] == pytest.approx(100 * (1 - (378 / 384) ** 24))
    assert by(evidence.roofline, "ep_size")[4]["experts_touched_percent"] == pytest.approx(100), (
        "the roofline stays at the load at which the times are printed"
    )


def test_drafts_are_counted_in_the_experts_read():
    one = experiment.collect(experiment.Params(requests_per_gpu=1, draft_tokens=0, acceptance_length=1.0))
    assert by(one.coverage_at, "ep_size")[4]["checked_tokens"] == 4


@given(st.floats(0.01, 0.99), st.integers(1, 100_000))
def test_popularity_gives_back_the_share_of_steps(share, tokens):
    assert 1 - (1 - popularity_read_in(share, tokens)) ** tokens == pytest.approx(share, rel=1e-6)


def test_popularity_refuses_certainty():
    with pytest.raises(ParameterError, match="got a share of 1 and 5 tokens"):
        popularity_read_in(1.0, 5)


# memory and cross-checks


def test_bytes_of_mxfp4():
    assert mxfp4_bytes(64) == 34
    assert mxfp4_bytes(64, scales=False) == 32


def test_the_draft_is_not_among_the_routed_experts():
    checkpoint = catalog.model("deepseek-v4.1-flash").checkpoint
    assert routed_entries(checkpoint) == 543_200_000_000
    assert routed_gb(checkpoint) == pytest.approx(288.575)
    assert routed_gb(checkpoint, scales=False) == pytest.approx(271.6)


def test_share_of_experts_by_hand():
    # two tokens that pick 1 of 2: both experts with probability ½
    assert experts_touched(2, 1, 2) == pytest.approx(0.75)


def test_weights_by_part():
    checkpoint = catalog.model("deepseek-v4.1-flash").checkpoint
    parts = weights_gib_per_gpu(checkpoint, 8)
    assert parts["experts"] == pytest.approx(259.5 / 8)
    assert sum(parts.values()) == pytest.approx(45.975)
    without = weights_gib_per_gpu(checkpoint, 8, engram_scales=False)
    assert sum(without.values()) == pytest.approx(259.5 * 17 / 16 / 8 + 10.8)
    with pytest.raises(ParameterError, match="num_gpus: got 0"):
        weights_gib_per_gpu(checkpoint, 0)


def test_more_experts_than_all_weights_leave_no_rest():
    memory = experiment.collect(experiment.Params(bandwidth_tb_per_s=20.0)).memory
    (row,) = memory.filter(pl.col("reading").str.starts_with("b read at 20 TB/s, more than all")).to_dicts()
    assert row["weight_part"] == "experts"
    assert row["gib_per_gpu"] == pytest.approx(33.828571e-3 * 20e12 / 8 / 2**30)
    assert (memory["gib_per_gpu"] > 0).all()


def test_memory_sums(evidence):
    sums = dict(evidence.memory.group_by("reading").agg(pl.col("gib_per_gpu").sum()).iter_rows())
    assert sums["printed"] == 46
    assert sums["parts of the checkpoint"] == pytest.approx(45.975)


def test_cross_checks_by_hand(evidence):
    rows = by(evidence.cross_checks, "quantity")
    saved = rows["GPU time saved, DEP16 to DEP32"]
    assert (saved["value"], saved["found"]) == (1.1, pytest.approx(33.828571 / 32, abs=1e-6))
    # 62 % of a step with 13.4 ms of MoE leaves 8.21 of the 10 ms inside it
    dep4 = rows["MoE share of the target's step, if it is DEP4's"]
    assert dep4["found"] == pytest.approx(100 * 13.4 / 23.4)
    assert "only if 1.8 of the 10 ms" in dep4["reading"]


# parameters, frames, verdicts, charts


@pytest.mark.parametrize(
    ("changed", "frames"),
    [
        ({"ep_sizes": [4, 8]}, {"curve", "steps", "sizes", "ratio_curve", "doublings", "roofline", "coverage"}),
        ({"rest_ms": 5.0}, {"curve", "sizes", "doublings", "ratio_curve"}),
        ({"acceptance_length": 2.0}, {"sizes"}),
        ({"gain_threshold_percent": 20.0}, {"doublings"}),
        ({"hardware": "h200"}, {"bandwidth", "roofline", "memory"}),
        ({"bandwidth_tb_per_s": 7.0}, {"bandwidth", "roofline", "memory"}),
        ({"requests_per_gpu": 2}, {"coverage_at"}),
        ({"draft_tokens": 4}, {"coverage", "coverage_at"}),
    ],
)
def test_every_parameter_changes_what_it_says(evidence, changed, frames):
    other = experiment.collect(experiment.Params(**changed))
    for name in frames:
        # a formula that names the parameter is no effect
        before, after = (getattr(e, name).drop("formula", strict=False) for e in (evidence, other))
        assert not after.equals(before), name
    assert other.points.equals(evidence.points)
    assert other.cross_checks.equals(evidence.cross_checks)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"ep_sizes": [8, 4]}, "in ascending order"),
        ({"ep_sizes": [4]}, "at least 2 items"),
        ({"ep_sizes": [0, 4]}, "whole numbers ≥ 1"),
        ({"acceptance_length": 6.5}, "got 6.5, allowed: at most 6"),
        ({"gain_threshold_percent": 100.0}, "less than 100"),
        ({"bandwidth_tb_per_s": 0.0}, "greater than 0"),
        ({"rest": 1.0}, "Extra inputs"),
    ],
)
def test_bad_parameters_are_refused(bad, words):
    with pytest.raises(ValidationError, match=words):
        experiment.Params(**bad)


def test_frames_use_the_vocabulary(evidence):
    for name, frame in vars(evidence).items():
        if isinstance(frame, pl.DataFrame):
            assert set(frame.columns) <= set(COLUMNS), name
            assert {"origin", "source"} <= set(frame.columns), name


def test_verdicts_do_not_depend_on_the_parameters(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    assert {name for name, v in verdicts.items() if v.verdict == "open"} == {
        "moe_dep4_ms", "moe_dep32_ms", "rest_ms", "gain_diminishes", "draft_comm_offsets_gain", "hbm_tb_per_s",
        "h200_hbm_tb_per_s",
    }  # fmt: skip
    assert not [v for v in verdicts.values() if v.claim.kind == "printed" and v.finding.basis == "modelled"]
    assert verdicts["fit_dep8_ms"].finding.basis == "modelled"
    assert verdicts["bandwidth_above_hbm"].finding.found is True
    assert verdicts["replicated_gib_per_gpu_dep8"].finding.note.endswith("the checkpoint's parts leave 10.8 GiB")
    assert verdicts["expert_checkpoint_gib"].finding.note == "557.2 billion entries at 4 bit"
    assert verdicts["expert_entries_billion"].finding.found == pytest.approx(259.5 * 2**30 * 2 / 1e9)
    other = experiment.collect(experiment.Params(rest_ms=3.0, hardware="h200", ep_sizes=[2, 4]))
    assert experiment.CHECKS.judge(other).records() == experiment.CHECKS.judge(evidence).records()


def test_step_and_throughput_charts(evidence):
    spec = check_chart(
        charts.step_time_by_ep_size(evidence.curve, evidence.steps, subtitle="GB300"), name="step_time_by_ep_size"
    )
    assert "DEP4 to DEP32" in spec["title"]["text"]
    assert "from 23.4 to 16.0 ms" in spec["title"]["text"]
    spec = check_chart(
        charts.throughput_by_ep_size(evidence.ratio_curve, evidence.sizes, 1.566, subtitle="GB300"),
        name="throughput_by_ep_size",
    )
    assert "DEP32 gives 1.46 times" in spec["title"]["text"]


def test_gain_chart_names_the_first_below(evidence):
    def title(threshold):
        frame = experiment.collect(experiment.Params(gain_threshold_percent=threshold)).doublings
        chart = charts.gain_per_doubling(frame, threshold, subtitle="GB300")
        return check_chart(chart, name="gain_per_doubling")["title"]["text"]

    assert title(10.0).startswith("DEP16 to DEP32 is the first to gain less than 10 %")
    assert title(1.0) == "No doubling gains less than 1 % per GPU"


def test_roofline_chart_says_which_way(evidence):
    spec = check_chart(charts.moe_time_over_reading(evidence.roofline, subtitle="GB300"), name="moe_time_over_reading")
    assert "grows from 4.38 ms at DEP4 to 4.87 ms at DEP32" in spec["title"]["text"]
    points = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "point")
    drawn = spec["datasets"][points["data"]["name"]]
    assert [row["origin"] for row in drawn] == ["published", "modelled", "modelled", "published", "modelled"]
    fast = experiment.collect(experiment.Params(bandwidth_tb_per_s=9.0)).roofline
    assert "shrinks from" in charts.moe_time_over_reading(fast, subtitle="").to_dict()["title"]["text"]


@pytest.mark.parametrize(
    ("sizes", "finding"),
    [
        ([4, 8, 16, 32], "The memory floor is above the printed MoE time at DEP4"),
        ([2, 8], "The memory floor is above the modelled MoE time at DEP2"),
    ],
)
def test_roofline_chart_says_where_the_floor_is_above(sizes, finding):
    roofline = experiment.collect(experiment.Params(hardware="h200", ep_sizes=sizes)).roofline
    spec = check_chart(charts.moe_time_over_reading(roofline, subtitle="H200"), name="moe_time_over_reading")
    assert spec["title"]["text"] == finding
    words = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "text")
    drawn = spec["datasets"][words["data"]["name"]]
    assert [row["top"] for row in drawn] == [max(row["moe_ms"], row["hbm_floor_ms"]) for row in drawn]


def test_coverage_and_memory_charts(evidence):
    spec = check_chart(
        charts.experts_read_by_load(evidence.coverage, evidence.coverage_at, subtitle="uniform"),
        name="experts_read_by_load",
    )
    assert "reads every expert" in spec["title"]["text"]
    few = experiment.collect(experiment.Params(requests_per_gpu=1)).coverage_at
    assert "31.5 % of" in charts.experts_read_by_load(evidence.coverage, few, subtitle="").to_dict()["title"]["text"]
    spec = check_chart(charts.weights_per_gpu(evidence.memory, subtitle="EP8"), name="weights_per_gpu")
    assert "45.98 GiB" in spec["title"]["text"]


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="column 'hbm_floor_ms' is missing"):
        charts.moe_time_over_reading(evidence.roofline.drop("hbm_floor_ms"), subtitle="")
