"""How the gains of several changes combine: multiplied, as independent factors do, or added.

A gain is in percent of throughput: 20 means 1.2 times as many tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rackbook.errors import ParameterError

COMPOSITIONS = ("multiplied", "added")


def combined(gains_percent: Sequence[float], composition: str) -> float:
    """The gain of all changes together, in percent.

    Args:
        gains_percent: the gain of each change by itself, > −100.
        composition: "multiplied" for Π(1 + g) − 1, "added" for Σ g.

    Raises:
        ParameterError: an unknown composition, no gain, or a gain that leaves no throughput.
    """
    if composition not in COMPOSITIONS:
        raise ParameterError(f"composition: got {composition!r}, allowed: {', '.join(COMPOSITIONS)}")
    if not gains_percent or min(gains_percent) <= -100:
        raise ParameterError(f"gains: got {list(gains_percent)}, allowed: at least one, each > -100 [%]")
    if composition == "added":
        return float(np.sum(gains_percent))
    return float(100 * (np.prod([1 + gain / 100 for gain in gains_percent]) - 1))


def remaining(total_percent: float, gain_percent: float, composition: str) -> float:
    """The gain that is left for the other changes once one is known, in percent.

    Args:
        total_percent: the gain of all changes together.
        gain_percent: the gain of the known one, > −100.
        composition: as in :func:`combined`, which this undoes.

    Raises:
        ParameterError: as :func:`combined`.
    """
    combined([gain_percent], composition)
    if composition == "added":
        return total_percent - gain_percent
    return 100 * ((1 + total_percent / 100) / (1 + gain_percent / 100) - 1)


def from_time_cut(cut_percent: float) -> float:
    """The gain in throughput of a cut of the time by so many percent: 1 ÷ (1 − cut) − 1.

    Raises:
        ParameterError: a cut of the whole time or more.
    """
    if cut_percent >= 100:
        raise ParameterError(f"cut of the time: got {cut_percent:g}, allowed: < 100 [%]")
    return 100 * (1 / (1 - cut_percent / 100) - 1)
