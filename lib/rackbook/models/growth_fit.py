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

MOST_ERROR_PERCENT = 10.0
"""Error above which a law does not fit: of two laws that are both wrong one is always less so."""

LEAST_RANKS = 2
"""The fewest ranks that have anything to add up: from here on a law must give something positive."""

CANNOT_TELL, NEITHER = "cannot tell", "neither"

_MOST = 1e9


@dataclass(frozen=True)
class GrowthFit:
    """One law, fitted by least squares of the relative errors, since the spread of a time grows with the time.

    Attributes:
        law: key of :data:`LAWS`.
        constant: α, in the unit of the values.
        slope: β, in that unit per rank or per doubling.
        error_percent: root mean square of the relative errors.
        most_ranks: largest number of ranks among the points.
    """

    law: str
    constant: float
    slope: float
    error_percent: float
    most_ranks: float

    @property
    def fits(self) -> bool:
        """Whether the law describes the points: close to them, and positive from two ranks to the most measured."""
        positive = min(self.at(LEAST_RANKS), self.at(self.most_ranks)) > 0
        return positive and self.error_percent <= MOST_ERROR_PERCENT

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
        """The law that is closer to the points; None where it does not fit, or where the evidence is too thin."""
        closer = min(self.fits.values(), key=lambda fit: fit.error_percent)
        return closer.law if closer.fits and self.evidence_ratio >= ENOUGH else None

    @property
    def verdict(self) -> str:
        """The better law, :data:`NEITHER` where no law fits, else :data:`CANNOT_TELL`."""
        return self.better or (CANNOT_TELL if any(fit.fits for fit in self.fits.values()) else NEITHER)


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
        error_percent = 100 * math.sqrt(squares[law] / found.size)
        fits[law] = GrowthFit(law, float(constant), float(slope), error_percent, float(ranks.max()))
    worse, better = max(squares.values()), min(squares.values())
    exponent = found.size / 2
    logarithm = math.inf if better <= 0 < worse else exponent * math.log(worse / better) if worse > 0 else 0.0
    return Growth(fits, min(_MOST, math.exp(min(logarithm, 50.0))), int(found.size))
