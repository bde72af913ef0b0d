"""The account of a step and the growth of an all-reduce: by hand, and by laws."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackbook import published
from rackbook.errors import DataError, ParameterError
from rackbook.models.collective import (
    hop_ms,
    proportional_units,
    recursive_doubling_hops,
    ring_hops,
    sync_ms,
)
from rackbook.models.host_steps import SYNC, before_and_after, dep_growth, sync_removal
from rackbook.models.step_account import Pair, Removal, StepGrowth, step_ms

times = st.floats(0.01, 100)


def test_the_identity():
    assert step_ms(10, 4, 3) == 13
    assert step_ms(4, 10, 3) == 13


# ── a shorter piece of work beside a shorter step ──


def test_the_published_sync_by_hand():
    sync = Removal(10.8, 1.5, 16.10, 13.15)
    assert sync.work_saved_ms == pytest.approx(9.3)
    assert sync.step_saved_ms == pytest.approx(2.95)
    assert sync.hidden_saved_ms == pytest.approx(6.35)
    assert sync.hidden_saved_share == pytest.approx(6.35 / 9.3)
    assert sync.exposed_before_ms == pytest.approx((2.95, 4.45))
    assert sync.hidden_before_ms == pytest.approx((6.35, 7.85))
    assert sync.floor_reached_at_ms == pytest.approx(7.85)


def test_both_readings_pass_through_the_pair_and_differ_between():
    sync = Removal(10.8, 1.5, 16.10, 13.15)
    for reading in (sync.step_with_floor_ms, sync.step_with_even_share_ms):
        assert reading(10.8) == pytest.approx(16.10)
        assert reading(1.5) == pytest.approx(13.15)
    assert sync.step_with_floor_ms(7.85) == pytest.approx(13.15)
    assert sync.step_with_floor_ms(8.85) == pytest.approx(14.15)
    assert sync.step_with_even_share_ms(6.15) == pytest.approx((16.10 + 13.15) / 2), "half-way between is half-way"


@given(before=times, after=times, gpu=times, other=times, unhidden=times)
def test_bounds_hold_for_every_step_that_keeps_the_identity(before, after, gpu, other, unhidden):
    """Work on the CPU path is waited for as far as the CPU path exceeds the GPU's; the bounds must contain it."""
    before, after = max(before, after), min(before, after)
    removal = _removal(before, after, gpu, other, unhidden)
    if removal is None:
        return
    exposed = min(before, max(0.0, other + before - gpu))
    low, high = removal.exposed_before_ms
    assert low - 1e-6 <= exposed <= high + 1e-6
    hidden_low, hidden_high = removal.hidden_before_ms
    assert hidden_low - 1e-6 <= before - exposed <= hidden_high + 1e-6


def _removal(before, after, gpu, other, unhidden):
    first, second = step_ms(gpu, other + before, unhidden), step_ms(gpu, other + after, unhidden)
    # rounding may make the step fall by a hair more than the work
    second = max(second, first - (before - after) * (1 - 1e-12))
    return Removal(before, after, first, second) if before - after > 1e-6 else None


@pytest.mark.parametrize(
    "numbers",
    [(10, 1, 20, 10.5), (10, 1, 20, 21), (1, 10, 20, 19), (1, -1, 20, 19)],
    ids=["more", "up", "work", "neg"],
)
def test_a_pair_that_another_change_must_have_shaped_is_refused(numbers):
    with pytest.raises(DataError, match="the step must fall, and by no more than the work"):
        Removal(*numbers)


def test_no_saved_work_has_no_hidden_share():
    with pytest.raises(DataError, match="no work was saved"):
        _ = Removal(5, 5, 10, 10).hidden_saved_share


# ── two steps and the difference of their GPU times ──


def test_the_published_growth_by_hand():
    growth = StepGrowth(13.84, 17.57, 1.1)
    assert growth.step_growth_ms == pytest.approx(3.73)
    assert growth.gap_growth_ms == pytest.approx(4.83)
    assert growth.from_gap_ms == pytest.approx((0, 12.74))


def test_a_gap_that_shrinks_bounds_the_first_gap_from_below():
    growth = StepGrowth(20, 10, 2)
    assert growth.gap_growth_ms == -8
    assert growth.from_gap_ms == (8, 18)


@given(gpu=times, saving=st.floats(-50, 50), from_gap=times, to_gap=times)
def test_the_bounds_contain_the_gaps_of_any_two_steps(gpu, saving, from_gap, to_gap):
    if gpu - saving < 0:
        return
    growth = StepGrowth(gpu + from_gap, gpu - saving + to_gap, saving)
    assert growth.gap_growth_ms == pytest.approx(to_gap - from_gap, abs=1e-9)
    low, high = growth.from_gap_ms
    assert low - 1e-9 <= from_gap <= high + 1e-9


def test_a_saving_larger_than_the_step_is_refused():
    with pytest.raises(DataError, match="a saving no larger than the first step"):
        StepGrowth(10, 12, 11)


