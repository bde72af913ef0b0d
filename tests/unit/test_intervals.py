"""Confidence intervals, against hand-computed cases and their coverage."""

import math

import numpy as np
import pytest
from scipy import stats

from rackbook.errors import DataError
from rackbook.intervals import mean_interval, median_interval


def test_mean_of_three_by_hand():
    # mean 2, s = 1, t(0.975, 2) = 4.30265: half width 4.30265/√3
    found = mean_interval([1, 2, 3], 0.95)
    assert found.estimate == 2
    assert found.high - found.estimate == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert found.estimate - found.low == pytest.approx(found.high - found.estimate)
    assert (found.num_values, found.confidence) == (3, 0.95)


def test_one_value_has_no_interval():
    assert (mean_interval([5]).estimate, mean_interval([5]).low, mean_interval([5]).high) == (5, None, None)


def test_median_by_order_statistics():
    # n = 6: 1 − 2·(1/2)^6 = 0.96875 ≥ 0.95, the smallest and the largest; n = 5 gives 0.9375 and so nothing
    six = median_interval([6, 1, 5, 2, 4, 3], 0.95)
    assert (six.low, six.estimate, six.high) == (1, 3.5, 6)
    assert median_interval([1, 2, 3, 4, 5], 0.95).low is None
    # n = 9: 1 − 2·(1 + 9)/512 = 0.9609, the second from each end; the third gives 0.8203
    nine = median_interval(list(range(1, 10)), 0.95)
    assert (nine.low, nine.estimate, nine.high) == (2, 5, 8)
    assert median_interval(list(range(1, 10)), 0.82).low == 3


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 20, 101])
def test_median_interval_keeps_its_promise_and_is_the_narrowest_that_does(n):
    values = list(range(1, n + 1))
    found = median_interval(values, 0.9)
    rank = 0 if found.low is None else found.low
    if rank:
        assert 1 - 2 * stats.binom.cdf(rank - 1, n, 0.5) >= 0.9
    assert rank == n // 2 or 1 - 2 * stats.binom.cdf(rank, n, 0.5) < 0.9


def test_the_mean_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(7)
    hits = sum(
        found.low <= 3 <= found.high
        for found in (mean_interval(generator.normal(3, 2, 5).tolist(), 0.9) for _ in range(1000))
    )
    assert 0.87 < hits / 1000 < 0.93  # three standard errors


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mean_interval([]), "at least one value"),
        (lambda: mean_interval([1, float("nan")]), "finite values, got nan among 2"),
        (lambda: mean_interval([1, None]), "finite values"),
        (lambda: mean_interval([1, 2], 95), "between 0 and 1"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(DataError, match=words):
        call()
