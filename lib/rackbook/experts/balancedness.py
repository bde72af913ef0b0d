"""Balancedness: how evenly the ranks of an expert-parallel group are loaded, and what is left to gain.

Three quantities go by this name. The source's is :func:`balancedness_per_layer_step`, averaged; a log line that
divides sums is :func:`ratio_of_sums`; the balance of loads summed over a window is :func:`balancedness_of_sums`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from rackbook.errors import DataError, ParameterError
from rackbook.experts.routing import experts_per_rank

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Estimate:
    """A mean over independent draws, with its confidence interval.

    Attributes:
        mean: the sample mean.
        low: lower bound of the interval of the mean.
        high: upper bound.
        standard_deviation: of one draw, not of the mean.
        num_draws: sample size.
    """

    mean: float
    low: float
    high: float
    standard_deviation: float
    num_draws: int


def balancedness_per_layer_step(rank_loads: ArrayLike) -> NDArray[np.float64]:
    """Mean over ranks ÷ max over ranks, for each layer and step on its own; 1 is even, 1 ÷ ranks is one busy rank.

    The source's balancedness is the mean of these ratios over the layers and steps of a window.

    Args:
        rank_loads: work per rank, e.g. (token, expert) pairs; shape (…, ranks), one leading entry per layer and step.

    Returns:
        The ratios, shape (…).

    Raises:
        DataError: no ranks, a load that is negative or not finite, or a layer and step without any load.
    """
    loads = _checked(rank_loads)
    return loads.mean(axis=-1) / loads.max(axis=-1)


def ratio_of_sums(rank_loads: ArrayLike) -> float:
    """Sum of the means ÷ sum of the maxima over layers and steps: large steps weigh more than small ones.

    vLLM's log line of EPLB divides so, over the layers of one step. It is not the source's quantity.

    Args:
        rank_loads: as in :func:`balancedness_per_layer_step`.

    Raises:
        DataError: as in :func:`balancedness_per_layer_step`.
    """
    loads = _checked(rank_loads)
    return float(loads.mean(axis=-1).sum() / loads.max(axis=-1).sum())


def balancedness_of_sums(rank_loads: ArrayLike) -> float:
    """Balancedness of each rank's load summed over all layers and steps: what chance does in a step averages out.

    A rearrangement of experts works on sums over a window, but the ranks wait for each other in every layer.

    Args:
        rank_loads: as in :func:`balancedness_per_layer_step`.

    Raises:
        DataError: as in :func:`balancedness_per_layer_step`.
    """
    loads = _checked(rank_loads)
    return float(balancedness_per_layer_step(loads.reshape(-1, loads.shape[-1]).sum(axis=0)))


def estimate_mean(values: ArrayLike, confidence: float = 0.95, *, controls: ArrayLike | None = None) -> Estimate:
    """The mean of independent draws with Student's t interval, sharper where controls explain part of the scatter.

    Controls are quantities of the same draws whose expectation is known exactly, given less that expectation. Then the
    intercept of a least-squares fit on them estimates the same mean, with the scatter that they leave.

    Source: control variates, e.g. A. Owen, "Monte Carlo theory, methods and examples", chapter 8.

    Args:
        values: one per draw.
        confidence: coverage, between 0 and 1.
        controls: shape (draws, controls), of expectation 0; None for none.

    Raises:
        ParameterError: fewer draws than two more than the controls, or a confidence outside 0 to 1.
    """
    sample = np.asarray(values, dtype=float).ravel()
    known = np.empty((sample.size, 0)) if controls is None else np.asarray(controls, dtype=float)
    if sample.size < known.shape[1] + 2:
        raise ParameterError(f"an interval needs at least {known.shape[1] + 2} draws, got {sample.size}")
    if not 0 < confidence < 1:
        raise ParameterError(f"confidence: got {confidence}, allowed: between 0 and 1")
    design = np.column_stack([np.ones(sample.size), known])
    # the normal equations of a few columns: no need for the linear algebra's threads
    products = (design[:, :, None] * design[:, None, :]).sum(axis=0)
    inverse = np.linalg.pinv(products, hermitian=True)
    fit = inverse @ (design * sample[:, None]).sum(axis=0)
    freedom = sample.size - int(np.linalg.matrix_rank(products, hermitian=True))
    left = float(np.sum((sample - (design * fit).sum(axis=1)) ** 2)) / freedom
    half = float(special.stdtrit(freedom, 0.5 + confidence / 2)) * (left * float(inverse[0, 0])) ** 0.5
    mean = float(fit[0])
    return Estimate(mean, mean - half, mean + half, float(sample.std(ddof=1)), sample.size)


def uniform_controls(rank_loads: ArrayLike, *, num_tokens: int, num_experts: int, top_k: int) -> NDArray[np.float64]:
    """Spread and skewness of each draw's rank loads under uniform routing, less their exact expectations.

    A rank's load is a sum over independent tokens of hypergeometric counts, so its second and third central moment are
    the number of tokens times that of one count. Together they explain some two thirds of the variance of the
    balancedness, see :func:`estimate_mean`.

    Args:
        rank_loads: shape (draws, ranks), drawn by :func:`~rackbook.experts.routing.sample_rank_loads`.
        num_tokens: of the batch, over all ranks.
        num_experts: routed experts of the layer.
        top_k: different experts that each token goes to.

    Returns:
        Shape (draws, 2): sums over ranks of the squared and cubed excess over the mean, both of expectation 0 and
        relative to the size that chance gives them.
    """
    loads = _checked(rank_loads)
    num_ranks = loads.shape[-1]
    held = experts_per_rank(num_experts, num_ranks)
    variance, skewness = _hypergeometric_moments(num_experts, held, top_k)
    if not variance:
        return np.zeros((len(loads), 2))
    scaled = (loads - num_tokens * top_k / num_ranks) / (num_tokens * variance) ** 0.5
    expected = np.array([num_ranks, num_ranks * skewness / num_tokens**0.5])
    return np.stack([(scaled**2).sum(axis=1), (scaled**3).sum(axis=1)], axis=1) - expected


def _hypergeometric_moments(num_experts: int, held: int, top_k: int) -> tuple[float, float]:
    """Variance and skewness of how many of a token's experts a rank holds; the skewness is 0 where it has no spread."""
    spread = held * top_k * (num_experts - held) * (num_experts - top_k)
    if not spread:
        return 0.0, 0.0
    variance = spread / (num_experts**2 * (num_experts - 1))
    tilt = (num_experts - 2 * held) * (num_experts - 2 * top_k)
    return variance, tilt * (num_experts - 1) ** 0.5 / (spread**0.5 * (num_experts - 2)) if tilt else 0.0


