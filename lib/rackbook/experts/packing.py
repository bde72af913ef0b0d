"""The two greedy steps of placing experts: giving out copies, and packing them into equally large packs.

Every step of the greedy algorithms is one operation over all rows; a row is a layer, or one node's part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXCHANGES_PER_PACK = 1
"""Swaps between the busiest and the idlest rank, at most, per rank: more change the third digit no further."""


def replicate(loads: NDArray[np.float64], num_copies: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every further copy to the expert whose copies carry most, which is best possible for the largest share.

    Returns:
        The expert of each copy, shape (rows, copies), the first copy of every expert first; and the copies of each
        expert, shape (rows, experts).
    """
    rows, num_experts = loads.shape
    copies = np.tile(np.arange(num_copies) % num_experts, (rows, 1))
    num_replicas = np.ones((rows, num_experts), np.int64)
    share = loads.copy()
    every, flat_share, flat_loads = np.arange(rows) * num_experts, share.ravel(), loads.ravel()
    flat_replicas = num_replicas.ravel()
    for copy in range(num_experts, num_copies):
        heaviest = share.argmax(axis=1)
        copies[:, copy] = heaviest
        heaviest += every
        flat_replicas[heaviest] += 1
        flat_share[heaviest] = flat_loads[heaviest] / flat_replicas[heaviest]
    return copies, num_replicas


def pack(weights: NDArray[np.float64], num_packs: int) -> NDArray[np.int64]:
    """Pack equally many items into each pack, the packs as even as possible.

    Heaviest first into the lightest pack that has room, then exchanges.

    Returns:
        The items in the order of packs, shape (rows, items): a pack's items are neighbours.
    """
    rows, num_items = weights.shape
    room = num_items // num_packs
    if num_packs == 1 or room == 1:
        return np.tile(np.arange(num_items), (rows, 1))
    order = np.argsort(-weights, axis=1)
    heaviest_first = np.take_along_axis(weights, order, axis=1).T.copy()
    sums = np.zeros(rows * num_packs)
    filled = np.zeros(rows * num_packs, np.int64)
    every = np.arange(rows) * num_packs
    packs = sums.reshape(rows, num_packs)
    chosen = np.empty((num_items, rows), np.int64)
    places = np.empty((num_items, rows), np.int64)
    for item in range(num_items):
        pack = packs.argmin(axis=1)
        chosen[item] = pack
        pack += every
        places[item] = filled[pack]
        filled[pack] += 1
        sums[pack] += heaviest_first[item]
        full = pack[places[item] == room - 1]
        sums[full] = np.inf
    at = (chosen * room + places).T
    packed, sorted_weights = np.empty((rows, num_items), np.int64), np.empty((rows, num_items))
    np.put_along_axis(packed, at, order, axis=1)
    np.put_along_axis(sorted_weights, at, heaviest_first.T, axis=1)
    _exchange(packed.reshape(rows, num_packs, room), sorted_weights.reshape(rows, num_packs, room))
    return packed


def _exchange(items: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
    """Even the packs out, in place: time and again the heaviest and the lightest swap the pair that fits best.

    Args:
        items: shape (rows, packs, room).
        weights: of the items.
    """
    num_packs, room = weights.shape[1:]
    sums = weights.sum(axis=2)
    active = np.arange(len(weights))
    for _ in range(EXCHANGES_PER_PACK * num_packs):
        heavy, light = sums[active].argmax(axis=1), sums[active].argmin(axis=1)
        gap = sums[active, heavy] - sums[active, light]
        gain = weights[active, heavy][:, :, None] - weights[active, light][:, None, :]
        misfit = np.abs(gain - gap[:, None, None] / 2).reshape(len(active), -1)
        best = misfit.argmin(axis=1)
        # rounding in the sums must not pass for an improvement
        helps = misfit[np.arange(len(active)), best] < gap * (0.5 - 1e-9)
        active, heavy, light, best = active[helps], heavy[helps], light[helps], best[helps]
        if not active.size:
            return
        out, back = best // room, best % room
        moved = weights[active, heavy, out] - weights[active, light, back]
        for array in (weights, items):
            array[active, heavy, out], array[active, light, back] = (
                array[active, light, back],
                array[active, heavy, out],
            )
        sums[active, heavy] -= moved
        sums[active, light] += moved
