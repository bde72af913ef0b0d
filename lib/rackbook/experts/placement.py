"""Where the copies of each expert lie: expert placement with replicas, in the way of DeepSeek's EPLB.

All of it works on whole numbers and arrays of a layer per row, and every step of the greedy algorithms is one
operation over all layers. Imports numpy only, so that the lab's environment can load it beside vLLM's policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import DataError, ParameterError
from rackbook.experts.packing import pack, replicate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert each slot holds, layer by layer; the slots of a rank are neighbours.

    Attributes:
        slots: expert in each slot, shape (layers, slots).
        num_experts: experts of a layer, numbered from 0.
        num_ranks: ranks; divides the number of slots.
    """

    slots: NDArray[np.int64]
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        """Check what every other method relies on.

        Raises:
            DataError: not a table of slots, an expert that does not exist, or one without a slot.
            ParameterError: slots that do not divide among the ranks.
        """
        if self.slots.ndim != 2 or not self.slots.size:
            raise DataError(f"a placement has the shape (layers, slots), got {self.slots.shape}")
        slots_per_rank(self.slots.shape[1], self.num_ranks)
        if self.slots.min() < 0 or self.slots.max() >= self.num_experts:
            raise DataError(
                f"a placement holds expert {int(self.slots.min())} to {int(self.slots.max())}, "
                f"allowed: 0 to {self.num_experts - 1}"
            )
        if not self.num_replicas.all():
            layer, expert = np.argwhere(self.num_replicas == 0)[0]
            raise DataError(f"layer {layer} of a placement has no slot for expert {expert}")

    @property
    def num_slots(self) -> int:
        """Slots over all ranks, redundant ones included."""
        return self.slots.shape[1]

    @cached_property
    def num_replicas(self) -> NDArray[np.int64]:
        """Slots that hold each expert, shape (layers, experts)."""
        return _counted(self.slots, self.num_experts)

    @cached_property
    def held(self) -> NDArray[np.int64]:
        """Slots of each rank that hold each expert, shape (layers, ranks, experts)."""
        rows = self.slots.reshape(len(self.slots) * self.num_ranks, -1)
        return _counted(rows, self.num_experts).reshape(len(self.slots), self.num_ranks, self.num_experts)

    @cached_property
    def _copy_numbers(self) -> NDArray[np.int64]:
        """Which copy of its expert each slot holds, from 0; shape (layers, slots)."""
        order = np.argsort(self.slots, axis=1, kind="stable")
        first = np.cumsum(self.num_replicas, axis=1) - self.num_replicas
        numbers = np.arange(self.num_slots) - np.take_along_axis(first, np.take_along_axis(self.slots, order, 1), 1)
        found = np.empty_like(numbers)
        np.put_along_axis(found, order, numbers, axis=1)
        return found

    @property
    def num_duplicates(self) -> int:
        """Slots that hold an expert which their rank has already: they share out no load."""
        return int((self.held - 1).clip(min=0).sum())

    def expected_rank_loads(self, loads: ArrayLike) -> NDArray[np.float64]:
        """Load of each rank if the replicas of an expert share its load evenly.

        Args:
            loads: load per expert, shape (…, layers, experts).

        Returns:
            Shape (…, layers, ranks).
        """
        each = np.asarray(loads, dtype=float) / self.num_replicas
        layers = np.arange(len(self.slots))[:, None]
        by_slot = each[..., layers, self.slots]
        return by_slot.reshape(*by_slot.shape[:-1], self.num_ranks, -1).sum(axis=-1)

    def rank_loads(self, tokens: NDArray[np.integer], rng: np.random.Generator | None = None) -> NDArray[np.int64]:
        """Tokens of each rank, whole ones, when each (token, expert) pair goes to one copy.

        Args:
            tokens: (token, expert) pairs per expert, shape (steps, layers, experts).
            rng: draws the copy of each pair at random, as a server does that goes by a hash of the token's place in
                its batch; None shares them out evenly, with the remainder on the first copies.

        Returns:
            Shape (steps, layers, ranks); sums over ranks are those over experts.
        """
        layers = np.arange(len(self.slots))[:, None]
        copies = self.num_replicas[layers, self.slots]
        by_slot = tokens[:, layers, self.slots].astype(np.int64)
        if rng is None:
            by_slot = (by_slot + (copies - 1 - self._copy_numbers)) // copies
        else:
            left = tokens.astype(np.int64)
            for number in range(int(copies.max()) if copies.max() > 1 else 0):
                layer, slot = np.nonzero((self._copy_numbers == number) & (copies > 1))
                expert = self.slots[layer, slot]
                waiting = left[:, layer, expert]
                taken = rng.binomial(waiting, 1 / (copies[layer, slot] - number))
                by_slot[:, layer, slot] = taken
                left[:, layer, expert] = waiting - taken
        return by_slot.reshape(*by_slot.shape[:2], self.num_ranks, -1).sum(axis=-1)

    def moved_to(self, new: Placement) -> NDArray[np.int64]:
        """Experts that each rank must receive to get from here to another placement.

        An expert that the rank holds already, in whichever slot, is not received; of several new copies on one rank
        one is received.

        Args:
            new: of the same sizes but for the slots.

        Returns:
            Shape (layers, ranks).
        """
        if self.held.shape != new.held.shape:
            raise DataError(
                f"placements of different sizes: (layers, ranks, experts) is {self.held.shape} and {new.held.shape}"
            )
        return ((new.held > 0) & (self.held == 0)).sum(axis=-1)


