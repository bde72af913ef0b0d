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


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="column 'step_ms' is missing, got columns: .*context_tokens"):
        step_time.step_time_by_context(evidence.points.drop("step_ms"), evidence.curve, subtitle="")
