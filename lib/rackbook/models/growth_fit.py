"""Does a time grow with the number of ranks, or with its logarithm? Two laws, fitted to the same points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rackbook.errors import DataError

LINEAR, LOGARITHMIC = "α + β · n", "α + β · log2 n"

LAWS: dict[str, Callable[[float], float]] = {LINEAR: float, LOGARITHMIC: math.log2}

LEAST_POINTS = 4
"""Two constants are fitted, so that two points are left to tell the laws apart."""

ENOUGH = 20.0
"""Weight against the worse law from which the better one is named; 19 to 1 is the usual 95 %."""

_MOST = 1e9


@dataclass(frozen=True)
class GrowthFit:
    """One law, fitted by least squares of the relative errors, since the spread of a time grows with the time.

    Attributes:
        law: key of :data:`LAWS`.
        constant: α, in the unit of the values.
        slope: β, in that unit per rank or per doubling.
        error_percent: root mean square of the relative errors.
    """

    law: str
    constant: float
    slope: float
    error_percent: float

    def at(self, num_ranks: float) -> float:
        """The law's value."""
        return self.constant + self.slope * LAWS[self.law](num_ranks)


@dataclass(frozen=True)
class Growth:
    """Both laws on the same points.

    Attributes:
        fits: by law.
        evidence_ratio: how much more likely the points are under the better law; (RSS worse ÷ RSS better)^(n/2).
        num_points: n.
    """

    fits: dict[str, GrowthFit]
    evidence_ratio: float
    num_points: int

    @property
    def better(self) -> str | None:
        """The law that fits better; None where the evidence is too thin to name one."""
        if self.evidence_ratio < ENOUGH:
            return None
        return min(self.fits.values(), key=lambda fit: fit.error_percent).law


def compare_growth(num_ranks: Sequence[float], values: Sequence[float]) -> Growth:
    """Fit both laws.

    Both have two constants, so the ratio of Akaike weights is that of the likelihoods, with normal relative errors of
    one size.

    Args:
        num_ranks: at least four different numbers ≥ 1.
        values: as many, positive.

    Raises:
        DataError: too few points, a rank count twice, or a value that is not positive.

    Source:
        Burnham and Anderson, Model Selection and Multimodel Inference (2002), for the evidence ratio.
    """
    ranks, found = np.asarray(num_ranks, dtype=float), np.asarray(values, dtype=float)
    if ranks.shape != found.shape or np.unique(ranks).size < ranks.size or ranks.size < LEAST_POINTS:
        raise DataError(
            f"two laws of growth need {LEAST_POINTS} different numbers of ranks or more with one value each, got "
            f"{ranks.size} with {np.unique(ranks).size} different and {found.size} values"
        )
    if not ((ranks >= 1).all() and (found > 0).all() and np.isfinite(found).all()):
        raise DataError("laws of growth need numbers of ranks ≥ 1 and positive, finite values")
    squares, fits = {}, {}
    for law, growth in LAWS.items():
        x = np.array([growth(count) for count in ranks])
        design = np.column_stack([1 / found, x / found])
        (constant, slope), *_ = np.linalg.lstsq(design, np.ones_like(found), rcond=None)
        errors = design @ [constant, slope] - 1
        squares[law] = float(errors @ errors)
        fits[law] = GrowthFit(law, float(constant), float(slope), 100 * math.sqrt(squares[law] / found.size))
    worse, better = max(squares.values()), min(squares.values())
    exponent = found.size / 2
    logarithm = math.inf if better <= 0 < worse else exponent * math.log(worse / better) if worse > 0 else 0.0
    return Growth(fits, min(_MOST, math.exp(min(logarithm, 50.0))), int(found.size))
