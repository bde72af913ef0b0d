"""What the slowest of several ranks costs, when their step times are independent draws of one law.

The excess of R ranks is E[largest of R draws] − E[one draw]. Its ratio between two numbers of ranks depends on the
shape of the law alone: neither its mean nor its scale changes it. Source of the formulas: textbook order statistics
(H. A. David and H. N. Nagaraja, Order Statistics, Wiley, 2003, chapters 3 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from rackbook.errors import ParameterError

_MAX_SIGMA = 6.0

Excess = Callable[[int], float]
"""From a number of ranks to the excess of a law, in units of its scale."""


def uniform(num_ranks: int) -> float:
    """Excess of a uniform law on (0, 1): R/(R + 1) − 1/2."""
    return num_ranks / (num_ranks + 1) - 0.5


def normal(num_ranks: int) -> float:
    """Excess of the standard normal law: the integral of R · z · φ(z) · Φ(z)^(R−1)."""
    return _expected_largest(lambda z: z, num_ranks)


def exponential(num_ranks: int) -> float:
    """Excess of the exponential law with mean 1: 1/2 + 1/3 + … + 1/R."""
    return sum(1 / k for k in range(2, num_ranks + 1))


def lognormal(sigma: float) -> Excess:
    """Excess of a lognormal law whose logarithm has mean 0 and standard deviation sigma."""
    if not 0 < sigma <= _MAX_SIGMA:
        raise ParameterError(f"sigma: got {sigma!r}, allowed: a number > 0 and ≤ {_MAX_SIGMA:g}")
    mean = math.exp(sigma**2 / 2)
    return lambda num_ranks: _expected_largest(lambda z: np.exp(sigma * z), num_ranks) - mean


def _expected_largest(transform: Callable[[NDArray[np.float64]], NDArray[np.float64]], num_ranks: int) -> float:
    # The trapezoidal rule converges faster than any power of the step on an integrand that dies out like φ.
    z = np.linspace(-12, 12 + _MAX_SIGMA, 4001)
    density = num_ranks * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * special.ndtr(z) ** (num_ranks - 1)
    return float(np.trapezoid(transform(z) * density, z))


def spikes(probability: float) -> Excess:
    """Excess of a law with two values: 1 with this probability, else 0. It is 1 − (1 − p)^R − p."""
    if not 0 < probability < 1:
        raise ParameterError(f"probability: got {probability!r}, allowed: a number between 0 and 1")
    return lambda num_ranks: 1 - (1 - probability) ** num_ranks - probability


def ratio(excess: Excess, num_ranks: int, to_ranks: int = 2) -> float:
    """Excess on some ranks ÷ excess on fewer.

    Args:
        excess: a law.
        num_ranks: ranks above the line.
        to_ranks: ranks below the line, at least two: one rank has no excess.

    Raises:
        ParameterError: fewer than two ranks.
    """
    if min(num_ranks, to_ranks) < 2:
        raise ParameterError(f"ranks: got {num_ranks} and {to_ranks}, allowed: ≥ 2 (one rank waits for nobody)")
    return excess(num_ranks) / excess(to_ranks)


def parameter_of(law: Callable[[float], Excess], num_ranks: int, wanted: float, bracket: tuple[float, float]) -> float:
    """The parameter at which a law's ratio of ``num_ranks`` to two ranks is the wanted one.

    Args:
        law: :func:`lognormal` or :func:`spikes`.
        num_ranks: ranks above the line.
        wanted: the ratio.
        bracket: two parameters with the wanted ratio between theirs.

    Raises:
        ParameterError: the wanted ratio is not between those of the bracket.
    """
    at = [ratio(law(p), num_ranks) for p in bracket]
    if not min(at) <= wanted <= max(at):
        raise ParameterError(f"ratio: got {wanted:.3f}, allowed: {min(at):.3f} to {max(at):.3f}")
    return float(optimize.brentq(lambda p: ratio(law(p), num_ranks) - wanted, *bracket, xtol=1e-9))