def slots_per_rank(num_slots: int, num_ranks: int) -> int:
    """How many slots each rank has.

    Raises:
        ParameterError: the slots do not divide among the ranks; names the numbers of redundant experts that would do.
    """
    if num_ranks < 1 or num_slots < 1:
        raise ParameterError(f"got {num_slots} slots on {num_ranks} ranks, allowed: at least 1 of each")
    if num_slots % num_ranks:
        fewer, more = num_slots // num_ranks * num_ranks, -(-num_slots // num_ranks) * num_ranks
        raise ParameterError(
            f"{num_slots} slots (experts and redundant experts) cannot be spread evenly over {num_ranks} ranks; "
            f"the next numbers that can: {fewer or more} and {more}"
        )
    return num_slots // num_ranks


def initial(num_layers: int, num_experts: int, num_redundant: int, num_ranks: int) -> Placement:
    """What a server starts with: all experts in order, then again the first ones as redundant copies.

    Source: vLLM 0.33.0, the map that its EPLB state starts from.

    Raises:
        ParameterError: a negative number of redundant experts, or slots that do not divide among the ranks.
    """
    if num_redundant < 0:
        raise ParameterError(f"redundant experts: got {num_redundant}, allowed: 0 or more")
    slots_per_rank(num_experts + num_redundant, num_ranks)
    row = np.arange(num_experts + num_redundant) % num_experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts, num_ranks)


def place(loads: ArrayLike, num_slots: int, num_ranks: int, *, num_groups: int = 1, num_nodes: int = 1) -> Placement:
    """Replicate the heaviest experts and pack all copies onto the ranks so that the busiest rank has little to do.

    With groups of experts and several nodes, whole groups are packed onto nodes first, then each node replicates and
    packs for itself, so that a token that is limited to a few groups meets few nodes. Groups that do not divide among
    the nodes are ignored, as is a single node's.

    Source: the algorithm that the README of DeepSeek's EPLB describes. A pass of exchanges between the busiest rank
    and the others is added; it never makes the busiest rank busier.

    Args:
        loads: load per expert, e.g. tokens in a window; shape (layers, experts), not negative.
        num_slots: experts and redundant copies together; divides among the ranks.
        num_ranks: ranks.
        num_groups: groups of neighbouring experts; divides the experts.
        num_nodes: nodes; divides the ranks, and the slots.

    Raises:
        DataError: loads that are no table of layers × experts, negative or not finite.
        ParameterError: fewer slots than experts, or sizes that do not divide.
    """
    table = checked_loads(loads)
    num_layers, num_experts = table.shape
    slots_per_rank(num_slots, num_ranks)
    if num_slots < num_experts:
        raise ParameterError(f"{num_experts} experts need at least as many slots, got {num_slots}")
    for name, number, whole, of in (
        ("groups", num_groups, num_experts, "experts"),
        ("nodes", num_nodes, num_ranks, "ranks"),
    ):
        if number < 1 or whole % number:
            raise ParameterError(f"{number} {name} do not divide {whole} {of}")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    order = _experts_by_node(table, num_groups, num_nodes)
    by_node = np.take_along_axis(table, order, axis=1).reshape(num_layers * num_nodes, -1)
    copies, num_replicas = replicate(by_node, num_slots // num_nodes)
    each = np.take_along_axis(by_node / num_replicas, copies, axis=1)
    places = pack(each, num_ranks // num_nodes)
    local = np.take_along_axis(copies, places, axis=1).reshape(num_layers, num_nodes, -1)
    local += (np.arange(num_nodes) * (num_experts // num_nodes))[:, None]
    slots = np.take_along_axis(order, local.reshape(num_layers, -1), axis=1)
    return Placement(slots, num_experts, num_ranks)


def checked_loads(loads: ArrayLike) -> NDArray[np.float64]:
    """Loads as a table of layers × experts.

    Raises:
        DataError: another shape, a negative load or one that is not finite; says where.
    """
    table = np.asarray(loads, dtype=float)
    if table.ndim != 2 or not table.size:
        raise DataError(f"loads have the shape (layers, experts), got {table.shape}")
    if not (np.isfinite(table) & (table >= 0)).all():
        layer, expert = np.argwhere(~(np.isfinite(table) & (table >= 0)))[0]
        raise DataError(
            f"layer {layer}, expert {expert}: a load of {table[layer, expert]:g}, allowed: 0 or more, and finite"
        )
    return table


def _counted(rows: NDArray[np.int64], num_values: int) -> NDArray[np.int64]:
    keys = rows + np.arange(len(rows))[:, None] * num_values
    return np.bincount(keys.ravel(), minlength=len(rows) * num_values).reshape(len(rows), num_values)


def _experts_by_node(table: NDArray[np.float64], num_groups: int, num_nodes: int) -> NDArray[np.int64]:
    """The experts in the order of nodes and, within a node, of its groups: shape (layers, experts)."""
    num_layers, num_experts = table.shape
    if num_nodes == 1:
        return np.tile(np.arange(num_experts), (num_layers, 1))
    size = num_experts // num_groups
    groups = pack(table.reshape(num_layers, num_groups, size).sum(axis=-1), num_nodes)
    return (groups[:, :, None] * size + np.arange(size)).reshape(num_layers, num_experts)
