"""The router with preferences, and balancing replayed step by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackbook.errors import DataError, ParameterError
from rackbook.experts.balancedness import balancedness_per_layer_step
from rackbook.experts.placement import initial, place
from rackbook.experts.popularity import FAMILIES, Router, calibrated
from rackbook.experts.replay import Block, Eplb, in_blocks, replay
from rackbook.experts.routing import sample_expert_counts

ROUTER = Router(num_layers=3, num_experts=32, top_k=4, num_tokens=600, skew=1.0)


def dense(router, num_steps):
    return np.concatenate(list(router.steps(num_steps, 25)))


# the router


@settings(deadline=None)
@given(
    st.floats(0, 40),
    st.integers(1, 8),
    st.sampled_from(FAMILIES),
    st.sampled_from([1, 7, 3000]),
    st.floats(1, 20),
)
def test_every_token_goes_to_top_k_experts(skew, top_k, family, num_tokens, alike):
    router = Router(2, 8, top_k, num_tokens, skew, tokens_alike=alike, family=family, memory_steps=50)
    chances = router.first_chances()
    assert chances.sum(axis=1) == pytest.approx([top_k] * 2)
    assert chances.min() >= 0
    assert chances.max() <= 1 + 1e-9
    tokens = dense(router, 30)
    assert tokens.shape == (30, 2, 8)
    assert (tokens.sum(axis=-1) == num_tokens * top_k).all()
    assert tokens.min() >= 0
    assert tokens.max() <= num_tokens


def test_without_skew_it_is_uniform_routing():
    router = Router(1, 32, 4, 600, 0.0)
    exact = sample_expert_counts(num_tokens=600, num_experts=32, top_k=4, num_draws=4000, seed=2)
    ours = dense(router, 4000)[:, 0]
    assert ours.mean(axis=0) == pytest.approx([75] * 32, abs=1)
    assert ours.var(axis=0).mean() == pytest.approx(exact.var(axis=0).mean(), rel=0.03)
    # a fixed total pulls two experts apart by 1 ÷ (experts − 1)
    assert np.corrcoef(ours, rowvar=False)[0, 1:].mean() == pytest.approx(-1 / 31, abs=0.01)


def test_chances_are_those_of_drawing_without_replacement():
    router = Router(1, 200, 5, 10, 1.2)
    chances = router.first_chances()[0]
    popularity = -np.log1p(-chances)
    # exponential arrival times: the first five are the token's experts
    arrivals = np.random.default_rng(3).exponential(size=(40_000, 200)) / popularity
    chosen = np.argpartition(arrivals, 5, axis=1)[:, :5]
    found = np.bincount(chosen.ravel(), minlength=200) / 40_000
    assert found == pytest.approx(chances, abs=0.03)


def test_tokens_scatter_as_independent_ones_and_as_fewer():
    chances = ROUTER.first_chances()
    for alike in (1, 4):
        tokens = dense(Router(**(vars(ROUTER) | {"tokens_alike": alike})), 3000)
        assert tokens.mean(axis=0) == pytest.approx(600 * chances, rel=0.05, abs=0.7)
        popular = chances > 0.1
        assert (tokens.var(axis=0) / (alike * 600 * chances * (1 - chances)))[popular].mean() == pytest.approx(
            1, abs=0.1
        )


def test_an_expert_that_all_tokens_pick_does_not_scatter():
    router = Router(1, 8, 2, 4000, 3.0)
    chances = router.first_chances()[0]
    assert 0.99 < chances.max() < 1
    tokens = dense(router, 2000)[:, 0]
    expected = 4000 * chances * (1 - chances)
    busiest = chances.argmax()
    assert tokens[:, busiest].var() == pytest.approx(expected[busiest], rel=0.25, abs=0.5)


def test_blocks_are_sums_of_the_same_law():
    blocks = list(ROUTER.blocks(2500, 25))
    assert [b.num_steps for b in blocks] == [25] * 100
    totals = np.array([b.total for b in blocks])
    assert (totals.sum(axis=-1) == 25 * 600 * 4).all()
    expected = 25 * 600 * ROUTER.first_chances()
    assert totals.mean(axis=0) == pytest.approx(expected, rel=0.03, abs=6)
    scatter = totals.var(axis=0) / (expected * (1 - ROUTER.first_chances()))
    assert scatter[expected > 300].mean() == pytest.approx(1, abs=0.1)
    assert all((b.total >= b.tokens.sum(axis=0)).all() for b in blocks)
    assert {tuple(b.offsets) for b in blocks} == {(0, 12)}
    (alone,) = ROUTER.blocks(1, 25)
    assert (alone.total == alone.tokens[0]).all()
    assert [b.num_steps for b in ROUTER.blocks(30, 25)] == [25, 5]


def correlation(one, other):
    return float(np.corrcoef(np.log(one).ravel(), np.log(other).ravel())[0, 1])


def test_layers_and_steps_are_as_alike_as_asked_for():
    router = Router(60, 64, 2, 100, 0.5, layer_correlation=0.6)
    scores = np.log(-np.log1p(-router.first_chances()))
    between = np.corrcoef(scores)[np.triu_indices(60, 1)]
    assert between.mean() == pytest.approx(0.6, abs=0.1)
    drifting = Router(40, 64, 2, 10_000, 0.5, memory_steps=200)
    tokens = dense(drifting, 225) + 0.5
    assert correlation(tokens[0], tokens[24]) > 0.97, "nothing drifts while popularities are held"
    assert correlation(tokens[0], tokens[200]) == pytest.approx(np.exp(-1), abs=0.06)
    fixed = dense(Router(40, 64, 2, 10_000, 0.5), 225) + 0.5
    assert correlation(fixed[0], fixed[-1]) > 0.97


@pytest.mark.parametrize("family", FAMILIES)
def test_calibration_meets_its_figure(family):
    router = calibrated(Router(8, 64, 4, 5000, 0.0, family=family), 0.5, 8)
    by_rank = router.first_chances().reshape(8, 8, 8).sum(axis=-1)
    assert balancedness_per_layer_step(by_rank).mean() == pytest.approx(0.5, abs=1e-4)
    drawn = dense(router, 50).reshape(50, 8, 8, 8).sum(axis=-1)
    assert balancedness_per_layer_step(drawn).mean() == pytest.approx(0.5, abs=0.01)


def test_a_seed_gives_the_same_tokens():
    assert (dense(ROUTER, 60) == dense(ROUTER, 60)).all()
    other = Router(**(vars(ROUTER) | {"seed": 2}))
    assert (dense(ROUTER, 60) != dense(other, 60)).any()
    assert (ROUTER.first_chances() != other.first_chances()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skew": -1}, "skew: got -1"),
        ({"top_k": 33}, "top_k: got 33, allowed: 1 to num_experts, which is 32"),
        ({"layer_correlation": 1.1}, "layer_correlation: got 1.1, allowed: 0 to 1"),
        ({"memory_steps": 0}, "memory_steps: got 0"),
        ({"tokens_alike": 0.5}, "tokens_alike: got 0.5"),
        ({"family": "normal"}, "family: got 'normal', allowed: log-normal"),
        ({"num_layers": 0}, "num_layers: got 0"),
    ],
)
def test_no_such_router(change, message):
    with pytest.raises(ParameterError, match=message):
        Router(**(vars(ROUTER) | change))


def test_a_balancedness_that_no_skew_gives():
    with pytest.raises(ParameterError, match=r"got 0.1, allowed: above 0\.\d+, .* and below 1"):
        calibrated(ROUTER, 0.1, 4)
    with pytest.raises(ParameterError, match="cannot be spread evenly over 5 ranks"):
        calibrated(ROUTER, 0.5, 5)


# when


def test_the_first_rearrangement_comes_after_a_quarter():
    eplb = Eplb(4, 0, 1000, 3000)
    assert list(eplb.decisions(10_000)) == [750, 3750, 6750, 9750]
    assert list(Eplb(4, 0, 10, 3).decisions(8)) == [1, 4, 7], "an interval below 4 rearranges after the first step"
    assert list(eplb.decisions(750)) == []


def test_blocks_fit_the_edges():
    assert Eplb(4, 0, 1000, 3000).edges(5000) == [750, 2750, 3750, 5000]
    assert Eplb(4, 0, 1000, 3000).block_steps(5000, 25) == 25
    assert Eplb(4, 0, 1000, 3000).block_steps(5000, 60) == 50
    assert Eplb(4, 0, 1000, 3000, delay_steps=7).block_steps(5000, 25) == 1


# what


def swap(steps, at):
    """Two layers, four experts: expert 0 is the busy one, from step ``at`` on expert 3."""
    tokens = np.zeros((steps, 2, 4), int)
    tokens[:at] = [6, 2, 2, 2]
    tokens[at:] = [2, 2, 2, 6]
    return tokens


def test_replay_by_hand():
    # two ranks, six slots: 0 1 2 | 3 0 1 at first; 0 has 6 tokens: 3 + 1 + 2 against 2 + 3 + 1
    tokens = swap(24, 16)
    eplb = Eplb(num_ranks=2, num_redundant=2, window_steps=4, interval_steps=16)
    found = replay(in_blocks(tokens), 24, eplb)
    assert found.steps.tolist() == list(range(24))
    assert found.period.tolist() == [0] * 4 + [1] * 16 + [2] * 4
    assert found.means.tolist() == [[6.0] * 2] * 24
    assert found.maxima[0].tolist() == [6, 6]
    first, second = found.rearrangements
    assert (first.step, first.window_steps, second.step, second.window_steps) == (4, 4, 20, 4)
    assert (second.placement.num_replicas == place([[8, 8, 8, 24]] * 2, 6, 2).num_replicas).all()
    assert first.planned == 1
    assert (first.moved == initial(2, 4, 2, 2).moved_to(first.placement)).all()
    assert (second.moved == first.placement.moved_to(second.placement)).all()
    assert second.moved.sum() > 0
    # stale: expert 3 has one copy and gets 6; at best 6 + 1 (half of a 2) + … on its rank
    stale = first.placement.rank_loads(tokens[17:18]).max(axis=-1)
    assert (found.maxima[17] == stale[0]).all()
    assert found.balancedness(2) > found.per_layer_step[17].mean()


def test_unbalanced_experts_stay_where_they_are():
    tokens = swap(24, 99)
    found = replay(in_blocks(tokens), 24, Eplb(2, 2, 4, 16), policy=None)
    assert not found.rearrangements
    assert found.maxima.tolist() == [[8, 8]] * 24
    assert found.balancedness(0) == 0.75


def test_a_window_holds_the_last_steps_and_the_first_is_short():
    seen = []

    def spy(loads, *arguments, **options):
        seen.append(np.array(loads))
        return place(loads, *arguments, **options)

    tokens = np.random.default_rng(1).integers(0, 50, (60, 2, 8))
    replay(in_blocks(tokens, 7), 60, Eplb(4, 4, 30, 20), policy=spy)
    assert len(seen) == 3
    for loads, (since, until) in zip(seen, [(0, 5), (0, 25), (15, 45)], strict=True):
        assert (loads == tokens[since:until].sum(axis=0)).all()


def test_a_delay_serves_the_old_placement_longer():
    tokens = np.random.default_rng(1).integers(1, 50, (60, 2, 8))
    at_once, later = (replay(in_blocks(tokens), 60, Eplb(4, 4, 20, 20, delay_steps=n)) for n in (0, 3))
    assert [int((later.period == n).sum()) for n in range(4)] == [8, 20, 20, 12]
    assert [r.step for r in later.rearrangements] == [5, 25, 45]
    assert (later.maxima[:5] == at_once.maxima[:5]).all()
    start = initial(2, 8, 4, 4)
    assert (later.maxima[5:8] == start.rank_loads(tokens[5:8]).max(axis=-1)).all()
    assert (later.maxima[8:25] == at_once.maxima[8:25]).all()


@settings(deadline=None)
@given(st.integers(1, 30))
def test_block_size_changes_nothing(size):
    tokens = np.random.default_rng(1).integers(0, 50, (50, 2, 8)) + 1
    whole, cut = (replay(in_blocks(tokens, n), 50, Eplb(4, 4, 12, 16)) for n in (50, size))
    assert (whole.maxima == cut.maxima).all()
    assert [r.step for r in whole.rearrangements] == [r.step for r in cut.rearrangements]


def test_balancing_recovers_a_steady_skew():
    router = calibrated(Router(4, 64, 4, 4000, 0.0), 0.5, 8)
    eplb = Eplb(8, 8, 100, 200)
    blocks = list(router.blocks(450, 25))
    without = replay(blocks, 450, eplb, policy=None)
    found = replay(blocks, 450, eplb, rng=np.random.default_rng(1))
    assert without.balancedness(0) == pytest.approx(0.5, abs=0.01)
    assert found.balancedness(1) > 0.93
    assert found.rearrangements[0].planned > found.balancedness(1), "chance in a step is not in the window's sum"


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: replay(in_blocks(swap(10, 5)), 20, Eplb(2, 2, 4, 16)), DataError, "end after 10 steps, expected 20"),
        (lambda: replay([], 20, Eplb(2, 2, 4, 16)), DataError, "end after 0 steps"),
        (lambda: replay(in_blocks(swap(20, 5)), 20, Eplb(2, 1, 4, 16)), ParameterError, "5 slots"),
        (
            lambda: replay([Block(20, swap(20, 9).sum(axis=0), swap(1, 0), np.zeros(1, int))], 20, Eplb(2, 2, 4, 16)),
            DataError,
            "block of 20 steps is known as a sum and cannot be cut after 4",
        ),
        (
            lambda: replay([Block.of(swap(4, 2)), Block.of(swap(16, 2)[:, :1])], 20, Eplb(2, 2, 4, 16)),
            DataError,
            r"step 4: \(layers, experts\) is \(1, 4\)",
        ),
        (lambda: list(in_blocks(np.zeros((3, 4)))), DataError, r"\(steps, layers, experts\), got \(3, 4\)"),
        (lambda: Eplb(2, 2, 0, 16), ParameterError, "window_steps: got 0"),
        (lambda: Eplb(2, 2, 4, 16, delay_steps=4), ParameterError, "delay_steps: got 4, allowed: 0 to 3"),
        (lambda: replay(in_blocks(swap(20, 5)), 20, Eplb(2, 2, 4, 16)).balancedness(3), ParameterError, "0 to 1"),
    ],
)
def test_impossible_replays_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
