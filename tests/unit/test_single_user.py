"""Experiment 11: implied steps, the bytes of a step, the memory floor, charts."""

import math

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import single_user as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import single_user as experiment
from rackbook.models.memory import GIB, MXFP4_BLOCK
from rackbook.models.speculation import ExpertWeights, expected_distinct_experts, read_ms
from rackbook.tables import COLUMNS


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def test_distinct_experts_by_hand():
    assert expected_distinct_experts(384, 6, 1) == pytest.approx(6)
    # two tokens that pick 1 of 2: the same with probability ½
    assert expected_distinct_experts(2, 1, 2) == pytest.approx(1.5)
    assert expected_distinct_experts(4, 4, 3) == 4


def test_distinct_experts_against_draws():
    generator = np.random.default_rng(11)
    draws = [
        len({e for _ in range(6) for e in generator.choice(384, size=6, replace=False).tolist()}) for _ in range(400)
    ]
    spread = np.std(draws) / math.sqrt(len(draws))
    assert abs(np.mean(draws) - expected_distinct_experts(384, 6, 6)) < 4 * spread


def test_popular_experts_are_fewer_than_uniform_ones():
    # picking 1 of 4 with unequal odds, twice: Σ 1 − (1 − p)²
    odds = [0.7, 0.1, 0.1, 0.1]
    assert sum(1 - (1 - p) ** 2 for p in odds) < expected_distinct_experts(4, 1, 2)


def test_bytes_of_experts_by_hand():
    weights = ExpertWeights(num_layers=2, num_experts=4, top_k=1, bytes_per_expert=10.0)
    assert weights.bytes_read(1.5) == 30
    assert read_ms(8e9, num_gpus=4, tb_per_s_per_gpu=2.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected_distinct_experts(4, 5, 1), "top_k: got 5, allowed: 1 to 4"),
        (lambda: expected_distinct_experts(4, 1, 0), "num_tokens: got 0"),
        (lambda: read_ms(1, 0, 8.0), "got 0 GPUs"),
        (lambda: read_ms(1, 4, 0.0), "0.0 TB/s"),
    ],
)
def test_impossible_steps_are_refused(call, words):
    with pytest.raises(ParameterError, match=words):
        call()


def test_one_expert_is_three_matrices():
    # 557.2e9 − 14e9 entries over 40 × 384 experts: 35.4M entries, which is 3 × 5120 × 2304 within the rounding of the
    # printed counts; 4 bits each and one byte per 32
    size = experiment.target_experts().bytes_per_expert
    assert size == pytest.approx((557.2e9 - 14e9) / (40 * 384) * (0.5 + 1 / 32))
    assert size == pytest.approx(3 * 5120 * 2304 * 0.53125, rel=2e-3)
    assert experiment.draft_experts().bytes_per_expert == pytest.approx(size, rel=0.04)


def test_scales_fit_the_printed_total():
    # the experts' share of the printed 21.9 GiB of scales
    assert 557.2e9 / MXFP4_BLOCK < 21.9 * GIB


def test_step_times_by_hand(evidence):
    steps = {r["acceptance_length"]: r["step_ms"] for r in evidence.steps.to_dicts()}
    assert list(steps) == [1, 2, 3, 3.51, 4, 5, 6]
    assert steps[1] == pytest.approx(1.2107, abs=1e-4)
    assert steps[3.51] == pytest.approx(4.2494, abs=1e-4)
    assert steps[6] == pytest.approx(7.2639, abs=1e-4)


def test_floor_by_hand(evidence):
    floors = {(r["checked_tokens"], r["expert_overlap"]): r for r in evidence.floors.to_dicts()}
    same = floors[6, experiment.SAME]
    expert = experiment.target_experts().bytes_per_expert
    draft = experiment.draft_experts().bytes_per_expert
    num_bytes = 40 * 6 * expert + 3 * 3 * draft + (6.9 + 3.9 / 2) * 2**30
    assert same["read_gb_per_step"] == pytest.approx(num_bytes / 1e9)
    assert same["hbm_floor_ms"] == pytest.approx(num_bytes / 32e12 * 1e3)
    assert floors[6, experiment.INDEPENDENT]["hbm_floor_ms"] == pytest.approx(1.136, abs=5e-4)
    assert floors[1, experiment.INDEPENDENT]["hbm_floor_ms"] == floors[1, experiment.SAME]["hbm_floor_ms"]


