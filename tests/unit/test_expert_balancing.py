"""Tables of balancing replayed, what it costs in time, and the audit of loads that were measured elsewhere."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from rackbook.engine import logs
from rackbook.errors import DataError, ParameterError, RackbookError
from rackbook.experiments import expert_balance as experiment
from rackbook.experts import audit, balancing
from rackbook.experts.bounds import greatest_balancedness
from rackbook.experts.loads import checked
from rackbook.experts.popularity import Router
from rackbook.experts.recovery import WITH, WITHOUT
from rackbook.experts.replay import Eplb
from rackbook.experts.scenarios import Scenarios, _expert_gb
from rackbook.experts.setups import Setup, fitted_router, for_batch, shortened
from rackbook.experts.step_cost import ALL_WORK, CONSTANT_PART, cost, extra_ms
from rackbook.experts.uniform import PER_LAYER_STEP, SUMMED_LOADS, Batch
from rackbook.measurements.expert_balance import check_tokens, totals
from rackbook.models import wide_ep
from rackbook.tables import column

BATCH = Batch("target", 8, 50, 2, 64, 4)
EPLB = Eplb(8, 8, 100, 400)


@pytest.fixture(scope="module")
def setup():
    return Setup(BATCH, fitted_router(BATCH, 3, 0.5, 1), EPLB, 900, 1)


@pytest.fixture(scope="module")
def drifting(setup):
    return replace(setup, router=replace(setup.router, memory_steps=10_000.0))


def every_column_is_known(frame):
    for name in frame.columns:
        column(name)
    return frame


def test_a_skew_is_fitted_at_the_printed_setting_and_kept_for_others(setup):
    assert setup.before() == pytest.approx(0.5, abs=0.01)
    other = for_batch(setup.router, replace(BATCH, requests_per_rank=5))
    assert (other.num_tokens, other.skew) == (80, setup.router.skew)


def test_after_lies_between_before_and_the_bound(setup):
    assert setup.before() + 0.2 < setup.after() < setup.bound() <= 1
    assert setup.after() == pytest.approx(setup.hindsight(), abs=0.02)


def test_no_placement_exceeds_the_bound_on_the_steps_that_both_are_of():
    """Without redundant experts the bound binds, and the steps before the first rearrangement have another one."""
    fleeting = replace(fitted_router(BATCH, 3, 0.5, 1), memory_steps=300.0)
    for delay in (0, 50):
        setup = Setup(BATCH, fleeting, replace(EPLB, num_redundant=0, delay_steps=delay), 400, 1)
        tokens = np.concatenate([block.tokens for block in setup.blocks])
        every, later = greatest_balancedness(tokens, 64, 8), setup.balanced.steps >= 100 + delay
        assert later.sum() < len(later)
        assert setup.bound() == every[later].mean() != every.mean()
        assert setup.after() == setup.balanced.per_layer_step[setup.balanced.period > 0].mean()
        assert (setup.balanced.per_layer_step[later] <= every[later] + 1e-12).all()
        assert setup.before() == setup.without.per_layer_step[later].mean()
        assert setup.hindsight() <= setup.bound()


def test_drift_costs_and_hindsight_does_better(setup, drifting):
    assert drifting.after() < drifting.hindsight() < setup.hindsight() - 0.03


def test_the_course_jumps_at_the_first_rearrangement(setup):
    rows = every_column_is_known(balancing.course([setup])).filter(pl.col("balance_of") == WITH)
    before = rows.filter(pl.col("step") <= 100)["balancedness_per_layer_step"]
    after = rows.filter(pl.col("step") > 100)["balancedness_per_layer_step"]
    assert before.max() + 0.2 < after.min()
    assert rows["window_steps"].unique().to_list() == [None, 100]


def test_moves_by_hand(drifting):
    (first, second) = every_column_is_known(balancing.moves([drifting], {"target": 0.5}, 100.0)).to_dicts()
    assert [first["step"], second["step"]] == [100, 500]
    changed = drifting.balanced.rearrangements[0].moved
    assert first["num_experts_moved"] == changed.sum()
    assert first["moved_percent"] == pytest.approx(100 * changed.sum() / (3 * 72))
    assert first["moved_gb_per_rank"] == changed.sum(axis=0).max() * 0.5
    assert first["move_ms"] == pytest.approx(first["moved_gb_per_rank"] * 10)


def test_recovered_against_uniform_and_bound(setup):
    (row,) = every_column_is_known(balancing.recoverable([("stays", setup)], {("target", WITH): 0.9})).to_dicts()
    before, after = row["before"], row["after"]
    assert row["recovered_percent"] == pytest.approx(100 * (after - before) / (row["uniform_balancedness"] - before))
    assert row["recovered_of_bound_percent"] == pytest.approx(
        100 * (after - before) / (row["balancedness_bound"] - before)
    )
    assert row["printed_after"] == 0.9


def test_definitions_of_the_same_steps(drifting):
    rows = every_column_is_known(balancing.replayed_definitions([drifting]))
    value = {(r["balance_of"], r["definition"]): r for r in rows.to_dicts()}
    for balance_of in (WITHOUT, WITH):
        assert value[balance_of, PER_LAYER_STEP]["bias"] == 0
        # layers of a step have equal totals, so the log's ratio reads lower; sums hide what chance does
        assert value[balance_of, balancing.LOG_LINE]["bias"] <= 1e-12
        assert value[balance_of, balancing.WINDOW]["bias"] > 0
        assert value[balance_of, SUMMED_LOADS]["balancedness"] >= value[balance_of, balancing.WINDOW]["balancedness"]


def test_redundancy_window_and_memory(setup, drifting):
    few = every_column_is_known(balancing.by_redundancy([shortened(setup, 200)], [0, 1]))
    assert few["after"][1] > few["after"][0]
    assert (few["after"] <= few["balancedness_bound"]).all()
    longer = balancing.by_memory([setup], [2_000.0, 100_000.0])
    assert longer["after"][1] > longer["after"][0] + 0.02
    often = every_column_is_known(balancing.by_window(drifting, [50, 400], [100, 400]))
    value = {(r["window_steps"], r["interval_steps"]): r["after"] for r in often.to_dicts()}
    assert value[50, 100] > value[50, 400]
    assert value[50, 100] > value[400, 100], "older load misleads under drift"
    assert often["rearrangements_per_1000_steps"].to_list() == [10, 2.5] * 2


# the experiment's scenarios


@pytest.fixture(scope="module")
def scenarios():
    batches = {"target": BATCH, "draft": Batch("draft", 8, 50, 2, 32, 2)}
    printed = {("target", WITHOUT): 0.5, ("target", WITH): 0.9, ("draft", WITHOUT): 0.45, ("draft", WITH): 0.85}
    return Scenarios(batches, batches, printed, EPLB, 10_000.0, 1)


def test_every_scenario_is_complete(scenarios):
    assert scenarios.recoverable.height == 4
    assert scenarios.recoverable["recovered_percent"].null_count() == 0
    assert set(scenarios.assumptions["part"]) == {"target", "draft"}
    assert scenarios.assumptions.height == 12
    for row in scenarios.assumptions.to_dicts():
        assert row["before"] == pytest.approx(scenarios.printed[row["part"], WITHOUT], abs=0.05), row["assumption"]
    assert 1 in scenarios.by_redundancy["redundant_per_rank"]
    assert {100, 400} <= {*scenarios.by_window["window_steps"], *scenarios.by_window["interval_steps"]}
    assert 10_000.0 in scenarios.by_memory["memory_steps"]
    assert sorted(scenarios.by_ep_size.filter(pl.col("part") == "draft")["num_ranks"]) == [4, 8, 16, 32]


def test_experts_weigh_what_the_checkpoint_says():
    size = _expert_gb()
    # 543.2 and 14 billion weights at 4 bit and a scale byte per 32, over 40 × 384 and 3 × 128 experts
    assert size["target"] == pytest.approx(543.2 * (0.5 + 1 / 32) / (40 * 384))
    assert size["draft"] == pytest.approx(14 * (0.5 + 1 / 32) / (3 * 128))


# at the published setting


def test_the_replay_comes_to_the_printed_figures():
    """Fitted: two skews to the figures without EPLB, one drift to the target's with it. The draft's is foretold."""
    found = {
        (r["part"], r["assumption"]): r for r in experiment.collect(experiment.Params()).replays.recoverable.to_dicts()
    }
    assert found["target", balancing.DRIFTS]["after"] == pytest.approx(0.94, abs=0.005)
    assert found["target", balancing.DRIFTS]["recovered_percent"] == pytest.approx(96.7, abs=1)
    assert found["draft", balancing.DRIFTS]["after"] == pytest.approx(0.89, abs=0.04)
    for part, uniform in (("target", 0.961), ("draft", 0.941)):
        assert found[part, balancing.STAYS]["after"] == pytest.approx(uniform, abs=0.006)


# time


def test_cost_by_hand():
    assert extra_ms([0.5, 0.8, 1.0], 0.8, 10.0).tolist() == pytest.approx([6, 0, -2])
    form = wide_ep.scaling()
    rows = {
        (r["cost_reading"], r["balancedness_per_layer_step"]): r for r in cost([0.35, 0.96], 0.96, form, 32).to_dicts()
    }
    assert rows[CONSTANT_PART, 0.96]["extra_ms"] == 0
    assert rows[CONSTANT_PART, 0.35]["extra_ms"] == pytest.approx(4.943 * (0.96 / 0.35 - 1), abs=0.01)
    assert rows[ALL_WORK, 0.35]["extra_ms"] == pytest.approx(6.0 * (0.96 / 0.35 - 1))
    assert rows[ALL_WORK, 0.35]["extra_percent"] == pytest.approx(100 * rows[ALL_WORK, 0.35]["extra_ms"] / 16.0)
    with pytest.raises(ParameterError, match="above 0 to 1"):
        extra_ms([0.0], 0.9, 1.0)


# loads of one's own


def skewed(num_steps, seed=1):
    router = Router(3, 16, 2, 400, 1.2, seed=seed)
    return checked(np.concatenate(list(router.steps(num_steps))), top_k=2, where="mine.npy")


def test_states_of_own_loads():
    found = every_column_is_known(audit.states(skewed(40), 4, 4, seed=1))
    value = {r["balance_of"]: r for r in found.to_dicts()}
    without, with_eplb = value[WITHOUT], value[WITH]
    assert without["origin"] == "measured"
    assert with_eplb["origin"] == "simulated"
    assert without["balancedness_per_layer_step"] + 0.2 < with_eplb["balancedness_per_layer_step"]
    assert with_eplb["balancedness_per_layer_step"] < value[audit.BOUND]["balancedness_per_layer_step"]
    assert with_eplb["balancedness_per_layer_step"] == pytest.approx(
        value[audit.UNIFORM]["balancedness_per_layer_step"], abs=0.03
    )
    assert without["balancedness_of_sums"] <= without["balancedness_per_layer_step"] + 1e-12
    assert {r["num_steps"] for r in value.values()} == {20}
    assert value[WITH]["formula"] == "placed by step 1 to 20"


def test_one_step_is_judged_on_itself():
    found = audit.states(skewed(1), 4, 4, seed=1)
    assert audit.ON_ITSELF in found["balance_of"]
    assert WITH not in found["balance_of"]


def test_own_experts_must_divide_among_the_ranks():
    with pytest.raises(ParameterError, match="mine.npy: 16 experts cannot be spread evenly over 3 ranks"):
        audit.states(skewed(2), 3, 3, seed=1)


def test_places_are_the_busiest_first():
    places = every_column_is_known(audit.by_place(skewed(40)))
    for layer in range(3):
        rows = places.filter(pl.col("layer") == layer)
        assert rows["expert_place"].to_list() == list(range(1, 17))
        assert rows["expert_load_to_mean"].is_sorted(descending=True)
        assert rows["expert_load_to_mean"].mean() == pytest.approx(1)
    assert audit.no_places().schema == places.schema


LOG = (
    "INFO EPLB step: 10 for model lab: avg_tokens=12.00, max_tokens=24, balancedness=0.5000, "
    "steps until the next rearrangement: 90\n"
    "INFO EPLB step: 20 for model lab: avg_tokens=12.00, max_tokens=16, balancedness=0.7500, "
    "steps until the next rearrangement: 80\n"
    "INFO EPLB step: 30 for model lab: avg_tokens=0.00, max_tokens=0, balancedness=0.0000, "
    "steps until the next rearrangement: 70\n"
)


def test_a_servers_log_gives_the_ratio_of_sums_only():
    (row,) = every_column_is_known(audit.logged(logs.eplb_steps(LOG), "server.log")).to_dicts()
    assert row["balancedness_of_sums"] == 0.625
    assert row["balancedness_per_layer_step"] is None
    assert (row["num_steps"], row["origin"]) == (2, "measured")
    with pytest.raises(DataError, match="server.log: no line about EPLB's balancedness; start the server with log_bal"):
        audit.logged(logs.eplb_steps("nothing\n"), "server.log")


@pytest.mark.parametrize("name", ["mine.npy", "server.log"])
def test_the_experiment_reads_what_a_user_brings(tmp_path, name):
    path = tmp_path / name
    if name == "mine.npy":
        np.save(path, skewed(4).tokens)
    else:
        path.write_text(LOG)
    params = experiment.Params(
        ranks=4, experts=[16, 8], top_k=[2, 1], tokens_per_request=[2, 1], loads_path=str(path), draws=10
    )
    own = experiment.own_states(params)
    assert own["source"].str.ends_with(name).all()
    missing = params.model_copy(update={"loads_path": str(tmp_path / f"absent{path.suffix}")})
    with pytest.raises(DataError, match="no such file"):
        experiment.own_states(missing)


# the lab's run


def test_the_recorded_run_goes_through_the_chain():
    evidence = experiment.collect(experiment.Params(draws=10))
    assert evidence.run is not None, "a recorded run comes with the project"
    assert not evidence.run.flags
    lab = {r["balance_of"]: r for r in evidence.lab.to_dicts()}
    assert lab[WITHOUT]["origin"] == "measured"
    assert evidence.run.id in lab[WITHOUT]["source"]
    assert experiment.measured_subtitle(evidence).startswith("measured; 2 of 16 experts per token, ")
    assert 0.5 < lab[WITHOUT]["balancedness_per_layer_step"] < 1
    points = evidence.run.points()
    assert points["expert_tokens"].sum() == experiment.loads_of(evidence.run).tokens.sum()


def test_routed_tokens_are_held_against_the_requests():
    loads = skewed(3)
    check_tokens(loads, [(401, 400), (200, 201)])
    with pytest.raises(RackbookError, match="1200 tokens were routed, the requests have 1201"):
        check_tokens(loads, [(401, 400), (200, 202)])
    assert totals(loads)["expert_tokens"].sum() == 3 * 3 * 400 * 2
