"""A straight line through a few points, with what it can and cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from rackbook.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Line:
    """An ordinary least-squares line y = intercept + slope · x.

    Attributes:
        intercept: y at x = 0.
        slope: y per x.
        x: the fitted abscissae.
        y: the fitted ordinates.
    """

    intercept: float
    slope: float
    x: NDArray[np.float64]
    y: NDArray[np.float64]

    @property
    def degrees_of_freedom(self) -> int:
        """Points minus two; at 0 the line is exactly determined and has no error bar."""
        return self.x.size - 2

    @property
    def residuals(self) -> NDArray[np.float64]:
        """Observed minus fitted."""
        return self.y - self.at(self.x)

    def at(self, x: ArrayLike) -> NDArray[np.float64]:
        """The line's value at each x."""
        return self.intercept + self.slope * np.asarray(x, dtype=float)

    def band(self, x: ArrayLike, confidence: float = 0.95) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Pointwise confidence band of the mean response.

        Uses Student's t with n − 2 degrees of freedom and the textbook standard error
        s·√(1/n + (x − x̄)²/Σ(xᵢ − x̄)²); normal, equal errors are assumed.

        Args:
            x: where.
            confidence: coverage, between 0 and 1.

        Returns:
            Lower and upper bound at each x; NaN where the line is exactly determined.
        """
        half = self._t(confidence) * self._standard_error(np.asarray(x, dtype=float))
        return self.at(x) - half, self.at(x) + half

    def slope_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the slope; NaN where the line is exactly determined."""
        spread = np.sum((self.x - self.x.mean()) ** 2)
        half = self._t(confidence) * self._residual_deviation() / np.sqrt(spread)
        return float(self.slope - half), float(self.slope + half)

    def _t(self, confidence: float) -> float:
        if self.degrees_of_freedom < 1:
            return float("nan")
        return float(special.stdtrit(self.degrees_of_freedom, 0.5 + confidence / 2))

    def _residual_deviation(self) -> float:
        return float(np.sqrt(np.sum(self.residuals**2) / max(self.degrees_of_freedom, 1)))

    def _standard_error(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        spread = np.sum((self.x - self.x.mean()) ** 2)
        return self._residual_deviation() * np.sqrt(1 / self.x.size + (x - self.x.mean()) ** 2 / spread)


def fit_line(x: ArrayLike, y: ArrayLike) -> Line:
    """Fit a line by least squares.

    Args:
        x: at least two different abscissae.
        y: as many ordinates.

    Raises:
        DataError: fewer than two different x, unequal lengths, or a value that is not finite.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if xs.shape != ys.shape or xs.ndim != 1:
        raise DataError(f"a line needs as many x as y values, got {xs.shape} and {ys.shape}")
    if not (np.isfinite(xs).all() and np.isfinite(ys).all()):
        raise DataError("a line needs finite values, got NaN or infinity")
    if np.unique(xs).size < 2:
        raise DataError(f"a line needs at least two different x values, got {np.unique(xs).tolist()}")
    centred = xs - xs.mean()
    slope = float(np.sum(centred * (ys - ys.mean())) / np.sum(centred**2))
    return Line(float(ys.mean()) - slope * float(xs.mean()), slope, xs, ys)
