"""Experiment 01: growth, fit, the user's steps, charts."""

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import step_time
from rackbook.errors import DataError
from rackbook.experiments import context_sweep as experiment
from rackbook.importers.engine_steps import FILE

HEADER = "ctx_tokens,decode_requests,decode_kv_tokens,latency_ms\n"


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def steps_file(folder, rows):
    path = folder / FILE
    path.write_text(HEADER + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def test_growth_of_every_pair(evidence):
    growth = {(r["from_context_tokens"] // 1024, r["to_context_tokens"] // 1024): r for r in evidence.growth.to_dicts()}
    assert set(growth) == {(64, 128), (64, 855), (128, 855)}
    assert growth[128, 855]["step_increase_ms"] == pytest.approx(0.60)
    assert growth[128, 855]["step_increase_percent"] == pytest.approx(100 * 0.60 / 8.93)
    assert growth[64, 855]["context_ratio"] == pytest.approx(855 / 64)


def test_line_goes_near_the_points_and_its_band_widens(evidence):
    assert np.abs(evidence.line.residuals).max() < 0.01
    width = evidence.curve["step_high_ms"] - evidence.curve["step_low_ms"]
    assert width[-1] > width.min() > 0


def test_parameters_change_the_result(evidence):
    far = experiment.Params(predict_at_tokens=4_194_304, confidence=0.5)
    other = experiment.collect(far)
    assert other.prediction["step_ms"][0] > evidence.prediction["step_ms"][0]
    assert (
        experiment.fit_summary(other, far)["high"][1] < experiment.fit_summary(evidence, experiment.Params())["high"][1]
    )


def test_byte_bound_by_hand(evidence):
    rows = experiment.fit_summary(evidence, experiment.Params())
    bound = rows.filter(pl.col("unit") == "B")["value"][0]
    # ms/token of 16 requests at 8 TB/s, i.e. 8e9 bytes per ms
    assert bound == pytest.approx(evidence.line.slope * 8e9 / 16)


def test_slope_of_the_users_steps(tmp_path):
    # 20 steps of batch 2 with 1 ms per 1,024 tokens of context, one of them stalled; too few of batch 3
    rows = [(0, 2, 2 * 1024 * i, 5.0 + i if i != 7 else 500.0) for i in range(1, 21)]
    rows += [(0, 3, 3000, 9.0)] * 4 + [(64, 2, 2000, 40.0)]
    params = experiment.Params(steps_path=str(steps_file(tmp_path, rows)), min_steps=10)
    evidence = experiment.collect(params)
    assert evidence.steps["num_decode_requests"].unique().to_list() == [2]
    assert evidence.steps.height == 20, "steps with prefill tokens are not decode steps"
    (slope,) = evidence.step_slopes.to_dicts()
    assert slope["slope_us_per_1k_tokens"] == pytest.approx(1000)
    assert slope["num_stalled"] == 1
    assert slope["slope_low_us_per_1k_tokens"] is slope["slope_high_us_per_1k_tokens"] is None
    assert slope["missing_reason"] == "no interval: 20 steps are fewer than 10 blocks of 50"


def slope_of(folder, contexts, times):
    rows = [(0, 1, context, time) for context, time in zip(contexts, times, strict=True)]
    params = experiment.Params(steps_path=str(steps_file(folder, rows)))
    (slope,) = experiment.collect(params).step_slopes.to_dicts()
    return slope


@pytest.mark.parametrize(
    ("contexts", "reason"),
    [
        ([3000] * 600, "the middle 90 % of the contexts spans 0 tokens, fewer than 1,024"),
        (range(8000, 8600), "spans 539 tokens, fewer than 1,024"),
        # the middle 90 % is what counts: 4 of 100 steps far away change nothing
        ([*range(8000, 8576), *range(100, 124)], "fewer than 1,024"),
        ([*range(2000, 2300), *range(8000, 8300)], "clustered, the quarters of 2,030 to 8,269 tokens hold 45.0%, 0.0%"),
        ([*range(4000, 4060), *range(16000, 16540)], "clustered"),
    ],
)
def test_contexts_that_carry_no_slope_have_none(tmp_path, contexts, reason):
    slope = slope_of(tmp_path, contexts, [5 + 1e-3 * (i % 7) for i in range(len(contexts))])
    assert slope["slope_us_per_1k_tokens"] is slope["slope_low_us_per_1k_tokens"] is None
    assert slope["missing_reason"].startswith("no slope: ")
    assert reason in slope["missing_reason"]


def test_the_interval_is_wider_where_neighbours_resemble_each_other(tmp_path):
    random = np.random.default_rng(3)
    contexts = [int(start) + step for start in random.uniform(2000, 6000, 20) for step in range(50)]
    noise = random.normal(size=1000)
    wandering = [noise[0]]
    for shock in noise[1:]:
        wandering.append(0.97 * wandering[-1] + (1 - 0.97**2) ** 0.5 * shock)
    widths = []
    for errors in (noise, wandering):
        slope = slope_of(
            tmp_path, contexts, [10 + 0.1 * c / 1024 + 0.2 * e for c, e in zip(contexts, errors, strict=True)]
        )
        assert slope["slope_low_us_per_1k_tokens"] < 100 < slope["slope_high_us_per_1k_tokens"], (
            "0.1 ms per 1,024 tokens"
        )
        assert slope["missing_reason"] is None
        widths.append(slope["slope_high_us_per_1k_tokens"] - slope["slope_low_us_per_1k_tokens"])
    assert widths[1] > 2 * widths[0]


def test_more_confidence_widens_the_interval(tmp_path):
    random = np.random.default_rng(4)
    rows = [(0, 1, 2000 + 10 * (i % 400), 5 + random.uniform()) for i in range(600)]
    path = str(steps_file(tmp_path, rows))
    low = {
        confidence: experiment.collect(experiment.Params(steps_path=path, confidence=confidence)).step_slopes[
            "slope_low_us_per_1k_tokens"
        ][0]
        for confidence in (0.5, 0.99)
    }
    assert low[0.99] < low[0.5]


@pytest.mark.parametrize(
    ("run", "batches"),
    [
        ("tp1_ep4_dp4_official_20260614_023637", {8, 9}),
        ("tp2_tp4_ep4_official_20260614_070344/tp2_ep4_past4096", {15, 16, 17}),
    ],
)
def test_real_recordings_have_few_slopes(realdata, run, batches):
    slopes = experiment.collect(experiment.Params(steps_path=str(realdata / "steptime" / run))).step_slopes
    found = slopes.drop_nulls("slope_us_per_1k_tokens")
    assert set(found["num_decode_requests"]) == batches
    assert slopes.filter(pl.col("slope_low_us_per_1k_tokens").is_null())["missing_reason"].null_count() == 0


def test_too_few_steps_say_what_to_change(tmp_path):
    params = experiment.Params(steps_path=str(steps_file(tmp_path, [(0, 2, 100, 5.0)] * 5)))
    with pytest.raises(DataError, match="no batch size has 100 decode-only steps .*lower min_steps"):
        experiment.collect(params)


@pytest.mark.parametrize("bad", [{"confidence": 1.0}, {"predict_at_tokens": 0}, {"min_steps": 2}, {"contexts": 3}])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        experiment.Params(**bad)


def test_verdicts(evidence):
    verdicts = {v.claim.id.split(".")[1]: v.verdict for v in experiment.CHECKS.judge(evidence)}
    assert verdicts["context_growth"] == "consistent"
    assert verdicts["context_growth_over_sweep"] == "inconsistent"
    assert verdicts["step_64k_ms"] == "open"


def test_a_ratio_of_contexts_is_explained_by_contexts(evidence):
    notes = {v.claim.id.split(".")[1]: v.finding.note for v in experiment.CHECKS.judge(evidence)}
    for name in ("context_growth", "context_growth_derived"):
        assert notes[name] == "855K ÷ 128K tokens of context"
        assert notes[name.replace("growth", "growth_over_sweep")] == "855K ÷ 64K tokens of context"
    assert notes["latency_growth_ms"] == "9.53 ms against 8.93 ms"


def test_charts(evidence, tmp_path):
    spec = check_chart(
        step_time.step_time_by_context(evidence.points, evidence.curve, subtitle="GB300"), name="step_time_by_context"
    )
    assert "0.67 ms" in spec["title"]["text"]
    rows = [(0, 4, 4 * 1000 * (1 + i % 3), 7.0 + 0.01 * i) for i in range(40)]
    steps = experiment.collect(experiment.Params(steps_path=str(steps_file(tmp_path, rows)), min_steps=3)).steps
    check_chart(step_time.engine_steps_by_context(steps, subtitle="lab"), name="engine_steps_by_context")


def test_one_measured_context_is_no_growth(evidence):
    titles = [
        check_chart(step_time.measured_step_by_context(rows, subtitle="lab"), name="measured_step_by_context")["title"]
        for rows in (evidence.measured, evidence.measured.sort("context_tokens").head(1))
    ]
    assert titles[0]["text"].startswith("From 1K to ")
    assert titles[1]["text"].startswith("At 1K tokens the measured step takes ")


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="column 'step_ms' is missing, got columns: .*context_tokens"):
        step_time.step_time_by_context(evidence.points.drop("step_ms"), evidence.curve, subtitle="")
