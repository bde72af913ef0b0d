"""The straight line, against hand-computed cases."""

import numpy as np
import pytest

from rackbook.errors import DataError
from rackbook.models.line import fit_line


def test_exactly_determined_line_has_no_error_bar():
    line = fit_line([1, 3], [2, 8])
    assert (line.intercept, line.slope) == pytest.approx((-1, 3))
    assert line.degrees_of_freedom == 0
    assert np.isnan(line.slope_interval()).all()
    assert np.isnan(line.band([2])).all()


def test_three_points_by_hand():
    # x̄ = 1, ȳ = 4/3, Σxy − 3x̄ȳ = 2, Σ(x − x̄)² = 2: slope 1, intercept 1/3, residuals −1/3, 2/3, −1/3.
    line = fit_line([0, 1, 2], [0, 2, 2])
    assert line.slope == pytest.approx(1)
    assert line.intercept == pytest.approx(1 / 3)
    assert line.residuals == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    # s² = (1/9 + 4/9 + 1/9) / 1 = 2/3; t(0.975, 1) = 12.706; half width = t·√(s²/2)
    low, high = line.slope_interval(0.95)
    assert (high - low) / 2 == pytest.approx(12.7062 * np.sqrt(1 / 3), rel=1e-4)
    # at x̄ the band's half width is t·s/√3
    below, above = line.band([1.0], 0.95)
    assert (above - below)[0] / 2 == pytest.approx(12.7062 * np.sqrt(2 / 9), rel=1e-4)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([1, 1], [1, 2], "at least two different x"),
        ([1, 2], [1, np.nan], "finite"),
        ([1, 2], [1, 2, 3], "as many x as y"),
    ],
)
def test_bad_input_is_named(x, y, words):
    with pytest.raises(DataError, match=words):
        fit_line(x, y)
