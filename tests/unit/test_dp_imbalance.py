"""Experiment 05: arithmetic on the published pairs, the gap, the laws, the simulations, verdicts."""

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from rackbook import published
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import dp_imbalance as experiment
from rackbook.models import depth_cost, dp_loss
from rackbook.replay import lag_losses, routed_loads, timelines
from rackbook.replay.lockstep import StepCost
from rackbook.replay.queues import queue

RATE = 138_700 / 2
DEPTH = "cost of depth, per token and context token"
SMALL = {"num_requests": 120, "ranks": [2, 4]}


@pytest.fixture(scope="module", autouse=True)
def few_routed_requests():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "POLICY_REQUESTS", 2_000)
        patch.setattr(experiment, "LOADS_PERCENT", (80.0,))
        patch.setattr(experiment, "REPEATS", 2)
        yield


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params(**SMALL))


@pytest.fixture(scope="module")
def points():
    return published.read("dp_imbalance")


@pytest.fixture(scope="module")
def prefill_only():
    return published.read("dp_imbalance_prefill_only")


def assumed(**changed):
    """The parameters and the lag replay that they assume."""
    params = experiment.Params(**SMALL | changed)
    drawn = experiment.replay_traces(params, published.read("dp_imbalance_prefill_only"))
    return params, experiment.default_replay(params, drawn, RATE)


def row(frame, **where):
    return frame.filter(*(pl.col(name) == value for name, value in where.items())).row(0, named=True)


def test_losses_by_hand(evidence):
    two, four = (row(evidence.losses, dp_size=n) for n in (2, 4))
    assert two["loss_percent"] == pytest.approx(100 * (1 - 130.5 / 138.7))
    assert four["excess_percent"] == pytest.approx(100 * (267.6 / 231.1 - 1))
    assert two["loss_low_percent"] == pytest.approx(100 * (1 - 130.55 / 138.65))
    assert four["loss_high_percent"] == pytest.approx(100 * (1 - 231.05 / 267.65))


def test_gap_by_hand(evidence):
    whole, mirror, imbalance, rest = evidence.gap.iter_rows(named=True)
    assert whole["ratio_percent"] == pytest.approx(100 * 53.3 / 64.4)
    assert mirror["ratio_percent"] == pytest.approx(100 * (267.6 / 4) / (138.7 / 2))
    assert imbalance["ratio_percent"] == pytest.approx(100 * (231.1 / 267.6) / (130.5 / 138.7))
    parts = [mirror, imbalance, rest]
    assert math.prod(p["ratio_percent"] / 100 for p in parts) == pytest.approx(whole["ratio_percent"] / 100)
    assert sum(p["gap_part_percent"] for p in parts) == pytest.approx(100)
    assert whole["ratio_low_percent"] == pytest.approx(100 * 53.25 / 64.45)
    assert imbalance["ratio_high_percent"] == pytest.approx(100 * (231.15 / 267.55) / (130.45 / 138.75))


def test_the_laws_pass_through_their_ratios_and_the_fitted_one_through_the_pair(evidence):
    at_four = dict(evidence.laws.filter(pl.col("num_ranks") == 4).select("law", "excess_to_two_ranks").iter_rows())
    assert at_four["exponential"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / (1 / 2))
    assert at_four["lognormal"] == pytest.approx(at_four["published"])
    assert at_four["uniform"] < at_four["normal"] < at_four["exponential"] < at_four["published"] < 3


def test_the_fitted_two_value_law_gives_both_published_excesses(evidence):
    share, longer = (
        row(evidence.fitted_laws, quantity=q)["value"] / 100
        for q in ("steps that are long", "how much longer they are")
    )

    def excess(ranks):
        largest = 1 + longer * (1 - (1 - share) ** ranks)
        return largest / (1 + longer * share) - 1

    assert excess(2) == pytest.approx(138.7 / 130.5 - 1)
    assert excess(4) == pytest.approx(267.6 / 231.1 - 1)
    assert (evidence.fitted_laws["low"] < evidence.fitted_laws["value"]).all()
    assert (evidence.fitted_laws["value"] < evidence.fitted_laws["high"]).all()


def test_depth_cost_from_the_sweep_by_hand():
    sweep = published.read("context_sweep")
    slope = np.polyfit(sweep["context_tokens"], sweep["step_ms"], 1)[0]
    cost, formula = depth_cost.derived_depth_cost_ps(sweep)
    assert cost == pytest.approx(slope * 1e9 / (16 * 6))
    assert "16 · 6 tokens" in formula


def test_depth_cost_bound_by_hand():
    bound, _ = depth_cost.depth_cost_bound_ps(published.read("prefill_ablation_throughput"))
    assert bound == pytest.approx(1e12 / 102_500 / (131_072 + 32_768))


