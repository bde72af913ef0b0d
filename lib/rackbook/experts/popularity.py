"""A router with preferences: seeded tokens per expert with a chosen skew, layers alike or not, and drift.

It stands in for real routed experts where there are none. What it assumes is written down here, and what of it is
fitted is named where it is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rackbook.errors import ParameterError, RackbookError
from rackbook.experts.balancedness import balancedness_per_layer_step
from rackbook.experts.replay import Block
from rackbook.experts.routing import experts_per_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Family = Literal["log-normal", "power law", "log-uniform"]
FAMILIES: tuple[Family, ...] = ("log-normal", "power law", "log-uniform")

HOLD_STEPS = 150
"""Steps for which popularities stay the same before drift moves them on; far below any memory of interest."""

MOST_SKEW = 60.0
"""Where the search for a skew ends: almost all tokens then go to the same few experts."""


@dataclass(frozen=True)
class Router:
    """Tokens per expert in one decode step after another.

    Every expert of every layer has a popularity, a function of a normal score whose spread is the skew. A token picks
    ``top_k`` different experts, the popular ones more often: expert e with the chance 1 − exp(−τ·popularity), τ such
    that the chances sum to ``top_k`` (the limit of drawing without replacement for many experts; B. Rosén, "Asymptotic
    theory for order sampling", Journal of Statistical Planning and Inference 62(2), 1997). The tokens of a step fall on
    the experts as a normal law with the variance and correlation of independent tokens whose total is fixed, rounded
    to whole tokens.

    Attributes:
        num_layers: MoE layers.
        num_experts: routed experts of a layer.
        top_k: different experts that each token goes to.
        num_tokens: tokens in a step, over all ranks.
        skew: spread of the log popularity; 0 makes all experts alike.
        layer_correlation: correlation of the scores of the same expert in two layers, 0 to 1.
        memory_steps: steps after which the correlation of an expert's score with itself has fallen to 1/e; None for
            preferences that never change.
        tokens_alike: how many tokens choose as one, so that chance is that of fewer tokens; 1 for independent tokens.
        family: how popularity follows from the score: log-normal; a power law with the tail exponent 1 ÷ skew; or a
            log popularity that is spread evenly.
        seed: of the scores and the tokens.
    """

    num_layers: int
    num_experts: int
    top_k: int
    num_tokens: int
    skew: float
    layer_correlation: float = 0.0
    memory_steps: float | None = None
    tokens_alike: float = 1.0
    family: Family = "log-normal"
    seed: int = 1

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ParameterError: a size, skew or correlation that makes no router.
        """
        for name, least in (("num_layers", 1), ("num_experts", 1), ("num_tokens", 1), ("skew", 0), ("tokens_alike", 1)):
            if not getattr(self, name) >= least:
                raise ParameterError(f"{name}: got {getattr(self, name)}, allowed: {least} or more")
        if not 1 <= self.top_k <= self.num_experts:
            raise ParameterError(f"top_k: got {self.top_k}, allowed: 1 to num_experts, which is {self.num_experts}")
        if not 0 <= self.layer_correlation <= 1:
            raise ParameterError(f"layer_correlation: got {self.layer_correlation}, allowed: 0 to 1")
        if self.memory_steps is not None and not self.memory_steps > 0:
            raise ParameterError(f"memory_steps: got {self.memory_steps}, allowed: more than 0, or None")
        if self.family not in FAMILIES:
            raise ParameterError(f"family: got {self.family!r}, allowed: {', '.join(FAMILIES)}")

    def first_chances(self) -> NDArray[np.float64]:
        """Chance of a token to pick each expert in the first step, shape (layers, experts); rows sum to top_k."""
        return self._chances(self._scores(self._generators()[0]))[0]

    def blocks(self, num_steps: int, block_steps: int = HOLD_STEPS, looked_at: int = 2) -> Iterator[Block]:
        """Tokens per expert, many steps at a time: the sum of each block, and a few of its steps on their own.

        The steps that nobody looks at are drawn as their sum, which is exact for this law and costs as much as one.

        Args:
            num_steps: steps in all.
            block_steps: steps per block, during which popularities stay the same; the last block may be shorter.
            looked_at: steps of each block that are there on their own.

        Yields:
            Blocks; every layer and step sums to num_tokens × top_k.
        """
        for chances, steps, rng in self._held(num_steps, block_steps):
            few = min(looked_at, steps)
            tokens = self._tokens(chances, few, 1, rng)
            total = tokens.sum(axis=0, dtype=np.int64)
            if steps > few:
                total += self._tokens(chances, 1, steps - few, rng)[0]
            yield Block(steps, total, tokens, np.arange(few) * steps // few)

    def steps(self, num_steps: int, hold_steps: int = HOLD_STEPS) -> Iterator[NDArray[np.int32]]:
        """Tokens per expert of every step: arrays of shape (up to hold_steps, layers, experts)."""
        for chances, steps, rng in self._held(num_steps, hold_steps):
            yield self._tokens(chances, steps, 1, rng)

    def _held(self, num_steps: int, hold_steps: int) -> Iterator[tuple[NDArray[np.float64], int, np.random.Generator]]:
        scores_rng, tokens_rng = self._generators()
        scores = self._scores(scores_rng)
        chances, tau = self._chances(scores)
        for start in range(0, num_steps, hold_steps):
            if start and self.memory_steps is not None:
                kept = np.exp(-hold_steps / self.memory_steps)
                scores = kept * scores + (1 - kept**2) ** 0.5 * self._scores(scores_rng)
                chances, tau = self._chances(scores, tau)
            yield chances, min(hold_steps, num_steps - start), tokens_rng

    def _generators(self) -> tuple[np.random.Generator, np.random.Generator]:
        # two streams: the tokens that are drawn do not change the preferences
        scores, tokens = np.random.SeedSequence([self.seed, self.num_experts]).spawn(2)
        return np.random.default_rng(scores), np.random.default_rng(tokens)

    def _scores(self, rng: np.random.Generator) -> NDArray[np.float64]:
        common = rng.standard_normal(self.num_experts)
        own = rng.standard_normal((self.num_layers, self.num_experts))
        return self.layer_correlation**0.5 * common + (1 - self.layer_correlation) ** 0.5 * own

    def _chances(
        self, scores: NDArray[np.float64], near: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if self.family == "log-normal":
            logs = self.skew * scores
        else:
            from scipy import special

            if self.family == "power law":
                logs = -self.skew * special.log_ndtr(-scores)
            else:
                logs = self.skew * 12**0.5 * special.ndtr(scores)
        popularity = np.exp(logs - logs.max(axis=1, keepdims=True))
        return _inclusion(popularity / popularity.sum(axis=1, keepdims=True), self.top_k, near)

    def _tokens(
        self, chances: NDArray[np.float64], num_draws: int, steps_each: int, rng: np.random.Generator
    ) -> NDArray[np.int32]:
        """Tokens per expert, summed over so many steps in each draw: shape (draws, layers, experts)."""
        most = self.num_tokens * steps_each
        total = most * self.top_k
        means = (most * chances).astype(np.float32)
        variances = _before_the_total_is_fixed(most * chances * (1 - chances)).astype(np.float32)
        shares = variances / np.maximum(variances.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        drawn = rng.standard_normal((num_draws, *chances.shape), dtype=np.float32)
        drawn *= np.sqrt(np.float32(self.tokens_alike) * variances)
        drawn += means
        # what the fixed total leaves of independent counts
        drawn += (total - drawn.sum(axis=-1, keepdims=True)) * shares
        np.clip(drawn, 0, most, out=drawn)
        # scaling takes back what clipping added; rounding the running sums keeps the total, and each count within one
        running = np.cumsum(drawn, axis=-1, dtype=np.float64)
        running *= total / running[..., -1:]
        counts = np.diff(np.rint(running, out=running).astype(np.int32), axis=-1, prepend=np.int32(0))
        if counts.max() > most:
            self._settle(counts, most, chances)
        return counts

    @staticmethod
    def _settle(counts: NDArray[np.int32], most: int, chances: NDArray[np.float64]) -> None:
        """Pass what an expert has beyond all tokens on to the experts that may well have more."""
        for draw, layer in np.argwhere((counts > most).any(axis=-1)):
            row = counts[draw, layer]
            left = int((row - most).clip(min=0).sum())
            np.minimum(row, most, out=row)
            for expert in np.argsort(-chances[layer] * (1 - chances[layer])):
                change = min(left, most - int(row[expert]))
                row[expert] += change
                left -= change
            if left:
                raise RackbookError(f"fault of the router: {left} (token, expert) pairs find no expert")


def calibrated(router: Router, balancedness: float, num_ranks: int) -> Router:
    """The router with the skew at which its experts, spread in order over the ranks, are so balanced.

    The balancedness is that of the chances in the first step, averaged over the layers: what the tokens add by chance
    is left out, which changes the third digit at most where the skew is strong.

    Args:
        router: its own skew is ignored.
        balancedness: mean over ranks ÷ max over ranks, averaged over the layers.
        num_ranks: divides the experts.

    Raises:
        ParameterError: no skew gives this balancedness.
    """
    experts_per_rank(router.num_experts, num_ranks)

    def found(skew: float) -> float:
        chances = replace(router, skew=skew).first_chances()
        by_rank = chances.reshape(router.num_layers, num_ranks, -1).sum(axis=-1)
        return float(balancedness_per_layer_step(by_rank).mean())

    low, high = 0.0, MOST_SKEW
    least = found(high)
    if not least < balancedness < 1:
        raise ParameterError(
            f"balancedness of the router: got {balancedness:g}, allowed: above {least:.3f}, which tokens that all pick "
            f"the same {router.top_k} of {router.num_experts} experts reach on {num_ranks} ranks, and below 1"
        )
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) > balancedness else (low, middle)
    return replace(router, skew=(low + high) / 2)


def _before_the_total_is_fixed(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Variances of independent counts that have the given ones once their total is fixed.

    Source: the fixed-point approximation of J.-C. Deville and Y. Tillé, "Variance approximation under balanced
    sampling", Journal of Statistical Planning and Inference 128(2), 2005; two rounds, as one expert's part is small.
    """
    before = variances
    for _ in range(2):
        before = variances + before**2 / np.maximum(before.sum(axis=1, keepdims=True), 1e-300)
    return before


def _inclusion(
    popularity: NDArray[np.float64], top_k: int, near: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Chances 1 − exp(−τ·popularity) that sum to ``top_k`` in each row, and τ.

    The sum is concave and rising in τ, so Newton's steps from below never overshoot, and a step from above falls below
    at most once. Popularities below 1e-12 count as that, or no τ would do where fewer than ``top_k`` experts have any.

    Args:
        popularity: shape (layers, experts).
        top_k: wanted sum.
        near: a τ to begin with, e.g. that of slightly different popularities.
    """
    num_layers, num_experts = popularity.shape
    if top_k == num_experts:
        return np.ones_like(popularity), np.full((num_layers, 1), np.inf)
    floor = np.maximum(popularity, 1e-12)
    tau = np.full((num_layers, 1), float(top_k)) if near is None else near
    for _ in range(200):
        missed = np.exp(-tau * floor)
        short = top_k - (num_experts - missed.sum(axis=1, keepdims=True))
        if (np.abs(short) < 1e-9 * top_k).all():
            break
        tau = np.maximum(tau + short / (floor * missed).sum(axis=1, keepdims=True), top_k)
    chances = np.minimum(-np.expm1(-tau * floor), 1)
    # the last rounding, where there is room for it
    room = chances * (1 - chances)
    short = top_k - chances.sum(axis=1, keepdims=True)
    return np.clip(chances + short * room / np.maximum(room.sum(axis=1, keepdims=True), 1e-300), 0, 1), tau
