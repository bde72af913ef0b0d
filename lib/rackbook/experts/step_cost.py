"""What uneven experts cost in time: a MoE layer waits for its busiest rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from rackbook.models.ep_scaling import EpScaling

CONSTANT_PART = "the part that more ranks do not shrink"
ALL_WORK = "all of the MoE time"


def extra_ms(balancedness: ArrayLike, even: float, following_ms: float) -> NDArray[np.float64]:
    """Time that a step takes longer than with even routing, if part of it grows with the busiest rank's tokens.

    The busiest rank has mean ÷ balancedness tokens on average at least (the mean of a ratio is at least the ratio of
    the means), and ``even`` is what the time was measured at: following × (even ÷ balancedness − 1).

    Args:
        balancedness: of the real routing.
        even: balancedness at which ``following_ms`` was measured.
        following_ms: part of the MoE time that follows the busiest rank.

    Raises:
        ParameterError: a balancedness that is not between 0 and 1, or a negative time.
    """
    given = np.asarray(balancedness, dtype=float)
    if not ((given > 0) & (given <= 1)).all() or not 0 < even <= 1 or following_ms < 0:
        raise ParameterError(
            f"cost of imbalance: got balancedness {given.tolist()}, even {even} and {following_ms} ms, "
            "allowed: above 0 to 1, and a time of 0 or more"
        )
    return following_ms * (even / given - 1)


def cost(balancedness: Iterable[float], even: float, form: EpScaling, ep_size: int) -> pl.DataFrame:
    """The cost at an expert-parallel size, in two readings of the fit to the printed MoE times.

    In a + b ÷ EP, the part b ÷ EP shrinks as each rank holds fewer experts, so it is the experts' weights; a stays, as
    does each rank's number of tokens, so it is where tokens count. Reading a as all that follows the busiest rank
    leaves out that a busy rank may also read for longer; reading the whole time so is the most it can be.

    Args:
        balancedness: at which to ask.
        even: balancedness of even routing, at which the printed times are taken to be measured.
        form: the fit.
        ep_size: ranks.

    Returns:
        balancedness_per_layer_step, cost_reading, extra_ms, extra_percent (of the whole step), origin "modelled",
        source, formula.
    """
    whole = float(form.moe_ms(ep_size))
    step = float(form.step_ms(ep_size))
    values = np.array(list(balancedness), dtype=float)
    frames = []
    for reading, following in ((CONSTANT_PART, form.constant_ms), (ALL_WORK, whole)):
        extra = extra_ms(values, even, following)
        frames.append(
            pl.DataFrame(
                {
                    "balancedness_per_layer_step": values,
                    "cost_reading": [reading] * len(values),
                    "extra_ms": extra,
                    "extra_percent": 100 * extra / step,
                    "origin": ["modelled"] * len(values),
                    "source": ["S1"] * len(values),
                    "formula": [f"{following:.2f} ms × ({even:.3f} ÷ balancedness − 1)"] * len(values),
                }
            )
        )
    return pl.concat(frames)
