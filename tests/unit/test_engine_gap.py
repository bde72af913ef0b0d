"""Experiment 08: the published hint, and the account of measured pairs."""

import polars as pl
import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import engine_gap as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import engine_gap as experiment
from rackbook.tables import COLUMNS

PAIRS = "setting,forward_ms,engine_ms,cpu_ms\nDEP4,8,13,11\nDEP8,10,12.5,\n"


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def written(folder, text):
    path = folder / "pairs.csv"
    path.write_text(text)
    return path


def with_pairs(folder, text=PAIRS):
    return experiment.collect(experiment.Params(pairs_path=str(written(folder, text))))


def test_every_shown_column_is_in_the_vocabulary(evidence):
    frames = [value for value in vars(evidence).values() if isinstance(value, pl.DataFrame)]
    assert len(frames) == 9
    for frame in frames:
        assert set(frame.columns) <= set(COLUMNS)
        assert {"origin", "source"} <= set(frame.columns)


def parts(evidence):
    return {(r["ep_size"], r["step_part"]): (round(r["part_ms"], 9), r["bound"]) for r in evidence.parts.to_dicts()}


def test_without_a_gpu_time_the_parts_are_bounds(evidence):
    assert parts(evidence) == {
        (16, "GPU"): (13.84, "at most"),
        (16, "gap"): (0.0, "at least"),
        (32, "GPU"): (12.74, "at most"),
        (32, "gap"): (4.83, "at least"),
    }


def test_a_known_gpu_time_makes_them_exact_and_keeps_the_growth():
    known = experiment.collect(experiment.Params(baseline_gpu_ms=10.0))
    assert parts(known) == {
        (16, "GPU"): (10.0, "exactly"),
        (16, "gap"): (3.84, "exactly"),
        (32, "GPU"): (8.9, "exactly"),
        (32, "gap"): (8.67, "exactly"),
    }
    assert known.parts["source"].unique().to_list() == ["S1 and baseline_gpu_ms"]


@pytest.mark.parametrize("value", [1.0, 13.9])
def test_a_gpu_time_that_contradicts_the_steps_is_refused(value):
    with pytest.raises(ParameterError, match=f"baseline_gpu_ms: got {value:g}, allowed: 1.10 to 13.84 ms"):
        experiment.collect(experiment.Params(baseline_gpu_ms=value))


def test_growth_by_regime(evidence):
    got = {(r["baseline_bound_by"], r["bound_by"]): (r["low"], r["high"]) for r in evidence.regimes.to_dicts()}
    assert got[("GPU", "GPU")] == pytest.approx((4.83, 4.83))
    assert got[("host", "host")] == pytest.approx((3.73, 3.73))
    assert got[("GPU", "host")] == pytest.approx((3.73, 17.57))
    assert got[("host", "GPU")] == pytest.approx((4.83, 17.57))


def test_candidates_by_hand(evidence):
    got = evidence.candidates["growth_ms"].to_list()
    assert got == pytest.approx([4.83, 5.4, 10.8 * 32 / 62, 5.4 * 2.95 / 9.3, 0.3])
    assert evidence.candidates["origin"].to_list() == ["derived"] + ["modelled"] * 4


def test_the_account_of_the_users_pairs(tmp_path):
    four, eight = with_pairs(tmp_path).gaps.to_dicts()
    assert (four["gap_ms"], four["gap_share_percent"]) == pytest.approx((5, 100 * 5 / 13))
    assert (four["hidden_cpu_low_ms"], four["hidden_cpu_high_ms"], four["not_cpu_ms"]) == (6, 6, 0)
    assert (eight["gap_ms"], eight["hidden_cpu_low_ms"], eight["hidden_cpu_high_ms"]) == (2.5, 0, 10)
    assert (eight["total_cpu_low_ms"], eight["total_cpu_high_ms"]) == (2.5, 12.5)
    assert eight["not_cpu_ms"] is None
    assert eight["missing_reason"] == "host work not measured"
    assert (four["origin"], four["source"]) == ("derived", "pairs.csv")


def test_pairs_are_measured_points_in_file_order_with_their_row(tmp_path):
    text = "\ufeffmodel, engine_ms ,setting,forward_ms,hardware\nM,13,b,8,\n\n,12.5,a,10,H200\n"
    pairs = with_pairs(tmp_path, text).pairs
    assert pairs.select("setting", "hardware", "model", "engine_ms", "locator", "origin").rows() == [
        ("b", None, "M", 13.0, "row 2", "measured"),
        ("a", "H200", None, 12.5, "row 4", "measured"),
    ]


