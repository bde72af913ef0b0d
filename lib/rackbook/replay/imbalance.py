"""What data-parallel imbalance costs, from the step times of a run.

The functions take arrays, not a simulated run: the step times that a server logs per rank serve as well.

The stagger of a lag replay is not imbalance. While the last rank has not begun, or the first has nothing left, fewer
ranks work than there are, and that costs throughput over the whole run however even the steps are. So a loss is
measured in the common window: from the first step in which the last rank to begin has tokens, up to but not including
the step in which the first rank to finish computes its last ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def common_window(tokens: NDArray[np.int64]) -> slice:
    """The steps between the last rank's beginning and the first rank's end.

    A rank that is idle for a while inside the window stays in it: that is imbalance, or too little load.

    Args:
        tokens: tokens that each rank computes in each step; shape [steps, ranks].

    Raises:
        DataError: the ranks never work together, or one never works.
    """
    working = tokens > 0
    if not working.any(axis=0).all():
        idle = int((~working.any(axis=0)).argmax())
        raise DataError(f"no common window: rank {idle} has no tokens in any of {tokens.shape[0]} steps")
    begin = int(working.argmax(axis=0).max())
    end = int(tokens.shape[0] - 1 - working[::-1].argmax(axis=0).max())
    if end <= begin:
        raise DataError(
            f"no common window: the last rank begins in step {begin}, the first ends in step {end}; "
            "shorten the lag or give the ranks more requests"
        )
    return slice(begin, end)


def excess(own: NDArray[np.float64], step: NDArray[np.float64]) -> float:
    """How much longer the steps are than the ranks' own: Σ step ÷ Σ mean own − 1; 0 if all ranks are always equal.

    For independent draws of one law this is E[largest of all ranks] ÷ E[one] − 1. It compares the same steps with and
    without waiting, so it needs no second run; a mirror and a lag run of the same work give mirror ÷ lag − 1.

    Args:
        own: how long each rank's step would take alone; any unit; shape [steps, ranks].
        step: how long the step of all took, same unit; shape [steps].
    """
    return float(step.sum() / own.mean(axis=1).sum() - 1)


def loss(own: NDArray[np.float64], step: NDArray[np.float64]) -> float:
    """Share of the throughput that waiting costs: excess ÷ (1 + excess), that is 1 − lag ÷ mirror.

    Args:
        own: how long each rank's step would take alone; any unit; shape [steps, ranks].
        step: how long the step of all took, same unit; shape [steps].
    """
    return 1 - 1 / (1 + excess(own, step))