def recovered_fraction(before: float, after: float, uniform: float) -> float:
    """Part of the gap to uniform routing that a measure closes: (after − before) ÷ (uniform − before).

    Args:
        before: balancedness without it.
        after: balancedness with it.
        uniform: balancedness of uniform routing of the same batch.

    Raises:
        ParameterError: there is no gap to close.
    """
    if not uniform > before:
        raise ParameterError(f"no gap to recover: uniform routing has {uniform}, without the measure it is {before}")
    return (after - before) / (uniform - before)


def recovered_range(
    before: tuple[float, float], after: tuple[float, float], uniform: tuple[float, float]
) -> tuple[float, float]:
    """Smallest and largest recovered fraction when each balancedness is known between two bounds only.

    The fraction is monotone in each of the three, so the extremes lie at the corners.

    Args:
        before: lower and upper bound without the measure.
        after: with it.
        uniform: of uniform routing.

    Raises:
        ParameterError: the bounds allow that there is no gap.
    """
    corners = [recovered_fraction(*corner) for corner in itertools.product(before, after, uniform)]
    return min(corners), max(corners)


def uniform_balancedness_approximation(*, num_ranks: int, num_tokens: int, num_experts: int, top_k: int) -> float:
    """Expected balancedness of one batch under uniform routing, without sampling; takes a few milliseconds.

    A rank's load is a sum over tokens of hypergeometric counts, with the variance
    t·k/R·(1 − 1/R)·(E − k)/(E − 1) and the correlation −1/(R − 1) to another rank's. Balls thrown into R boxes
    have the same relative variance and correlation when there are t·k·(E − 1)/(E − k) of them, so the largest load is
    taken from that multinomial law. Its distribution is P(max ≤ m) = F(m)^R · P(S = n) ÷ P(N = n): R independent
    Poisson loads cut off at m, with distribution function F, that sum to S, and a Poisson total N of mean n; the sum's
    probability is an Edgeworth expansion with the third and fourth cumulant.

    Good to about 0.001 where a rank expects some ten pairs or more, and better with more. Poor where it expects only
    a few, above all with a top_k near the number of experts: the law of one token's choice shows, and the error can
    reach 0.1.

    Source: B. Levin, "A representation for multinomial cumulative distribution functions", The Annals of Statistics
    9(5), 1981; the effective number of balls is matched here.

    Args:
        num_ranks: expert-parallel size R; divides num_experts.
        num_tokens: tokens t in the batch, over all ranks.
        num_experts: routed experts E of the layer.
        top_k: different experts k that each token goes to.

    Raises:
        ParameterError: a size below 1, more experts per token than there are, or experts that do not divide among the
            ranks.
    """
    experts_per_rank(num_experts, num_ranks)
    if num_tokens < 1 or not 1 <= top_k <= num_experts:
        raise ParameterError(
            f"got {num_tokens} tokens and top_k {top_k} of {num_experts} experts, "
            "allowed: at least 1 token and a top_k from 1 to the number of experts"
        )
    if num_ranks == 1 or top_k == num_experts:
        return 1.0
    balls = num_tokens * top_k * (num_experts - 1) / (num_experts - top_k)
    mean = balls / num_ranks
    loads = np.arange(int(mean + 12 * mean**0.5) + 40)
    probability = np.exp(special.xlogy(loads, mean) - mean - special.gammaln(loads + 1))
    can_be_largest = loads >= max(mean, 1)
    maxima, below = loads[can_be_largest], np.cumsum(probability)[can_be_largest]
    first, second, third, fourth = (
        np.cumsum((loads - mean) ** power * probability)[can_be_largest] / below for power in (1, 2, 3, 4)
    )
    variance = second - first**2
    skewness = (third - 3 * first * second + 2 * first**3) / variance**1.5
    excess = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4) / variance**2 - 3
    sum_density = _edgeworth(-(num_ranks**0.5) * first / variance**0.5, skewness, excess, num_ranks) / variance**0.5
    total_density = _edgeworth(np.zeros(1), mean**-0.5, 1 / mean, num_ranks) / mean**0.5
    at_most = np.minimum(np.maximum.accumulate(below**num_ranks * sum_density / total_density), 1)
    expected = np.sum(np.diff(at_most, prepend=0, append=1) * np.append(mean / maxima, mean / maxima[-1]))
    return max(float(expected), 1 / num_ranks)


