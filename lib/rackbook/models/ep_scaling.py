"""How a decode step scales with expert parallelism, from the times of its MoE part at a few sizes.

The MoE time is read as t(EP) = constant + shared ÷ EP: what every GPU does whatever the size, and what the GPUs share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError
from rackbook.models.line import Line, fit_line

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class EpScaling:
    """A decode step whose MoE part has a share that shrinks as 1/EP.

    Attributes:
        moe: MoE time in ms over 1/EP.
        rest_ms: everything else in the step, the same at every size.
    """

    moe: Line
    rest_ms: float

    @property
    def constant_ms(self) -> float:
        """MoE time that no further GPU takes away."""
        return self.moe.intercept

    @property
    def shared_ms(self) -> float:
        """MoE time that the GPUs share: what it would take one GPU."""
        return self.moe.slope

    def moe_ms(self, ep_size: ArrayLike) -> NDArray[np.float64]:
        """MoE time at each size."""
        return self.moe.at(1 / np.asarray(ep_size, dtype=float))

    def step_ms(self, ep_size: ArrayLike) -> NDArray[np.float64]:
        """Time of the whole step at each size."""
        return self.moe_ms(ep_size) + self.rest_ms

    def gain(self, from_ep_size: float, to_ep_size: float) -> float:
        """Gain in throughput per GPU between two sizes with the same load on each GPU; 0.1 is 10 %."""
        return float(self.step_ms(from_ep_size) / self.step_ms(to_ep_size)) - 1

    def gain_per_doubling(self, from_ep_size: float, to_ep_size: float) -> float:
        """The gain between two sizes as that of one doubling: so many in a row give the whole."""
        return float((1 + self.gain(from_ep_size, to_ep_size)) ** (1 / np.log2(to_ep_size / from_ep_size))) - 1

    def greatest_ratio(self, from_ep_size: float) -> float:
        """Throughput per GPU at endlessly many GPUs over that at a size, with the same load on each GPU."""
        return float(self.step_ms(from_ep_size)) / (self.constant_ms + self.rest_ms)

    def size_of_gain(self, gain: float) -> float:
        """The size to which a doubling gains so much; a doubling to a larger size gains less.

        From c + 2·s/EP = (1 + g)·(c + s/EP), with c the constant part of the step and s the shared one.

        Args:
            gain: between 0 and 1, both exclusive.

        Raises:
            ParameterError: no doubling can gain so much or so little.
        """
        if not 0 < gain < 1:
            raise ParameterError(f"gain of a doubling: got {gain:g}, allowed: between 0 and 1, both exclusive")
        return self.shared_ms * (1 - gain) / (gain * (self.constant_ms + self.rest_ms))

    def rounding_ms(self, ep_size: ArrayLike, half_unit_ms: float) -> NDArray[np.float64]:
        """How far the rounding of the two fitted times can move the MoE time at each size.

        Not an error bar: it knows nothing of the spread between runs, nor of whether the form holds.

        Args:
            ep_size: sizes; infinity gives the constant.
            half_unit_ms: half a unit of the last printed digit.

        Raises:
            ParameterError: the line was not fitted to two times.
        """
        first, last = self._two_abscissae()
        at = 1 / np.asarray(ep_size, dtype=float)
        return half_unit_ms * (np.abs(at - last) + np.abs(at - first)) / abs(first - last)

    def shared_rounding_ms(self, half_unit_ms: float) -> float:
        """How far the rounding of the two fitted times can move the shared time; raises as ``rounding_ms``."""
        first, last = self._two_abscissae()
        return 2 * half_unit_ms / abs(first - last)

    def _two_abscissae(self) -> tuple[float, float]:
        if self.moe.x.size != 2:
            raise ParameterError(f"rounding of a two-point fit: got {self.moe.x.size} fitted times, allowed: 2")
        return float(self.moe.x[0]), float(self.moe.x[1])


def fit_ep_scaling(ep_size: ArrayLike, moe_ms: ArrayLike, rest_ms: float) -> EpScaling:
    """Fit t(EP) = constant + shared ÷ EP to MoE times.

    Args:
        ep_size: at least two different sizes; two determine the fit exactly.
        moe_ms: MoE time at each.
        rest_ms: everything else in the step.

    Raises:
        DataError: fewer than two different sizes.
    """
    return EpScaling(fit_line(1 / np.asarray(ep_size, dtype=float), moe_ms), rest_ms)


def popularity_read_in(share_of_steps: float, num_tokens: int) -> float:
    """Share of tokens that must pick an expert so that a step of so many independent tokens picks it that often.

    A step of n tokens leaves an expert of popularity p out with probability (1 − p)^n.

    Args:
        share_of_steps: between 0 and 1, both exclusive.
        num_tokens: tokens in the step, over all GPUs.

    Raises:
        ParameterError: a share that is not between 0 and 1, or no token.
    """
    if not 0 < share_of_steps < 1 or num_tokens < 1:
        raise ParameterError(
            f"popularity of an expert: got a share of {share_of_steps:g} and {num_tokens} tokens, "
            "allowed: a share between 0 and 1, both exclusive, and at least one token"
        )
    return 1 - (1 - share_of_steps) ** (1 / num_tokens)
