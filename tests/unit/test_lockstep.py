"""The lockstep simulator, by hand and against the plain reference; imbalance measures; order statistics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep_reference as reference
from rackbook.errors import DataError, ParameterError
from rackbook.models import dp_loss, order_statistics
from rackbook.replay import imbalance
from rackbook.replay.calibration import LagReplay, excess_of, fit_depth
from rackbook.replay.lockstep import POLICIES, StepCost, replay, route
from rackbook.replay.queues import Queue, deal, lag, mirror

MS = 1_000_000
FLAT = StepCost(fixed_ms=1.0, us_per_token=10.0, ps_per_attended_token=0.0)
DEEP = StepCost(fixed_ms=0.0, us_per_token=1.0, ps_per_attended_token=1e6)  # 1 µs per attended token


def requests(*rows):
    """A queue of (arrival in ms, cached, new)."""
    arrival, cached, new = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Queue(arrival * MS, cached, new)


def as_lists(run):
    return [run.start_ns.tolist(), run.step_ns.tolist(), run.tokens.tolist(), run.attended_tokens.tolist()]


# by hand


def test_prompts_are_cut_at_the_cap_and_share_a_step():
    run = replay([requests((0, 0, 150), (0, 0, 30), (0, 0, 100))], FLAT, 100)
    assert run.tokens[:, 0].tolist() == [100, 100, 80]  # 100 | 50 + 30 + 20 | 80
    assert run.step_ns.tolist() == [2 * MS, 2 * MS, 1_800_000]  # 1 ms + 10 µs per token
    assert run.start_ns.tolist() == [0, 2 * MS, 4 * MS]


def test_depth_counts_the_prefix_the_earlier_chunk_and_the_token_itself():
    run = replay([requests((0, 10, 4), (0, 0, 2))], DEEP, 3)
    # tokens at positions 10, 11, 12 attend to 11, 12, 13; then the one at 13 to 14, and a new prompt's two to 1 and 2
    assert run.attended_tokens[:, 0].tolist() == [11 + 12 + 13, 14 + 1 + 2]
    assert run.step_ns.tolist() == [(3 + 36) * 1000, (3 + 17) * 1000]


def test_the_step_lasts_as_long_as_the_slowest_rank_and_the_idle_rank_runs_a_dummy_step():
    run = replay([requests((0, 0, 100)), requests((0, 0, 40)), requests((3, 0, 10))], FLAT, 100)
    assert run.step_ns.tolist() == [2 * MS, 1_100_000]
    assert run.own_ns.tolist() == [[2 * MS, 1_400_000, 1 * MS], [1 * MS, 1 * MS, 1_100_000]]
    assert run.start_ns.tolist() == [0, 3 * MS], "nobody has a token from 2 ms to 3 ms: no step, time jumps"


def test_shared_work_follows_the_mean_of_the_ranks():
    cost = StepCost(1.0, 10.0, 0.0, shared_us_per_token=20.0)
    run = replay([requests((0, 0, 100)), requests((0, 0, 40))], cost, 100)
    assert run.step_ns.tolist() == [MS + 100 * 10_000 + 70 * 20_000]
    mirrored = replay([requests((0, 0, 70))] * 2, cost, 100)
    assert mirrored.step_ns.tolist() == [MS + 70 * 30_000]
    assert (mirrored.step_ns == mirrored.own_ns[:, 0]).all()
    assert cost.alone_s(requests((0, 0, 70)), 100) == pytest.approx(3.1e-3)


def test_an_arrival_is_visible_to_the_step_that_starts_then_and_not_to_the_one_that_runs():
    at_start = replay([requests((0, 0, 100), (2, 0, 10))], FLAT, 100)
    assert at_start.tokens[:, 0].tolist() == [100, 10]
    assert at_start.start_ns.tolist() == [0, 2 * MS]
    during = replay([requests((0, 0, 50), (1, 0, 10))], FLAT, 100)
    assert during.tokens[:, 0].tolist() == [50, 10], "the running step has room but has begun"
    assert during.start_ns.tolist() == [0, 1_500_000]


def test_wait_for_the_prompt_ends_with_the_step_of_its_last_token():
    run = replay([requests((0, 0, 150), (1, 0, 30))], FLAT, 100)
    # steps end at 2 ms (100 tokens) and at 2 + 1.8 ms (50 + 30)
    assert run.wait_for_prompt_ns(0).tolist() == [3_800_000, 2_800_000]


def test_lag_delays_rank_by_rank_and_mirror_does_not():
    queue = requests((0, 0, 5), (7, 0, 5))
    assert [q.arrival_ns.tolist() for q in lag(queue, 3, 0.5)] == [
        [0, 7 * MS], [500 * MS, 507 * MS], [1000 * MS, 1007 * MS],
    ]  # fmt: skip
    assert all(q is queue for q in mirror(queue, 3))


def test_policies_by_hand():
    # long, short, short, then one more while nothing is finished
    stream = requests((0, 0, 90), (0, 0, 10), (0, 0, 10), (0, 0, 10))
    chosen = {policy: route(stream, 2, policy, FLAT, 100)[1].tolist() for policy in POLICIES}
    assert chosen["round-robin"] == [0, 1, 0, 1]
    assert chosen["least-requests"] == [0, 1, 0, 1]
    assert chosen["least-tokens"] == [0, 1, 1, 1]


def test_the_router_learns_results_when_the_next_step_has_started():
    # rank 0 gets 200 tokens, two steps of 2 ms; rank 1 gets 100, one step. At 2 ms both still seem to have one request,
    # and the tie goes to rank 0; at 2.5 ms rank 1 is known to have none.
    def chosen(third_ns):
        stream = Queue(np.array([0, 0, third_ns]), np.zeros(3, dtype=int), np.array([200, 100, 100]))
        return route(stream, 2, "least-requests", FLAT, 100)[1].tolist()

    assert chosen(2_000_000) == [0, 1, 0]
    assert chosen(2_500_000) == [0, 1, 1]


def test_a_request_that_ends_with_a_full_step_is_finished():
    # rank 0: 200 and 10 tokens, rank 1: 100 and 100; after the first step rank 0 has two requests left, rank 1 one
    arrival = np.array([0, 0, 0, 0, 2_500_000])
    stream = Queue(arrival, np.zeros(5, dtype=int), np.array([200, 100, 10, 100, 100]))
    assert route(stream, 2, "least-requests", FLAT, 100)[1].tolist() == [0, 1, 0, 1, 1]


# against the reference


@st.composite
def queues(draw, max_ranks=4):
    span = draw(st.sampled_from([0, 1, 1_000, 1_000_000, 100_000_000]))
    prompts = draw(st.sampled_from([3, 60, 900]))
    rows = st.lists(
        st.tuples(st.integers(0, span), st.integers(0, 50), st.integers(1, prompts)), min_size=0, max_size=25
    )
    ranks = draw(st.lists(rows, min_size=1, max_size=max_ranks))
    return [Queue(*np.array(sorted(rank), dtype=np.int64).reshape(-1, 3).T) for rank in ranks]


step_costs = st.builds(
    StepCost,
    fixed_ms=st.sampled_from([0.0, 1e-6, 0.013]),
    us_per_token=st.sampled_from([1e-3, 0.7, 33.3]),
    ps_per_attended_token=st.sampled_from([0.0, 5.0, 1e5]),
    shared_us_per_token=st.sampled_from([0.0, 0.4, 21.7]),
)


@given(queues(), step_costs, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_equals_the_reference_to_the_nanosecond(ranks, cost, cap):
    assert as_lists(replay(ranks, cost, cap)) == reference.replay(ranks, cost, cap)


@given(queues(max_ranks=1), st.integers(1, 5), st.sampled_from([0.0, 1e-6, 1e-4]), step_costs, st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_mirror_and_lag_equal_the_reference(queue, num_ranks, lag_s, cost, cap):
    for plan in (mirror(queue[0], num_ranks), lag(queue[0], num_ranks, lag_s)):
        assert as_lists(replay(plan, cost, cap)) == reference.replay(plan, cost, cap)


@given(queues(max_ranks=1), st.integers(1, 5), st.sampled_from(POLICIES), step_costs, st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_routing_equals_the_reference(stream, num_ranks, policy, cost, cap):
    run, chosen = route(stream[0], num_ranks, policy, cost, cap)
    expected, expected_choice = reference.route(stream[0], num_ranks, policy, cost, cap)
    assert chosen.tolist() == expected_choice
    assert as_lists(run) == expected


def test_a_long_stretch_that_arrivals_cut_equals_the_reference():
    generator = np.random.default_rng(3)
    long = Queue(
        np.sort(generator.integers(0, 4_000 * MS, 60)), np.zeros(60, dtype=int), generator.integers(1, 30_000, 60)
    )
    sparse = Queue(
        np.sort(generator.integers(0, 9_000 * MS, 40)), np.zeros(40, dtype=int), generator.integers(1, 50, 40)
    )
    ranks = [long, sparse, long.at_once()]
    assert as_lists(replay(ranks, FLAT, 100)) == reference.replay(ranks, FLAT, 100)


@given(queues(), step_costs, st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_all_tokens_are_computed_once_and_steps_do_not_overlap(ranks, cost, cap):
    run = replay(ranks, cost, cap)
    assert run.tokens.sum(axis=0).tolist() == [int(q.new_tokens.sum()) for q in ranks]
    assert run.attended_tokens.sum(axis=0).tolist() == [int(q.attended_tokens.sum()) for q in ranks]
    assert (run.start_ns[1:] >= run.end_ns[:-1]).all()
    assert (run.tokens <= cap).all()
    assert run.step_ns.tolist() == np.rint(cost.step_ns(run.tokens, run.attended_tokens)).astype(int).tolist()
    if not cost.shared_us_per_token:  # else the slowest rank may have fewer tokens than the mean of all
        assert run.step_ns.tolist() == run.own_ns.max(axis=1, initial=0).tolist()
    assert (run.step_ns >= np.floor(run.own_ns.mean(axis=1))).all()


# what imbalance is and what it is not


def lengths(seed, num, mean):
    tokens = np.random.default_rng(seed).exponential(mean, num).astype(np.int64) + 1
    return Queue(np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64), tokens)


def test_a_mirror_replay_never_waits():
    run = replay(mirror(lengths(0, 50, 5_000), 4), StepCost(1, 10, 1_000), 1_000)
    assert imbalance.excess(run.own_ns, run.step_ns) == 0


def test_full_steps_without_a_cost_of_depth_show_no_imbalance_but_the_whole_run_shows_the_stagger():
    queue = lengths(0, 200, 5_000)
    run = replay(lag(queue, 4, 0.5), FLAT, 1_000)
    assert excess_of(run) == 0
    mirrored = replay(mirror(queue, 4), FLAT, 1_000)
    whole = 1 - mirrored.end_ns[-1] / run.end_ns[-1]
    # a lag ends with a step that has begun: at most one step of 11 ms per rank more than the bare stagger
    assert whole == pytest.approx(dp_loss.stagger_loss(4, 0.5, mirrored.end_ns[-1] * 1e-9), abs=0.003)


def test_depth_makes_lagged_ranks_wait_as_much_as_the_throughputs_say():
    queue = lengths(1, 3_000, 20_000)
    cost = StepCost(0, 10, 400)
    lagged = replay(lag(queue, 2, 3.0), cost, 1_000)
    window = imbalance.common_window(lagged.tokens)
    lag_rate = lagged.tokens[window].sum() / lagged.step_ns[window].sum()
    mirrored = replay(mirror(queue, 2), cost, 1_000)
    mirror_rate = mirrored.tokens.sum() / mirrored.step_ns.sum()
    lost = imbalance.loss(lagged.own_ns[window], lagged.step_ns[window])
    assert lost > 0.1
    assert 1 - lag_rate / mirror_rate == pytest.approx(lost, rel=0.02)


def test_independent_exponential_depths_follow_order_statistics():
    # prompts of exponential length, seen at a random chunk, have exponential depth: excess 1/2 + 1/3 + 1/4 to 1/2
    lag_replay = LagReplay((lengths(2, 8_000, 20_000),), 3.0, 200, StepCost(0, 1e-3, 1_000))
    ratio = lag_replay.excess(4)[0] / lag_replay.excess(2)[0]
    assert ratio == pytest.approx(order_statistics.ratio(order_statistics.exponential, 4), rel=0.03)


def test_common_window_by_hand():
    tokens = np.array([[5, 0], [5, 5], [0, 5], [5, 5], [2, 5], [0, 5]])
    assert imbalance.common_window(tokens) == slice(1, 4), "a pause inside the window stays in it"
    with pytest.raises(DataError, match="last rank begins in step 2, the first ends in step 1; shorten the lag"):
        imbalance.common_window(np.array([[5, 0], [5, 0], [0, 5], [0, 5]]))
    with pytest.raises(DataError, match="rank 1 has no tokens in any of 2 steps"):
        imbalance.common_window(np.array([[5, 0], [5, 0]]))


def test_excess_and_loss_by_hand():
    own, step = np.array([[4.0, 2.0], [1.0, 3.0]]), np.array([4.0, 3.0])
    assert imbalance.excess(own, step) == pytest.approx(7 / 5 - 1)
    assert imbalance.loss(own, step) == pytest.approx(1 - 5 / 7)


def test_stagger_and_its_inverse():
    assert dp_loss.stagger_loss(4, 5.0, 85.0) == pytest.approx(0.15)
    assert dp_loss.run_s_of_stagger_loss(4, 5.0, 0.15) == pytest.approx(85.0)


# calibration


def test_calibrated_cost_gives_the_rate_of_a_rank_alone():
    queue = lengths(4, 300, 20_000)
    lag_replay = LagReplay((queue,), 1.0, 1_000, StepCost(2.0, 1.0, 300.0)).calibrated(50_000)
    alone = replay([queue], lag_replay.cost, 1_000)
    assert queue.new_tokens.sum() / (alone.end_ns[-1] * 1e-9) == pytest.approx(50_000, rel=1e-6)
    assert lag_replay.cost.alone_s(queue, 1_000) == pytest.approx(alone.end_ns[-1] * 1e-9, rel=1e-6)


def test_calibration_without_time_left_says_what_to_lower():
    with pytest.raises(
        ParameterError, match="fixed_ms = 30 .*take longer than 50,000 tokens/s allow; lower one of them"
    ):
        LagReplay((lengths(4, 30, 20_000),), 1.0, 1_000, StepCost(30.0, 1.0, 0.0)).calibrated(50_000)


def test_fitted_depth_meets_the_wanted_excess_or_says_it_cannot():
    lag_replay = LagReplay((lengths(5, 400, 20_000),), 1.0, 1_000, StepCost(1.0, 1.0, 0.0))
    fitted = fit_depth(lag_replay, 2, 0.1, 50_000)
    assert fitted.excess(2).mean() == pytest.approx(0.1, abs=1e-3)
    assert fitted.us_per_token_at(50_000) == pytest.approx(fitted.cost.us_per_token)
    assert fit_depth(lag_replay, 2, 5.0, 50_000) is None, "two ranks cannot wait for five times their own time"


# order statistics


def test_expected_largest_by_hand():
    assert order_statistics.normal(2) == pytest.approx(1 / np.sqrt(np.pi), abs=1e-9)
    assert order_statistics.normal(4) == pytest.approx(1.0293753730, abs=1e-9)  # the tables' value
    assert order_statistics.exponential(4) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4)
    assert order_statistics.uniform(4) == pytest.approx(4 / 5 - 1 / 2)
    assert order_statistics.spikes(0.5)(2) == pytest.approx(3 / 4 - 1 / 2)
    # the larger of two lognormal draws: 2·e^(s²/2)·Φ(s/√2)
    assert order_statistics.lognormal(1.0)(2) == pytest.approx(np.exp(0.5) * (2 * 0.7602499389 - 1), abs=1e-7)


@pytest.mark.parametrize(
    "law", [order_statistics.normal, order_statistics.exponential, order_statistics.lognormal(1.2)]
)
def test_laws_against_random_draws(law):
    generator = np.random.default_rng(0)
    draws = {
        order_statistics.normal: generator.standard_normal,
        order_statistics.exponential: generator.standard_exponential,
    }.get(law, lambda shape: np.exp(1.2 * generator.standard_normal(shape)))((200_000, 4))
    assert draws.max(axis=1).mean() - draws.mean() == pytest.approx(law(4), rel=0.02)


def test_spikes_tend_to_one_less_than_the_ranks_and_their_ratio_has_a_closed_form():
    assert order_statistics.ratio(order_statistics.spikes(1e-6), 4) == pytest.approx(3, abs=1e-5)
    q = 0.8
    assert order_statistics.ratio(order_statistics.spikes(1 - q), 4) == pytest.approx(1 + q + q * q)


def test_parameter_of_a_law_and_its_limits():
    p = order_statistics.parameter_of(order_statistics.spikes, 4, 1 + 0.8 + 0.64, (1e-6, 0.99))
    assert p == pytest.approx(0.2, abs=1e-6)
    with pytest.raises(ParameterError, match=r"ratio: got 3\.500, allowed: 1\.0.* to 3\.000"):
        order_statistics.parameter_of(order_statistics.spikes, 4, 3.5, (1e-6, 0.99))
    with pytest.raises(ParameterError, match="allowed: ≥ 2"):
        order_statistics.ratio(order_statistics.normal, 4, 1)


# bad input


def test_bad_queues_are_refused():
    with pytest.raises(DataError, match="new_tokens, request 1: got 0, allowed: ≥ 1"):
        requests((0, 0, 5), (0, 0, 0))
    with pytest.raises(DataError, match="arrival_ns, request 1: earlier than the one before"):
        requests((5, 0, 5), (4, 0, 5))
    with pytest.raises(DataError, match="one entry per request"):
        Queue(np.zeros(2, dtype=int), np.zeros(1, dtype=int), np.ones(2, dtype=int))
    with pytest.raises(DataError, match="new_tokens: got float64, allowed: whole numbers"):
        Queue(np.zeros(1, dtype=int), np.zeros(1, dtype=int), np.array([1.5]))


def test_bad_settings_are_refused():
    queue = requests((0, 0, 5))
    with pytest.raises(ParameterError, match="max_num_batched_tokens: got 0"):
        replay([queue], FLAT, 0)
    with pytest.raises(ParameterError, match="num_ranks: got 0"):
        replay([], FLAT, 1)
    with pytest.raises(ParameterError, match="num_ranks: got 0"):
        mirror(queue, 0)
    with pytest.raises(ParameterError, match="lag_s: got -1"):
        lag(queue, 2, -1)
    with pytest.raises(
        ParameterError, match=r"unknown policy: got 'least_tokens', allowed: .*Did you mean 'least-tokens'"
    ):
        route(queue, 2, "least_tokens", FLAT, 1)
    with pytest.raises(ParameterError, match="us_per_token: got nan"):
        StepCost(1.0, float("nan"), 0.0)
    with pytest.raises(ParameterError, match="both 0: a step must take time"):
        StepCost(0.0, 0.0, 1.0)


def test_dealing_keeps_order_and_empty_ranks():
    queue = requests((0, 0, 1), (1, 0, 2), (2, 0, 3))
    dealt = deal(queue, np.array([2, 0, 2]), 4)
    assert [q.new_tokens.tolist() for q in dealt] == [[2], [], [1, 3], []]
