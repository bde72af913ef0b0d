"""The admission simulation: cases worked out by hand, laws that hold for any arrivals, and the drawing of arrivals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackbook.errors import ParameterError
from rackbook.hostwork.admission import Arrivals, draw_arrivals, one_burst, simulate
from rackbook.hostwork.cap_sweep import compare_caps

MEGA = 1_000_000
"""Prompt whose admission costs 1 ms at 1 ns per token."""


def arrivals(rows, num_ranks=2, window_ms=0.0):
    """Rows of arrival time, rank and admission cost in ms (at 1 ns per token)."""
    times, ranks, costs = zip(*rows, strict=True)
    return Arrivals(
        np.array(times, float), np.array(ranks), np.array(costs) * MEGA, num_ranks, max(window_ms, max(times))
    )


FOUR = arrivals([(0, 0, 2), (0, 0, 3), (5, 0, 1), (11, 1, 4)])


def test_four_requests_with_a_cap_of_one_by_hand():
    run = simulate(FOUR, cap=1, ns_per_token=1, base_step_ms=10)
    # from 0: rank 0 admits 2 ms of work; from 12: rank 0 3 ms, rank 1 4 ms, the slower decides; from 26: rank 0 1 ms
    assert run.step_start_ms.tolist() == pytest.approx([0, 12, 26])
    assert run.step_ms.tolist() == pytest.approx([12, 14, 11])
    assert run.work_ms.tolist() == pytest.approx([2, 7, 1])
    assert run.step_of_request.tolist() == [0, 1, 2, 1]
    assert run.delay_ms.tolist() == pytest.approx([12, 26, 32, 15])


def test_four_requests_without_a_cap_by_hand():
    run = simulate(FOUR, cap=None, ns_per_token=1, base_step_ms=10)
    # from 0: 2 + 3 ms; from 15: rank 0 1 ms, rank 1 4 ms
    assert run.step_ms.tolist() == pytest.approx([15, 14])
    assert run.step_of_request.tolist() == [0, 0, 1, 1]
    assert run.delay_ms.tolist() == pytest.approx([15, 15, 24, 18])


def test_hidden_work_is_taken_off_the_slowest_rank_and_never_shortens_the_base():
    run = simulate(FOUR, cap=None, ns_per_token=1, base_step_ms=10, hidden_ms=3)
    # from 0: 5 − 3; from 12: the slower rank's 4 − 3
    assert run.step_ms.tolist() == pytest.approx([12, 11])
    assert simulate(FOUR, cap=None, ns_per_token=1, base_step_ms=10, hidden_ms=9).step_ms.tolist() == [10] * 3


def test_a_rank_alone_does_not_wait_for_the_other():
    alone = arrivals([(0, 0, 1), (0, 0, 1)], num_ranks=1)
    beside = arrivals([(0, 0, 1), (0, 0, 1), (0, 1, 50)])
    assert simulate(alone, cap=None, ns_per_token=1, base_step_ms=10).step_ms[0] == pytest.approx(12)
    assert simulate(beside, cap=None, ns_per_token=1, base_step_ms=10).step_ms[0] == pytest.approx(60)


def test_the_engine_steps_on_without_requests_and_a_request_on_the_boundary_is_admitted_there():
    run = simulate(arrivals([(30, 0, 5)], window_ms=50), cap=1, ns_per_token=1, base_step_ms=10)
    assert run.step_start_ms.tolist() == pytest.approx([0, 10, 20, 30, 45])
    assert run.step_of_request.tolist() == [3]
    assert run.in_window.all()


def test_requests_left_over_at_the_end_of_the_window_are_counted_and_admitted_after_it():
    run = simulate(arrivals([(0, 0, 1)] * 4, window_ms=20), cap=1, ns_per_token=1, base_step_ms=9)
    assert run.step_start_ms.tolist() == pytest.approx([0, 10, 20, 30])
    assert run.num_waiting == 2
    assert run.in_window.tolist() == [True, True, False, False]


def test_no_arrivals_leave_the_base_step():
    nobody = Arrivals(np.array([]), np.array([], dtype=int), np.array([], dtype=int), 4, 25.0)
    run = simulate(nobody, cap=1, ns_per_token=1, base_step_ms=10)
    assert run.step_ms.tolist() == [10, 10, 10]
    assert run.delay_ms.size == run.num_waiting == 0


@pytest.mark.parametrize("cap", [1, 4, 7, 140, None])
def test_one_burst_takes_its_steps_and_its_work(cap):
    run = simulate(one_burst(140, num_ranks=32, prompt_tokens=6 * MEGA), cap=cap, ns_per_token=1, base_step_ms=13)
    each = 140 if cap is None else cap
    steps = -(-140 // each)
    assert run.step_ms.size == steps
    assert run.step_ms.max() == pytest.approx(13 + 6 * each)
    assert run.delay_ms.max() == pytest.approx(13 * steps + 6 * 140), "the cap adds base steps, not work"


streams = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=60).map(
    lambda rows: arrivals(sorted(rows, key=lambda row: row[0]), num_ranks=4)
)


@settings(max_examples=150, deadline=None)
@given(stream=streams, cap=st.one_of(st.none(), st.integers(1, 5)), base=st.integers(1, 30), hidden=st.integers(0, 10))
def test_laws_of_any_run(stream, cap, base, hidden):
    run = simulate(stream, cap=cap, ns_per_token=1, base_step_ms=base, hidden_ms=hidden)
    cost, step_of = stream.prompt_tokens / MEGA, run.step_of_request
    num_steps = run.step_ms.size
    # nobody is lost, nobody comes before his time
    assert ((step_of >= 0) & (step_of < num_steps)).all()
    assert (run.step_start_ms[step_of] >= stream.arrived_ms).all()
    # steps follow each other, each as long as the slowest rank makes it; work is conserved
    assert run.step_start_ms[1:] == pytest.approx(run.step_start_ms[:-1] + run.step_ms[:-1])
    work, count = np.zeros((num_steps, 4)), np.zeros((num_steps, 4), dtype=int)
    np.add.at(work, (step_of, stream.rank), cost)
    np.add.at(count, (step_of, stream.rank), 1)
    assert run.step_ms == pytest.approx(base + np.maximum(0, work.max(axis=1) - hidden))
    assert run.work_ms == pytest.approx(work.sum(axis=1))
    assert run.work_ms.sum() == pytest.approx(cost.sum())
    # the cap holds; first come, first served in each rank
    if cap is not None:
        assert count.max() <= cap
    for rank in range(4):
        assert (np.diff(step_of[stream.rank == rank]) >= 0).all()
    # nobody waits without need: at every boundary that he waits through, his rank admits as many as it may
    for arrived, rank, step in zip(stream.arrived_ms, stream.rank, step_of, strict=True):
        first = int(np.searchsorted(run.step_start_ms, arrived))
        assert step == first if cap is None else (count[first:step, rank] == cap).all()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_drawn_arrivals_keep_the_rate_whatever_comes_in_bursts(share):
    stream = draw_arrivals(
        np.random.default_rng(3), num_ranks=8, requests_per_s=500, window_s=200, prompt_tokens=7, burst_share=share,
        burst_size=20, ranks_per_burst=3,
    )  # fmt: skip
    # the count's variance is rate · window · (1 − share + share · size)
    deviation = np.sqrt(100_000 * (1 - share + 20 * share))
    assert len(stream) == pytest.approx(100_000, abs=4 * deviation)
    assert np.bincount(stream.rank, minlength=8) == pytest.approx(12_500, rel=0.15)
    assert set(stream.prompt_tokens) == {7}


def test_a_burst_arrives_at_once_on_its_ranks():
    stream = draw_arrivals(
        np.random.default_rng(5), num_ranks=16, requests_per_s=100, window_s=30, prompt_tokens=1, burst_share=1.0,
        burst_size=10, ranks_per_burst=3,
    )  # fmt: skip
    times, counts = np.unique(stream.arrived_ms, return_counts=True)
    assert len(times) > 200
    assert set(counts) == {10}
    for time in times[:50]:
        assert sorted(np.unique(stream.rank[stream.arrived_ms == time], return_counts=True)[1]) == [3, 3, 4]


def test_the_generator_decides_the_arrivals():
    def draw(seed):
        return draw_arrivals(
            np.random.default_rng(seed), num_ranks=4, requests_per_s=50, window_s=5, prompt_tokens=1
        ).arrived_ms.tolist()

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cap": 0}, "cap: got 0, allowed: ≥ 1, or None"),
        ({"base_step_ms": 0}, "base step > 0"),
        ({"ns_per_token": -1}, "a cost ≥ 0"),
        ({"hidden_ms": -1}, "hidden work ≥ 0"),
    ],
)
def test_bad_simulations_are_refused(change, words):
    with pytest.raises(ParameterError, match=words):
        simulate(FOUR, **({"cap": 1, "ns_per_token": 1, "base_step_ms": 1} | change))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(5, 0, 1), (4, 0, 1)], "arrived_ms: allowed: ascending times from 0 to window_ms = 5"),
        ([(-1, 0, 1)], "ascending times from 0"),
        ([(0, 2, 1)], "rank: got 2 to 2, allowed: 0 to 1"),
        ([(0, 0, 0)], "prompt_tokens: got 0"),
    ],
)
def test_bad_arrivals_are_refused(rows, words):
    with pytest.raises(ParameterError, match=words):
        arrivals(rows)


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(ParameterError, match="one entry per request"):
        Arrivals(np.zeros(2), np.zeros(1, dtype=int), np.ones(2, dtype=int), 1, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks_per_burst": 5}, "ranks_per_burst: got 5, allowed: 1 to num_ranks = 4"),
        ({"burst_share": 1.5}, "a share from 0 to 1"),
        ({"window_s": 0}, "a window > 0"),
    ],
)
def test_bad_draws_are_refused(change, words):
    good = {"num_ranks": 4, "requests_per_s": 1, "window_s": 1, "prompt_tokens": 1}
    with pytest.raises(ParameterError, match=words):
        draw_arrivals(np.random.default_rng(0), **(good | change))


def test_statistics_of_two_repeats_by_hand():
    other = arrivals([(0, 0, 8)])
    (row,) = compare_caps([FOUR, other], caps=[1], ns_per_token={"x": 1}, base_step_ms=10, whole_run=True).to_dicts()
    # steps 12, 14, 11 and 18; delays 12, 26, 32, 15 and 18
    assert (row["cap"], row["num_steps"], row["step_mean_ms"], row["step_max_ms"]) == ("1", 4, 13.75, 18)
    assert (row["step_p50_ms"], row["delay_p50_ms"], row["delay_max_ms"]) == (13, 18, 32)
    assert (row["step_p99_low_ms"], row["step_p99_high_ms"]) == pytest.approx((12 + 0.98 * 2, 18))
    assert (row["delay_p99_low_ms"], row["delay_p99_high_ms"]) == pytest.approx((18, 26 + 0.97 * 6))


@pytest.mark.parametrize(("cap", "admits_in_ms"), [(1, 14 + 13 + 11), (2, 15 + 11), (None, 16)])
def test_the_load_is_the_time_to_admit_all_over_that_in_which_they_arrive(cap, admits_in_ms):
    # rank 0 has 2, 3 and 1 ms of work, rank 1 has 4 ms; they arrive within 11 ms
    (row,) = compare_caps([FOUR, FOUR], caps=[cap], ns_per_token={"x": 1}, base_step_ms=10).to_dicts()
    assert row["admission_load_percent"] == pytest.approx(100 * admits_in_ms / 11)


def test_a_burst_in_no_time_and_a_window_without_requests_have_no_load():
    burst = one_burst(4, num_ranks=2, prompt_tokens=MEGA)
    (row,) = compare_caps([burst], caps=[1], ns_per_token={"x": 1}, base_step_ms=10, whole_run=True).to_dicts()
    assert row["admission_load_percent"] is None
    nobody = Arrivals(np.array([]), np.array([], dtype=int), np.array([], dtype=int), 4, 25.0)
    (row,) = compare_caps([nobody], caps=[1], ns_per_token={"x": 1}, base_step_ms=10).to_dicts()
    assert row["admission_load_percent"] == 0


def test_no_repeats_are_refused():
    with pytest.raises(ParameterError, match="repeats: got none"):
        compare_caps([], caps=[1], ns_per_token={"x": 1}, base_step_ms=10)
