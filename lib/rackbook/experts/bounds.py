"""How even any placement could be: lower bounds on the load of the busiest rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError
from rackbook.experts.placement import slots_per_rank

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def least_share(loads: ArrayLike, num_slots: int) -> NDArray[np.float64]:
    """The largest load of a slot when copies are given out as well as possible and share their expert's load evenly.

    Exact: a further copy for the expert whose copies carry most minimises the largest share (an exchange argument;
    it is the highest-averages method of apportionment).

    Args:
        loads: load per expert, shape (…, experts).
        num_slots: experts and redundant copies together.

    Raises:
        ParameterError: fewer slots than experts.
    """
    table = np.asarray(loads, dtype=float)
    num_experts = table.shape[-1]
    if num_slots < num_experts:
        raise ParameterError(f"{num_experts} experts need at least as many slots, got {num_slots}")
    rows = table.reshape(-1, num_experts)
    every = np.arange(len(rows))
    share, copies = rows.copy(), np.ones(rows.shape, np.int64)
    for _ in range(num_slots - num_experts):
        heaviest = share.argmax(axis=1)
        copies[every, heaviest] += 1
        share[every, heaviest] = rows[every, heaviest] / copies[every, heaviest]
    return share.max(axis=1).reshape(table.shape[:-1])


def least_maximum(loads: ArrayLike, num_slots: int, num_ranks: int) -> NDArray[np.float64]:
    """A lower bound on the load of the busiest rank under every placement into so many slots.

    Some rank has at least the mean, and some slot at least :func:`least_share`; the greater of the two bounds the
    busiest rank from below. Whole tokens do not divide: for them the bound may be rounded up.

    Args:
        loads: load per expert, shape (…, experts).
        num_slots: experts and redundant copies together; divides among the ranks.
        num_ranks: ranks.

    Returns:
        Shape (…).

    Raises:
        ParameterError: fewer slots than experts, or slots that do not divide among the ranks.
    """
    slots_per_rank(num_slots, num_ranks)
    return np.maximum(np.asarray(loads, dtype=float).sum(axis=-1) / num_ranks, least_share(loads, num_slots))


def greatest_balancedness(loads: ArrayLike, num_slots: int, num_ranks: int) -> NDArray[np.float64]:
    """An upper bound on mean ÷ max of the rank loads under every placement of whole tokens into so many slots.

    Not reached in general: the copies on the busiest rank's other slots weigh something too.

    Args:
        loads: tokens per expert, whole numbers, shape (…, experts); each row with at least one token.
        num_slots: experts and redundant copies together; divides among the ranks.
        num_ranks: ranks.

    Returns:
        Shape (…), one bound per layer and step.
    """
    # a share like 3 × (1/3) must not be rounded up to the next token
    whole = np.ceil(least_maximum(loads, num_slots, num_ranks) - 1e-9)
    return np.asarray(loads).sum(axis=-1) / num_ranks / whole