def test_floor_grows_with_the_tokens_and_overlap_lowers_it(evidence):
    independent = evidence.floors.filter(pl.col("expert_overlap") == experiment.INDEPENDENT)["hbm_floor_ms"].to_list()
    same = evidence.floors.filter(pl.col("expert_overlap") == experiment.SAME)["hbm_floor_ms"].to_list()
    assert independent == sorted(independent)
    assert len(set(independent)) == 6
    assert all(a <= b for a, b in zip(same, independent, strict=True))


def test_use_is_the_floor_over_the_step(evidence):
    for row in evidence.use.to_dicts():
        assert row["hbm_use_percent"] == pytest.approx(100 * row["hbm_floor_ms"] / row["step_ms"])
    assert evidence.use["hbm_use_percent"].max() < 100, "no acceptance length is excluded"


def test_hardware_and_gpus_change_the_floor(evidence):
    slower = experiment.collect(experiment.Params(hardware="h200", num_gpus=8))
    ratio = slower.floors["hbm_floor_ms"] / evidence.floors["hbm_floor_ms"]
    assert ratio.to_list() == pytest.approx([8.0 / 4.8 * 4 / 8] * ratio.len())


def test_own_rate_is_not_called_published(evidence):
    assert evidence.steps["source"].unique().to_list() == ["S1"]
    own = experiment.collect(experiment.Params(user_tok_per_s=413.0))
    assert own.steps["source"].unique().to_list() == ["parameters"]
    assert own.steps["step_ms"].to_list() == pytest.approx((2 * evidence.steps["step_ms"]).to_list())


def test_without_drafts_one_token_is_checked():
    evidence = experiment.collect(experiment.Params(draft_tokens=0, acceptance_length=1.0))
    assert evidence.steps["acceptance_length"].to_list() == [1.0]
    assert "draft experts" not in evidence.reads["component"].to_list()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"acceptance_length": 6.5}, "got 6.5, allowed: at most 6"),
        ({"draft_tokens": 1}, "got 3.51, allowed: at most 2"),
        ({"num_gpus": 0}, "greater than or equal to 1"),
        ({"user_tok_per_s": 0.0}, "greater than 0"),
    ],
)
def test_bad_parameters_are_refused(bad, words):
    with pytest.raises(ValidationError, match=words):
        experiment.Params(**bad)


def test_unknown_hardware_is_named():
    with pytest.raises(ValidationError, match="got 'b3000'.*Did you mean 'b300'"):
        experiment.Params(hardware="b3000")


def test_frames_use_the_vocabulary(evidence):
    assert evidence.run is None
    for name in vars(evidence).keys() - {"run"}:
        frame = getattr(evidence, name)
        assert set(frame.columns) <= set(COLUMNS), name
        assert {"origin", "source"} <= set(frame.columns), name


def test_verdicts_do_not_depend_on_the_parameters(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    assert verdicts["p90_tok_per_s"].verdict == "open"
    assert verdicts["step_at_3_51_ms"].finding.found == pytest.approx(3510 / 826)
    assert verdicts["step_at_6_ms"].finding.found == pytest.approx(6000 / 826)
    other = experiment.collect(experiment.Params(user_tok_per_s=10.0, acceptance_length=2.0, draft_tokens=1))
    assert experiment.CHECKS.judge(other).records() == experiment.CHECKS.judge(evidence).records()


def test_charts(evidence):
    spec = check_chart(
        charts.step_time_by_acceptance(
            evidence.line, evidence.steps, experiment.references(evidence), headline="826", subtitle="4 × B300"
        ),
        name="step_time_by_acceptance",
    )
    assert "derived" in str(spec)
    check_chart(
        charts.floor_by_checked_tokens(evidence.reads, evidence.floors, subtitle="4 × B300"),
        name="floor_by_checked_tokens",
    )


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="floors: column 'hbm_floor_ms' is missing"):
        charts.floor_by_checked_tokens(evidence.reads, evidence.floors.drop("hbm_floor_ms"), subtitle="")