def _edgeworth(z: NDArray[np.float64], skewness: ArrayLike, excess: ArrayLike, size: int) -> NDArray[np.float64]:
    """Density of a standardised sum of ``size`` equal parts, from their skewness and excess kurtosis."""
    skewness, excess = np.asarray(skewness), np.asarray(excess)
    correction = (
        1
        + skewness * (z**3 - 3 * z) / (6 * size**0.5)
        + excess * (z**4 - 6 * z**2 + 3) / (24 * size)
        + skewness**2 * (z**6 - 15 * z**4 + 45 * z**2 - 15) / (72 * size)
    )
    return np.exp(-(z**2) / 2) / (2 * np.pi) ** 0.5 * np.maximum(correction, 0)


def _checked(rank_loads: ArrayLike) -> NDArray[np.float64]:
    loads = np.asarray(rank_loads, dtype=float)
    if loads.ndim == 0 or loads.size == 0:
        raise DataError(f"rank loads need the shape (…, ranks) and at least one rank, got {loads.shape}")
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise DataError("rank loads must be finite and not negative")
    totals = loads.sum(axis=-1)
    if idle := np.count_nonzero(totals == 0):
        raise DataError(f"{idle} of {totals.size} layers and steps have no load and so no balancedness: leave them out")
    return loads
