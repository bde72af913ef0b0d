"""Experiment 06: balancedness and its definitions, the approximation, what is recovered, the claims."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from pydantic import ValidationError
from scipy import stats

from rackbook.errors import DataError, ParameterError
from rackbook.experiments import expert_balance as experiment
from rackbook.experts import recovery, uniform
from rackbook.experts.balancedness import (
    balancedness_of_sums,
    balancedness_per_layer_step,
    estimate_mean,
    ratio_of_sums,
    recovered_fraction,
    recovered_range,
    uniform_balancedness_approximation,
    uniform_controls,
)
from rackbook.experts.replay import Eplb
from rackbook.experts.routing import sample_rank_loads
from rackbook.locations import NOTEBOOKS
from rackbook.suite import notebooks

QUICK = {"draws": 40}


@pytest.fixture(scope="module", autouse=True)
def few_draws():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "CHOICES_PER_READING", 3_000_000)
        yield


@pytest.fixture(scope="module")
def evidence(few_draws):
    return experiment.collect(experiment.Params(**QUICK))


# definitions


def test_definitions_by_hand():
    # layer and step 1: mean 3, max 4; 2: mean 10, max 20; summed per rank: 22, 4
    loads = [[2, 4], [20, 0]]
    assert balancedness_per_layer_step(loads).tolist() == [0.75, 0.5]
    assert ratio_of_sums(loads) == pytest.approx(13 / 24)
    assert balancedness_of_sums(loads) == pytest.approx(13 / 22)


def test_bounds_of_balancedness():
    assert balancedness_per_layer_step([7, 7, 7]) == 1
    assert balancedness_per_layer_step([9, 0, 0]) == pytest.approx(1 / 3)


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6))
def test_sums_never_read_higher_over_layers_of_equal_load(rows):
    # every layer gets the same total, as the layers of one step do
    loads = np.array([[*row, 200 - sum(row)] for row in rows])
    assert ratio_of_sums(loads) <= balancedness_per_layer_step(loads).mean() + 1e-12
    assert ratio_of_sums(loads) <= balancedness_of_sums(loads) + 1e-12


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([], "at least one rank"),
        (3.0, "at least one rank"),
        ([[1, -1]], "not negative"),
        ([1, np.nan], "finite"),
        ([[1, 2], [0, 0]], "1 of 2 layers and steps have no load"),
        ([0, 0], "1 of 1 layers and steps have no load"),
    ],
)
def test_loads_without_a_balancedness_are_refused(loads, message):
    for definition in (balancedness_per_layer_step, ratio_of_sums, balancedness_of_sums):
        with pytest.raises(DataError, match=message):
            definition(loads)


# estimates


def enumerated(num_ranks, num_tokens, num_experts, top_k):
    """Rank loads of every possible batch; all are equally likely."""
    held = num_experts // num_ranks
    choices = list(itertools.combinations(range(num_experts), top_k))
    return np.array(
        [
            np.bincount([e // held for token in batch for e in token], minlength=num_ranks)
            for batch in itertools.product(choices, repeat=num_tokens)
        ]
    )


def test_one_token_of_two_in_four_by_hand():
    # of the six pairs of experts two lie on one rank (1/2), four on both (1)
    assert balancedness_per_layer_step(enumerated(2, 1, 4, 2)).mean() == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("ranks", "tokens", "experts", "top_k"), [(2, 1, 4, 2), (2, 2, 4, 2), (2, 3, 4, 3), (3, 2, 6, 2), (4, 3, 4, 1)]
)
def test_draws_agree_with_enumeration(ranks, tokens, experts, top_k):
    batch = {"num_tokens": tokens, "num_experts": experts, "top_k": top_k}
    every = enumerated(ranks, **batch)
    exact = balancedness_per_layer_step(every).mean()
    controls = uniform_controls(every, **batch)
    assert controls.mean(axis=0) == pytest.approx([0, 0], abs=1e-9), "controls of expectation 0"
    loads = sample_rank_loads(num_ranks=ranks, num_draws=20_000, seed=11, **batch)
    values = balancedness_per_layer_step(loads)
    for estimate in (
        estimate_mean(values, 0.9999),
        estimate_mean(values, 0.9999, controls=uniform_controls(loads, **batch)),
    ):
        assert estimate.low - 1e-12 <= exact <= estimate.high + 1e-12
        assert estimate.high - estimate.low < 0.02


def test_interval_by_hand():
    estimate = estimate_mean([1.0, 2.0, 3.0], 0.95)
    assert estimate.mean == 2
    assert estimate.standard_deviation == 1
    assert estimate.high - estimate.mean == pytest.approx(4.302653 / 3**0.5)
    assert estimate.mean - estimate.low == pytest.approx(4.302653 / 3**0.5)


def test_a_control_that_explains_everything_leaves_no_interval():
    control = np.array([-1.0, 0.5, 2.0, 4.0])
    estimate = estimate_mean(3 + 2 * control, controls=control[:, None])
    assert (estimate.low, estimate.mean, estimate.high) == pytest.approx((3, 3, 3))


def test_controls_narrow_the_interval_and_it_still_covers():
    batch = {"num_tokens": 96, "num_experts": 64, "top_k": 3}
    truth = uniform_balancedness_approximation(num_ranks=8, **batch)
    rng = np.random.default_rng(2)
    covered, ratios = 0, []
    for _ in range(200):
        loads = sample_rank_loads(num_ranks=8, num_draws=100, seed=rng, **batch)
        values = balancedness_per_layer_step(loads)
        sharp, plain = estimate_mean(values, controls=uniform_controls(loads, **batch)), estimate_mean(values)
        covered += sharp.low <= truth <= sharp.high
        ratios.append((sharp.high - sharp.low) / (plain.high - plain.low))
    assert covered >= 175, "a 95 % interval"
    assert np.mean(ratios) < 0.7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(estimate_mean, [1.0]), "at least 2 draws, got 1"),
        (partial(estimate_mean, [1.0, 2.0], controls=np.ones((2, 2))), "at least 4 draws, got 2"),
        (partial(estimate_mean, [1.0, 2.0], 1.0), "confidence: got 1.0"),
    ],
)
def test_estimates_without_a_basis_are_refused(call, message):
    with pytest.raises(ParameterError, match=message):
        call()


# the approximation


def test_two_ranks_are_a_binomial():
    # two experts, one per token: the load of a rank is Binomial(n, 1/2)
    n = 400
    heads = np.arange(n + 1)
    exact = np.sum(stats.binom.pmf(heads, n, 0.5) * (n / 2) / np.maximum(heads, n - heads))
    assert uniform_balancedness_approximation(num_ranks=2, num_tokens=n, num_experts=2, top_k=1) == pytest.approx(
        exact, abs=2e-4
    )


@pytest.mark.parametrize(
    ("ranks", "tokens", "experts", "top_k", "draws"),
    [(32, 13824, 384, 6, 600), (32, 2304, 384, 3, 2000), (4, 60, 16, 2, 8000), (8, 40, 32, 12, 8000)],
)
def test_approximation_against_draws(ranks, tokens, experts, top_k, draws):
    batch = {"num_tokens": tokens, "num_experts": experts, "top_k": top_k}
    loads = sample_rank_loads(num_ranks=ranks, num_draws=draws, seed=21, **batch)
    estimate = estimate_mean(balancedness_per_layer_step(loads), 0.999, controls=uniform_controls(loads, **batch))
    approximation = uniform_balancedness_approximation(num_ranks=ranks, **batch)
    assert abs(approximation - estimate.mean) < 0.001 + (estimate.high - estimate.low) / 2


def test_approximation_without_chance_and_its_refusals():
    assert uniform_balancedness_approximation(num_ranks=4, num_tokens=3, num_experts=8, top_k=8) == 1
    assert uniform_balancedness_approximation(num_ranks=1, num_tokens=3, num_experts=8, top_k=2) == 1
    with pytest.raises(ParameterError, match="8 experts cannot be spread evenly over 3 ranks"):
        uniform_balancedness_approximation(num_ranks=3, num_tokens=3, num_experts=8, top_k=2)
    with pytest.raises(ParameterError, match="top_k 9 of 8 experts"):
        uniform_balancedness_approximation(num_ranks=4, num_tokens=3, num_experts=8, top_k=9)


@given(st.integers(1, 400), st.sampled_from([2, 4, 8]), st.integers(1, 15))
def test_approximation_is_a_balancedness_and_grows_with_tokens(tokens, ranks, top_k):
    at = partial(uniform_balancedness_approximation, num_ranks=ranks, num_experts=16, top_k=top_k)
    one, twice = at(num_tokens=tokens), at(num_tokens=2 * tokens)
    assert 1 / ranks <= one <= 1
    if tokens * top_k >= 10 * ranks:
        assert twice > one


# what is recovered


def test_recovered_by_hand():
    assert recovered_fraction(0.35, 0.94, 0.96) == pytest.approx(0.59 / 0.61)
    assert recovered_fraction(0.4, 0.4, 0.9) == 0
    low, high = recovered_range((0.345, 0.355), (0.935, 0.945), (0.955, 0.965))
    assert (low, high) == pytest.approx((0.58 / 0.61, 0.60 / 0.61))
    with pytest.raises(ParameterError, match=r"no gap to recover: uniform routing has 0.3"):
        recovered_fraction(0.35, 0.94, 0.3)


def test_recovered_table(evidence):
    rows = {(r["part"], r["uniform_from"]): r for r in evidence.recovered.to_dicts()}
    printed, drawn = rows["draft", recovery.PRINTED], rows["draft", recovery.DRAWN]
    assert printed["recovered_percent"] == pytest.approx(100 * 0.68 / 0.73)
    assert printed["recovered_low_percent"] == pytest.approx(100 * 0.67 / 0.73)
    assert printed["recovered_high_percent"] == pytest.approx(100 * 0.69 / 0.73)
    assert (printed["origin"], drawn["origin"]) == ("derived", "simulated")
    assert printed["recovered_low_percent"] < drawn["recovered_low_percent"]
    assert drawn["recovered_high_percent"] < printed["recovered_high_percent"]


# the experiment


def test_readings_of_the_published_setting(evidence):
    readings = evidence.at_published.filter(pl.col("origin") == "simulated").select(
        "part", "num_ranks", "requests_per_rank", "tokens_per_request", "num_experts", "top_k"
    )
    assert readings.rows() == [
        ("target", 32, 72, 6, 384, 6),
        ("draft", 32, 72, 5, 128, 3),
        ("draft", 32, 72, 5, 384, 3),
        ("draft", 32, 72, 6, 384, 3),
        ("draft", 32, 72, 1, 384, 3),
    ]


def test_baselines_round_to_the_printed_figures(evidence):
    states = {(r["part"], r["balance_of"]): r["balancedness_per_layer_step"] for r in evidence.states.to_dicts()}
    for part, printed in (("target", 0.96), ("draft", 0.94)):
        assert states[part, recovery.UNIFORM_PRINTED] == printed
        assert round(states[part, recovery.UNIFORM_DRAWN], 2) == printed


def test_draws_and_approximation_agree_in_every_sweep(evidence):
    for frame in (evidence.at_published, evidence.here, evidence.by_ranks, evidence.by_requests, evidence.by_tokens):
        value = "balancedness_per_layer_step"
        keys = ["part", "num_ranks", "requests_per_rank", "tokens_per_request", "num_experts", "top_k"]
        pairs = frame.filter(pl.col("origin") == "simulated").join(
            frame.filter(pl.col("origin") == "modelled").select(*keys, pl.col(value).alias("formula_value")), on=keys
        )
        assert pairs.height == frame.height / 2
        width = pairs["balancedness_high"] - pairs["balancedness_low"]
        assert ((pairs[value] - pairs["formula_value"]).abs() < 0.002 + 1.5 * width).all()


def test_printed_figure_picks_the_drafts_tokens(evidence):
    band = {r["part"]: r for r in evidence.printed_baselines.to_dicts()}["draft"]
    fits = evidence.by_tokens.filter(
        (pl.col("part") == "draft")
        & (pl.col("origin") == "modelled")
        & pl.col("balancedness_per_layer_step").is_between(band["balancedness_low"], band["balancedness_high"])
    )
    assert fits["tokens_per_request"].to_list() == [5]


def test_order_and_bins_hold_all_draws(evidence):
    for part in ("target", "draft"):
        order = evidence.order.filter(pl.col("part") == part)
        assert order["load_place"].to_list() == list(range(1, 33))
        assert order["load_to_mean"].mean() == pytest.approx(1)
        assert order["load_to_mean"].is_sorted(descending=True)
        assert evidence.draws.filter(pl.col("part") == part)["share_of_draws_percent"].sum() == pytest.approx(100)


def test_bins_of_draws_by_hand():
    # mean load 10; largest loads 11, 11, 12, 14, 15: bins of two whole numbers from 11 hold 3, 1 and 1 draws
    batch = uniform.Batch("draft", 2, 1, 20, 2, 1)
    loads = np.array([[11, 9], [9, 11], [12, 8], [14, 6], [15, 5]])
    bins = uniform.draws_in_bins(batch, loads, experiment.Params(), most_bins=3)
    assert bins["share_of_draws_percent"].to_list() == [60, 20, 20]
    assert bins["balancedness_high"].to_list() == pytest.approx([10 / 10.5, 10 / 12.5, 10 / 14.5])
    assert bins["balancedness_low"].to_list() == pytest.approx([10 / 12.5, 10 / 14.5, 10 / 16.5])


def test_busiest_rank_has_at_least_the_inverse(evidence):
    plain = evidence.definitions.filter(
        (pl.col("definition") == uniform.PER_LAYER_STEP) & pl.col("setting").str.starts_with("every step")
    )
    for part in ("target", "draft"):
        inverse = 1 / plain.filter(pl.col("part") == part)["balancedness"].item()
        busiest = evidence.order.filter((pl.col("part") == part) & (pl.col("load_place") == 1))["load_to_mean"].item()
        assert inverse < busiest < inverse + 1e-3, "the mean of the inverse is a little above the inverse of the mean"


def test_sums_part_from_ratios_when_steps_differ(evidence):
    value = {
        (r["setting"].startswith("every step"), r["definition"]): r["balancedness"]
        for r in evidence.definitions.filter(pl.col("part") == "target").to_dicts()
    }
    assert value[True, uniform.SUMS] == pytest.approx(value[True, uniform.PER_LAYER_STEP], abs=1e-3)
    assert value[False, uniform.SUMS] > value[False, uniform.PER_LAYER_STEP] + 0.01
    assert value[True, uniform.SUMMED_LOADS] > value[True, uniform.PER_LAYER_STEP] + 0.02


SMALL = QUICK | {"ranks": 4, "requests_per_rank": 3, "experts": [16, 8], "tokens_per_request": [6, 2]}


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "CHOICES_PER_READING", 1)
        return experiment.collect(experiment.Params(**SMALL))


@pytest.mark.parametrize(
    ("change", "frames"),
    [
        ({"ranks": 8}, ("here", "order", "by_requests")),
        ({"requests_per_rank": 5}, ("here", "draws", "by_ranks")),
        ({"tokens_per_request": [7, 2]}, ("here", "by_ranks", "by_requests")),
        ({"experts": [32, 8]}, ("here", "by_ranks", "by_requests")),
        ({"top_k": [5, 3]}, ("here", "by_ranks", "by_requests")),
        ({"tokens_per_request": [6, 3]}, ("here", "by_ranks", "by_requests")),
        ({"experts": [16, 16]}, ("here", "by_ranks", "by_requests")),
        ({"top_k": [6, 2]}, ("here", "by_ranks", "by_requests")),
        ({"draws": 50}, ("here", "draws", "order", "definitions")),
        ({"draws": 80}, ("by_ranks", "by_requests", "by_tokens")),
        ({"confidence": 0.8}, ("here", "at_published", "by_ranks")),
        ({"seed": 2}, ("here", "at_published", "by_ranks", "draws", "order", "definitions")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_parameter_changes_the_result(monkeypatch, small, change, frames):
    monkeypatch.setattr(experiment, "CHOICES_PER_READING", 1)
    other = experiment.collect(experiment.Params(**(SMALL | change)))
    for name in frames:
        frame = getattr(other, name)
        assert not frame.drop("source").equals(getattr(small, name).drop("source")), name
        drawn = frame.filter(pl.col("origin") == "simulated")["source"].unique().to_list()
        assert drawn == [f"uniform routing, seed {change.get('seed', 1)}"]
    if "seed" not in change and "confidence" not in change:
        assert_frame_equal(other.at_published, small.at_published)


def test_claims_are_judged_at_the_published_setting(evidence):
    other = experiment.collect(experiment.Params(**SMALL))
    judged = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(other)}
    assert [v.finding.found for v in judged.values()] == [v.finding.found for v in experiment.CHECKS.judge(evidence)]
    assert judged["uniform_target"].verdict == "reproduced"
    assert judged["uniform_draft"].verdict == "reproduced"
    assert "32 ranks × 72 requests × 6 tokens, 6 of 384" in judged["uniform_target"].finding.note
    assert judged["recovered_target_percent"].verdict == "consistent"
    assert judged["recovered_draft_percent"].verdict == "consistent"
    assert judged["eplb_interval_steps"].verdict == "consistent"
    assert judged["slots_per_rank"].finding.found == 13
    for name in ("target_without_eplb", "draft_with_eplb", "redundant_experts_dep16"):
        assert judged[name].verdict == "open"
        assert judged[name].settlement.needs, "an open claim says what would settle it"


def test_a_second_print_of_a_number_is_consistent(evidence):
    judged = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    assert judged["target_top_k"].verdict == judged["draft_top_k"].verdict == "consistent"
    assert judged["target_top_k"].finding.note == "printed by S2 as well"
    assert judged["draft_top_k"].finding.note == "printed by vllm-recipe as well"


def test_the_drafters_experts_follow_from_its_weights(evidence):
    judged = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    # the target's 40 × 384 experts share 557.2 − 14 billion weights, the draft's 14
    experts = 14 * 40 * 384 / (557.2 - 14)
    assert judged["draft_stages"].finding.found == pytest.approx(experts / 128)
    assert judged["draft_routed_experts"].finding.found == pytest.approx(experts / 3)
    assert judged["draft_stages"].verdict == judged["draft_routed_experts"].verdict == "consistent"
    # 384 experts of the draft beside 40 × 384 of the target
    assert judged["draft_entries_billion"].finding.found == pytest.approx(557.2 / 41)


def test_sources_that_disagree_on_a_setting_leave_it_open(evidence):
    changed = evidence.settings.with_columns(
        pl.when(pl.col("ep_size") == 16).then(500).otherwise(pl.col("window_steps")).alias("window_steps")
    )
    other = replace(evidence, settings=changed)
    judged = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(other)}
    assert judged["eplb_window_steps"].verdict == "open"
    assert "do not agree" in judged["eplb_window_steps"].finding.note


def test_the_source_is_no_evidence_for_its_own_setting(evidence):
    changed = evidence.settings.with_columns(
        pl.when(pl.col("source") == "S1").then(1).otherwise(pl.col("interval_steps")).alias("interval_steps")
    )
    other = replace(evidence, settings=changed)
    judged = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(other)}
    assert judged["eplb_interval_steps"].finding.found == 3000


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ranks": 50}, "384 experts .* 128 .* over 50 ranks; ranks that divide both: 2, 4, 8, 16, 32, 64, 128"),
        ({"ranks": 96}, "384 experts .* 128 of the draft cannot both be spread evenly over 96 ranks"),
        ({"experts": [384, 125]}, r"125 of the draft .* divide both: \(none\)"),
        ({"top_k": [385, 3]}, "the target sends a token to 385 of 384 experts"),
        ({"top_k": [6, 129]}, "the draft sends a token to 129 of 128 experts"),
        ({"ranks": 1}, "greater than or equal to 2"),
        ({"draws": 9}, "greater than or equal to 10"),
        ({"confidence": 1.0}, "less than 1"),
        ({"rank": 64}, "Extra inputs"),
        ({"experts": [384]}, "at least 2 items"),
        ({"redundant_per_rank": -1}, "greater than or equal to 0"),
        ({"interval_steps": 99}, "greater than or equal to 100"),
        ({"memory_steps": 0}, "greater than 0"),
    ],
)
def test_bad_parameters_are_refused(bad, message):
    with pytest.raises(ValidationError, match=message):
        experiment.Params(**bad)


def test_a_table_with_a_row_too_few_is_named(evidence):
    points = evidence.points.filter(~((pl.col("part") == "draft") & (pl.col("placement") == "eplb")))
    with pytest.raises(DataError, match="got 0 rows of part draft, routing observed, placement eplb; expected 1"):
        recovery.balance_states(points, evidence.at_published)


def test_notebook_declares_the_same_parameters():
    declared = notebooks.read(NOTEBOOKS / "06_expert_balance.ipynb").parameters
    assert {p.name: p.default for p in declared} == experiment.Params().model_dump()


def test_balancing_parameters_reach_the_replay(monkeypatch):
    monkeypatch.setattr(experiment, "CHOICES_PER_READING", 1)
    given = {"ranks": 64, "redundant_per_rank": 2, "window_steps": 500, "interval_steps": 800, "memory_steps": 5e5}
    replays = experiment.collect(experiment.Params(**given, seed=3, draws=10)).replays
    assert replays.eplb == Eplb(num_ranks=64, num_redundant=128, window_steps=500, interval_steps=800)
    assert (replays.memory_steps, replays.seed) == (5e5, 3)
    assert {part: batch.num_ranks for part, batch in replays.batches.items()} == {"target": 64, "draft": 64}
    assert {part: batch.num_ranks for part, batch in replays.published.items()} == {"target": 32, "draft": 32}
    assert replays.published["draft"].num_experts == 128
    assert replays.printed["draft", recovery.WITHOUT] == 0.21