# ── a forward pass and an engine step ──


def test_two_totals_bound_the_host_work_and_a_third_fixes_it():
    totals = Pair(8, 13)
    assert (totals.gap_ms, totals.gap_share) == (5, 5 / 13)
    assert totals.total_cpu_ms == (5, 13)
    assert totals.hidden_cpu_ms == (0, 8)
    assert totals.not_cpu_ms is None
    with_cpu = Pair(8, 13, 11)
    assert with_cpu.hidden_cpu_ms == (6, 6)
    assert with_cpu.total_cpu_ms == (11, 11)
    assert with_cpu.not_cpu_ms == 0


def test_a_gap_larger_than_the_host_work_has_another_cause():
    pair = Pair(8, 13, 2)
    assert pair.not_cpu_ms == 3
    assert pair.hidden_cpu_ms == (0, 0)


def test_a_negative_gap_bounds_nothing():
    pair = Pair(8, 7, 3)
    assert pair.gap_ms == -1
    assert pair.total_cpu_ms is pair.hidden_cpu_ms is pair.not_cpu_ms is None


@given(gpu=times, cpu=st.floats(0, 100), unhidden=st.floats(0, 100))
def test_the_account_gives_back_what_the_identity_hid(gpu, cpu, unhidden):
    engine = step_ms(gpu, cpu, unhidden)
    totals = Pair(gpu, engine)
    hidden = min(cpu, gpu)
    assert totals.hidden_cpu_ms[0] <= hidden <= totals.hidden_cpu_ms[1]
    assert totals.total_cpu_ms[0] - 1e-9 <= cpu + unhidden <= totals.total_cpu_ms[1] + 1e-9
    measured = Pair(gpu, engine, min(cpu + unhidden, engine))
    assert measured.hidden_cpu_ms[0] == pytest.approx(hidden, abs=1e-9)
    assert measured.not_cpu_ms == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("numbers", "words"), [((0, 1), "forward_ms, engine_ms: got 0 and 1"), ((8, 13, 14), "cpu_ms: got 14")]
)
def test_impossible_pairs_are_refused(numbers, words):
    with pytest.raises(DataError, match=words):
        Pair(*numbers)


# ── all-reduce ──


@pytest.mark.parametrize(
    ("ranks", "ring", "doubling"),
    [(1, 0, 0), (2, 2, 1), (3, 4, 3), (4, 6, 2), (5, 8, 4), (32, 62, 5), (72, 142, 8)],
)
def test_hops_by_hand(ranks, ring, doubling):
    assert ring_hops(ranks) == ring
    assert recursive_doubling_hops(ranks) == doubling
    assert proportional_units(ranks) == ranks


def test_recursive_doubling_sums_over_all_ranks_in_so_many_hops():
    """Replays the exchanges with numbers: after log2 N of them every rank holds the sum."""
    values = list(range(16))
    for hop in range(recursive_doubling_hops(16)):
        values = [values[rank] + values[rank ^ (1 << hop)] for rank in range(16)]
    assert values == [sum(range(16))] * 16


def test_growth_through_one_point():
    assert sync_ms("proportional to the ranks", 16, known_ranks=32, known_ms=10.8) == pytest.approx(5.4)
    assert sync_ms("ring", 16, known_ranks=32, known_ms=10.8) == pytest.approx(10.8 * 30 / 62)
    assert sync_ms("recursive doubling", 16, known_ranks=32, known_ms=1.5) == pytest.approx(1.2)
    assert hop_ms("ring", 32, 10.8) == pytest.approx(0.1742, abs=1e-4)


def test_bad_laws_and_ranks_are_named():
    with pytest.raises(ParameterError, match="unknown growth law: got 'rings'.*Did you mean 'ring'"):
        hop_ms("rings", 4, 1)
    with pytest.raises(ParameterError, match="num_ranks: got 0, allowed: ≥ 1"):
        ring_hops(0)
    with pytest.raises(DataError, match="no hop between 1 ranks"):
        hop_ms("ring", 1, 1)


# ── the published steps ──


def test_published_accounts():
    points = published.read("cpu_overhead")
    assert sync_removal(points) == Removal(10.8, 1.5, 16.1, 13.15)
    assert dep_growth(published.read("engine_gap"), published.read("engine_gap_gpu")) == StepGrowth(13.84, 17.57, 1.1)


def test_a_missing_row_is_named():
    points = published.read("cpu_overhead").filter(pl.col("stage") == "before")
    with pytest.raises(DataError, match=f"#{SYNC} has 1 rows before and 0 after"):
        before_and_after(points, SYNC, "step_ms")
    with pytest.raises(DataError, match="no step for expert-parallel size 32, got \\[16\\]"):
        dep_growth(published.read("engine_gap").filter(pl.col("ep_size") == 16), published.read("engine_gap_gpu"))