def test_the_mirrored_trace_runs_at_the_published_rate(points):
    params, lag_replay = assumed()
    seconds = sum(lag_replay.cost.alone_s(q, params.max_num_batched_tokens) for q in lag_replay.queues)
    assert lag_replay.num_tokens / seconds == pytest.approx(RATE)
    assert dp_loss.mirror_tok_per_s_per_gpu(points) == RATE


def test_given_costs_are_used_and_named(evidence):
    params, lag_replay = assumed(us_per_token=9.0, ps_per_attended_token=20.0)
    assert lag_replay.cost == StepCost(10.0, 9.0, 20.0)
    costs = {r["quantity"]: r for r in experiment.costs(params, lag_replay, RATE).iter_rows(named=True)}
    assert costs["cost per token"]["formula"] == costs[DEPTH]["formula"] == "given"
    assert costs["full step at no depth"]["value"] == pytest.approx(10 + 16_384 * 9e-3)
    assert costs["full step at 128K of depth"]["value"] == pytest.approx(10 + 16_384 * (9e-3 + 131_072 * 20e-9))
    assert "calibrated" in row(evidence.costs, quantity="cost per token")["formula"]
    assert "decode sweep" in row(evidence.costs, quantity=DEPTH)["formula"]


def test_costs_that_leave_no_time_are_refused():
    with pytest.raises(ParameterError, match="ps_per_attended_token = 9000 .*lower one of them, or give us_per_token"):
        assumed(ps_per_attended_token=9_000.0)


def test_losses_grow_with_ranks_and_with_the_cost_of_depth_and_vanish_without_it(evidence):
    loss = {
        (r["varied"], r["setting"], r["dp_size"]): r["loss_percent"] for r in evidence.sensitivity.iter_rows(named=True)
    }
    assert loss["cost of depth", "0 ×", 2] == loss["cost of depth", "0 ×", 4] == 0
    for dp_size in (2, 4):
        by_depth = [loss["cost of depth", f"{f:g} ×", dp_size] for f in experiment.DEPTH_FACTORS]
        assert by_depth == sorted(by_depth)
        assert loss["fixed cost", "50 ms", dp_size] == pytest.approx(
            loss["all defaults", "all defaults", dp_size], rel=0.01
        )
    assert loss["all defaults", "all defaults", 4] > loss["all defaults", "all defaults", 2] > 0


def test_a_depth_cost_that_leaves_no_time_is_missing_with_a_reason():
    params, lag_replay = assumed(ps_per_attended_token=45.0)
    found = experiment.sensitivity(params, lag_replay, RATE)
    impossible = found.filter((pl.col("varied") == "cost of depth") & (pl.col("setting") == "4 ×"))
    assert impossible["loss_percent"].null_count() == 2
    assert impossible["missing_reason"].str.contains("take longer than the published rate allows").all()
    assert (found["loss_percent"].is_null() == found["missing_reason"].is_not_null()).all()


def test_the_fit_meets_the_loss_of_two_ranks(evidence):
    fitted = evidence.predictions.filter(pl.col("setting") == "depth cost fitted to DEP2")
    assert row(fitted, dp_size=2)["excess_percent"] == pytest.approx(100 * (138.7 / 130.5 - 1), abs=0.02)
    trace = row(evidence.fits, length_law="the trace")
    assert trace["times_default"] == pytest.approx(
        trace["ps_per_attended_token"] / row(evidence.costs, quantity=DEPTH)["value"]
    )
    assert row(fitted, dp_size=4)["loss_percent"] == pytest.approx(trace["loss_percent"])


def test_the_whole_run_loses_the_stagger_too(evidence):
    params, lag_replay = assumed(lag_s=10.0)
    longer = experiment.predictions(params, lag_replay, evidence.fits)
    assert (longer["whole_run_loss_percent"] > evidence.predictions["whole_run_loss_percent"]).all()


def test_stagger_by_hand(evidence):
    four = row(evidence.stagger, dp_size=4)
    assert 15 / (four["run_s"] + 15) == pytest.approx(1 - 231.1 / 267.6)
    assert four["stagger_loss_percent"] == pytest.approx(100 * 15 / 615)