def test_a_negative_gap_is_kept_without_bounds(tmp_path):
    (gap,) = with_pairs(tmp_path, "setting,forward_ms,engine_ms\nx,8,7\n").gaps.to_dicts()
    assert gap["gap_ms"] == -1
    assert gap["hidden_cpu_high_ms"] is None
    assert "not of one batch" in gap["missing_reason"]


HEAD = "setting,forward_ms,engine_ms,cpu_ms\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("setting,forward,engine_ms\nx,1,2\n", "row 1: unknown column: got 'forward', .*Did you mean 'forward_ms'"),
        ("setting,engine_ms\nx,2\n", "row 1: columns forward_ms are missing, got setting, engine_ms"),
        ("setting,setting,forward_ms,engine_ms\nx,x,1,2\n", "row 1: column 'setting' stands twice"),
        ("", "row 1: columns setting, forward_ms, engine_ms are missing, got \\(none\\)"),
        (HEAD, "a header but no rows"),
        (HEAD + "x,1,2\n", "row 2: got 3 cells, expected 4"),
        (HEAD + "x,1,2,\nx,1,3,\n", "row 3, column setting: got 'x' again, it stands in row 2 already"),
        (HEAD + ",1,2,\n", "row 2, column setting: got nothing"),
        (HEAD + 'x,"8,86",13,\n', "row 2, column forward_ms: got '8,86', allowed: a number > 0"),
        (HEAD + "x,8,,\n", "row 2, column engine_ms: got ''"),
        (HEAD + "x,8,NaN,\n", "row 2, column engine_ms: got 'NaN'"),
        (HEAD + "x,8,1_3,\n", "row 2, column engine_ms: got '1_3'"),
        (HEAD + "x,0,13,\n", "row 2, column forward_ms: got '0', allowed: a number > 0"),
        (HEAD + "x,8,13,\ny,8,13,none\n", "row 3, column cpu_ms: got 'none', allowed: .* or nothing"),
        (HEAD + "x,8,13,14\n", "row 2, column cpu_ms: got 14, allowed: 0 to engine_ms = 13"),
    ],
)
def test_bad_files_are_refused_with_row_and_column(tmp_path, text, words):
    with pytest.raises(DataError, match=f"pairs.csv.*{words}"):
        experiment.read_pairs(written(tmp_path, text))


def test_an_absent_file_and_another_encoding_are_named(tmp_path):
    with pytest.raises(
        DataError, match="none.csv: no such file; pairs_path names a CSV with columns setting, forward_ms"
    ):
        experiment.read_pairs(tmp_path / "none.csv")
    path = tmp_path / "latin.csv"
    path.write_bytes(HEAD.encode() + b"\xe9,8,13,\n")
    with pytest.raises(DataError, match="latin.csv: not UTF-8 text"):
        experiment.read_pairs(path)


@pytest.mark.parametrize("bad", [{"baseline_gpu_ms": 0}, {"pairs": "x.csv"}])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        experiment.Params(**bad)


@pytest.mark.parametrize("gpu", [None, 9.0])
def test_verdicts_do_not_depend_on_the_parameters(gpu):
    judged = experiment.CHECKS.judge(experiment.collect(experiment.Params(baseline_gpu_ms=gpu)))
    assert {v.claim.id.split(".")[1]: v.verdict for v in judged} == {
        "gpu_saving_ms": "open",
        "step_dep32_ms": "open",
        "step_dep16_ms": "open",
        "dep32_slower": "consistent",
        "step_growth_ms": "consistent",
        "host_growth_ms": "consistent",
    }


def test_charts(evidence, tmp_path):
    spec = check_chart(charts.step_parts(evidence.parts, subtitle="x"), name="step_parts")
    assert spec["title"]["text"] == "At DEP32, at least 4.83 ms of the step are not GPU time"
    known = experiment.collect(experiment.Params(baseline_gpu_ms=10.0))
    spec = check_chart(charts.step_parts(known.parts, subtitle="x"), name="step_parts")
    assert spec["title"]["text"] == "At DEP32, 8.67 ms of the step are not GPU time"
    spec = check_chart(charts.gap_growth_candidates(evidence.candidates, subtitle="x"), name="gap_growth_candidates")
    assert "4.83 ms" in spec["title"]["text"]
    spec = check_chart(charts.gap_by_setting(with_pairs(tmp_path).gaps, subtitle="x"), name="gap_by_setting")
    assert spec["title"]["text"].startswith("The engine adds 5.00 ms at DEP4, 38 %")


def test_charts_refuse_a_frame_without_their_columns(evidence):
    with pytest.raises(DataError, match="step_parts: column 'bound' is missing"):
        charts.step_parts(evidence.parts.drop("bound"), subtitle="")
    with pytest.raises(DataError, match="gap_by_setting: column 'gap_ms' is missing"):
        charts.gap_by_setting(evidence.gaps.drop("gap_ms"), subtitle="")