def test_timelines(evidence):
    lagged = evidence.beginning.filter(pl.col("schedule") == "lag")
    begins = lagged.filter(pl.col("activity") == "computing").group_by("rank").agg(pl.col("from_s").min()).sort("rank")
    assert begins["from_s"].to_list() == pytest.approx([0, 5, 10, 15], abs=0.3)
    assert evidence.close_up.filter(pl.col("schedule") == "mirror")["activity"].unique().to_list() == ["computing"]
    assert 0 < evidence.lag_waiting_percent < 30
    spans = (
        evidence.close_up.filter(pl.col("schedule") == "lag")
        .group_by("step", "rank")
        .agg(pl.col("from_s").min(), pl.col("to_s").max())
    )
    assert spans.group_by("step").agg(pl.col("to_s").n_unique())["to_s"].unique().to_list() == [1], "steps end together"
    assert evidence.beginning.height < 5_000


def test_waiting_by_hand():
    spans = pl.DataFrame(
        {
            "schedule": ["lag", "lag", "lag", "mirror"],
            "activity": ["computing", "waiting", "no request", "computing"],
            "from_s": [0.0, 3.0, 0.0, 0.0],
            "to_s": [3.0, 4.0, 9.0, 9.0],
        }
    )
    assert timelines.waiting_percent(spans) == pytest.approx(25.0)


def test_policies_order_and_load(evidence, prefill_only):
    tails = {r["policy"]: r["ttft_p99_s"] for r in evidence.policies.iter_rows(named=True)}
    assert tails["least-tokens"] < tails["least-requests"] < tails["round-robin"]
    params = experiment.Params(**SMALL)
    (trace, _) = experiment.replay_traces(params, prefill_only)
    cost = StepCost(10.0, 13.0, 8.0)
    loaded = routed_loads.at_load(trace, 0.5, 4, cost, 16_384, prefix_caching=True)
    work_s = cost.alone_s(queue(trace, prefix_caching=True), 16_384)
    assert work_s / 4 / (loaded.arrival_ns[-1] * 1e-9) == pytest.approx(0.5, rel=1e-3)


def test_a_trace_of_the_users_replaces_the_sessions(tmp_path):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2026-01-01 00:{i // 60:02d}:{i % 60:02d}.5,{20_000 + 1_000 * (i % 40)},5" for i in range(300)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines))
    found = experiment.collect(experiment.Params(trace_path=str(path), num_requests=200, ranks=[2]))
    assert found.trace["source"][0] == "Azure trace mine.csv"
    assert found.trace["origin"][0] == "measured"
    assert row(found.trace, quantity="input")["max"] == 59_000
    assert not found.policies["prefix_caching"].any(), "the trace knows no prefixes"
    assert found.predictions["loss_low_percent"].equals(found.predictions["loss_high_percent"]), "one trace, one repeat"


def test_a_recorded_trace(realdata):
    path = realdata / "traces" / "mooncake_conversation_head2000.jsonl"
    found = experiment.collect(experiment.Params(trace_path=str(path), num_requests=1_000, ranks=[2]))
    assert row(found.predictions, dp_size=2, setting="default costs")["loss_percent"] > 0
    assert found.policies["prefix_caching"].all()
    assert found.policies["num_requests"].unique().to_list() == [2_000], "as many as there are, not as were asked for"


def test_a_trace_that_all_arrives_at_once_has_no_load():
    at_once = pl.col("arrival_s") * 0
    params = experiment.Params(**SMALL)
    drawn = experiment.replay_traces(params, published.read("dp_imbalance_prefill_only"))
    with pytest.MonkeyPatch.context() as patch:
        same = [replace(trace, requests=trace.requests.with_columns(at_once)) for trace in drawn]
        patch.setattr(experiment, "_traces", lambda *_, **__: same)
        assert experiment.policies(params, published.read("dp_imbalance_prefill_only"), StepCost(10, 13, 8)).is_empty()


def test_arrivals_are_all_at_the_start_or_kept_and_scaled():
    _, waiting = assumed()
    assert waiting.queues[0].arrival_ns.max() == 0
    (_, kept), (_, faster) = assumed(rate_scale=1.0), assumed(rate_scale=4.0)
    assert kept.queues[0].arrival_ns[-1] == pytest.approx(4 * faster.queues[0].arrival_ns[-1])
    assert faster.queues[0].arrival_ns[-1] > 0
    assert kept.queues[0].new_tokens.tolist() == waiting.queues[0].new_tokens.tolist()


def test_scaled_lengths_change_what_is_computed():
    _, plain = assumed()
    _, short = assumed(length_scale=0.5)
    assert short.num_tokens == pytest.approx(plain.num_tokens / 2, rel=1e-4)


def test_too_few_requests_for_the_lag_say_what_to_change():
    _, lag_replay = assumed(num_requests=10, lag_s=300.0)
    with pytest.raises(DataError, match="no common window: .*shorten the lag or give the ranks more requests"):
        lag_replay.excess(2)


def test_a_lag_without_a_common_window_leaves_rows_that_say_so_and_no_close_up():
    found = experiment.collect(experiment.Params(num_requests=20, lag_s=300.0, ranks=[2]))
    assert found.close_up.is_empty()
    for frame in (found.predictions, found.sensitivity, found.fits):
        assert (frame["loss_percent"].is_null() == frame["missing_reason"].is_not_null()).all()
    assert found.predictions["whole_run_loss_percent"].null_count() == 0, "stagger costs throughput all the same"
    why = row(found.fits, length_law="the trace")["missing_reason"]
    assert why.startswith("no common window: ")
    shorter = found.sensitivity.filter(pl.col("varied") == "lag", pl.col("setting") == "1 s")
    assert shorter["loss_percent"].null_count() == 0, "other lags are simulated"


def test_a_fitted_cost_of_depth_that_the_published_prefill_does_not_allow_is_not_shown():
    _, lag_replay = assumed()
    loss = (2, 138.7 / 130.5 - 1)
    (free,), (bound,) = (
        lag_losses.of_fits({"the trace": lag_replay}, loss, 4, RATE, "s", bound_ps=ps).iter_rows(named=True)
        for ps in (1e6, 10.0)
    )
    assert free["ps_per_attended_token"] > 10
    assert bound["ps_per_attended_token"] is bound["loss_percent"] is None
    assert bound["missing_reason"] == (
        f"the published loss on 2 ranks would take {free['ps_per_attended_token']:.1f} ps, more than the 10.0 ps that "
        "the published prefill allows"
    )


def test_costs_are_tried_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(experiment.measurements, "measure", lambda _: pytest.fail("measured"))
    with pytest.raises(ParameterError, match="or give us_per_token"):
        experiment.collect(experiment.Params(source="measure", ps_per_attended_token=9_000.0))


@pytest.mark.parametrize(
    "bad",
    [
        {"ranks": [1, 2]}, {"ranks": [2, 2]}, {"ranks": []}, {"pairs": 0}, {"users": -1},
        {"us_per_token": 0.0}, {"rate_scale": 0.0}, {"max_num_batched_tokens": 0}, {"concurrency": 3},
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        experiment.Params(**bad)


def test_a_seed_repeats_and_another_differs(evidence):
    params, lag_replay = assumed()
    assert experiment.predictions(params, lag_replay, evidence.fits).equals(evidence.predictions)
    assert experiment.sensitivity(params, lag_replay, RATE).equals(evidence.sensitivity)
    other, other_replay = assumed(seed=1)
    assert not experiment.predictions(other, other_replay, evidence.fits).equals(evidence.predictions)


def test_verdicts(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    still_open = {name for name, v in verdicts.items() if v.verdict == "open"}
    assert still_open == {
        "dep2_mirror", "dep2_lag", "dep4_mirror", "dep4_lag", "agentx_dep2", "agentx_dep4", "law_is_spiky",
    }  # fmt: skip
    assert {v.verdict for name, v in verdicts.items() if name not in still_open} == {"consistent"}
    assert verdicts["dep4_loss_percent"].finding.basis == "derived", "a simulated loss settles no printed one"
    assert verdicts["excess_ratio_spikes"].finding.found == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize("law", ["exponential", "normal"])
def test_the_noise_that_lets_a_law_in_puts_its_ratio_at_the_edge(evidence, law):
    noise = evidence.noise_percent[law] / 100
    off = 1 + noise * np.random.default_rng(1).standard_normal((4, 200_000))
    two, four = 138.7 / 130.5 * off[0] / off[1] - 1, 267.6 / 231.1 * off[2] / off[3] - 1
    own = evidence.laws.filter(pl.col("law") == law, pl.col("num_ranks") == 4)["excess_to_two_ranks"].item()
    assert np.mean(four - own * two < 0) == pytest.approx(0.025, abs=0.002)
    note = next(v for v in experiment.CHECKS.judge(evidence) if v.claim.id == "dp_imbalance.law_is_spiky").finding.note
    assert f"{100 * noise:.2f} % " in note


def test_law_is_not_spiky_if_the_pair_were_an_exponential_one(evidence):
    exponential = evidence.losses.with_columns(
        pl.when(pl.col("dp_size") == 4)
        .then(pl.col(f"excess{bound}_percent").filter(pl.col("dp_size") == 2).first() * 13 / 6)
        .otherwise(f"excess{bound}_percent")
        .alias(f"excess{bound}_percent")
        for bound in ("_low", "", "_high")
    )
    other = replace(evidence, losses=exponential)
    verdict = next(v for v in experiment.CHECKS.judge(other) if v.claim.id == "dp_imbalance.law_is_spiky")
    assert verdict.verdict == "inconsistent"
