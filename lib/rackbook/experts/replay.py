"""Expert balancing replayed step by step: what a window of past load is worth in the steps that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import DataError, ParameterError
from rackbook.experts.balancedness import balancedness_per_layer_step
from rackbook.experts.placement import Placement, initial, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    Policy = Callable[..., Placement]


STEPS_AT_ONCE = 64
"""Steps whose rank loads are computed together; it bounds the memory."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some steps in a row.

    Attributes:
        num_steps: how many.
        total: tokens per expert, summed over the steps; shape (layers, experts).
        tokens: tokens per expert of the steps that are looked at; shape (looked at, layers, experts).
        offsets: which of the steps these are, from 0.
    """

    num_steps: int
    total: NDArray[np.integer]
    tokens: NDArray[np.integer]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: NDArray[np.integer]) -> Block:
        """A block of which every step is looked at."""
        return cls(len(tokens), tokens.sum(axis=0, dtype=np.int64), tokens, np.arange(len(tokens)))

    def cut(self, steps: int) -> tuple[Block, Block]:
        """The first so many steps, and the others.

        Raises:
            DataError: the steps in between are known as a sum only.
        """
        if len(self.tokens) != self.num_steps:
            raise DataError(f"a block of {self.num_steps} steps is known as a sum and cannot be cut after {steps}")
        return Block.of(self.tokens[:steps]), Block.of(self.tokens[steps:])


@dataclass(frozen=True)
class Eplb:
    """How a server balances its experts.

    Attributes:
        num_ranks: ranks that share the experts.
        num_redundant: redundant copies over all ranks.
        window_steps: a rearrangement goes by the load of so many last steps.
        interval_steps: steps from one rearrangement to the next.
        num_groups: groups of experts that stay on one node.
        num_nodes: nodes.
        delay_steps: steps from the decision until the new placement serves, as weights move in the background.
    """

    num_ranks: int
    num_redundant: int
    window_steps: int
    interval_steps: int
    num_groups: int = 1
    num_nodes: int = 1
    delay_steps: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ParameterError: a number that is too small, or a delay as long as the interval.
        """
        for name, least in (("num_ranks", 1), ("num_redundant", 0), ("window_steps", 1), ("interval_steps", 1)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name}: got {getattr(self, name)}, allowed: {least} or more")
        if not 0 <= self.delay_steps < self.first_step:
            raise ParameterError(
                f"delay_steps: got {self.delay_steps}, allowed: 0 to {self.first_step - 1}, "
                "less than the time to the first rearrangement"
            )

    @property
    def first_step(self) -> int:
        """Steps before the first rearrangement: a server's counter starts at three quarters of the interval.

        Source: vLLM 0.33.0, ``EplbState``; at least one step.
        """
        return max(1, self.interval_steps // 4)

    def decisions(self, num_steps: int) -> range:
        """After how many steps each rearrangement is decided, up to and without the last step."""
        return range(self.first_step, num_steps, self.interval_steps)

    def edges(self, num_steps: int) -> list[int]:
        """Steps at which something begins or ends: decisions, their windows, their taking effect."""
        edges = {num_steps}
        for step in self.decisions(num_steps):
            edges |= {step, max(0, step - self.window_steps), min(num_steps, step + self.delay_steps)}
        return sorted(edges - {0})

    def block_steps(self, num_steps: int, most: int) -> int:
        """The longest block, up to ``most`` steps, that no edge cuts."""
        common = math.gcd(*self.edges(num_steps))
        return max(steps for steps in range(1, most + 1) if common % steps == 0)


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """One new placement.

    Attributes:
        step: steps done when it was decided.
        window_steps: steps that it went by; fewer than asked for at the first.
        placement: the new one.
        moved: experts that each rank received, shape (layers, ranks).
        planned: balancedness of the window's load under the new placement, averaged over the layers.
    """

    step: int
    window_steps: int
    placement: Placement
    moved: NDArray[np.int64]
    planned: float


@dataclass(frozen=True, eq=False)
class Replay:
    """What came of it, at the steps that were looked at.

    Attributes:
        steps: number of each, from 0.
        period: how many rearrangements had taken effect.
        means: mean load of the ranks, shape (steps, layers).
        maxima: load of the busiest rank, shape (steps, layers).
        rearrangements: in order.
    """

    steps: NDArray[np.int64]
    period: NDArray[np.int64]
    means: NDArray[np.float64]
    maxima: NDArray[np.float64]
    rearrangements: tuple[Rearrangement, ...]

    @property
    def per_layer_step(self) -> NDArray[np.float64]:
        """Balancedness by the source's definition before it is averaged, shape (steps, layers)."""
        return self.means / self.maxima

    def balancedness(self, period: int) -> float:
        """The source's balancedness over one period; 0 is before the first rearrangement took effect.

        Raises:
            ParameterError: no step of this period was looked at.
        """
        chosen = self.period == period
        if not chosen.any():
            raise ParameterError(f"period {period}: got no step, allowed: 0 to {int(self.period.max())}")
        return float(self.per_layer_step[chosen].mean())


def replay(
    blocks: Iterable[Block],
    num_steps: int,
    eplb: Eplb,
    *,
    rng: np.random.Generator | None = None,
    policy: Policy | None = place,
) -> Replay:
    """Go through the steps with one block in memory at a time.

    Args:
        blocks: so many steps in all; a block of which only the sum is known must not reach across an edge.
        num_steps: steps in all.
        eplb: when the experts are rearranged, and by what.
        rng: see :meth:`Placement.rank_loads`.
        policy: called as :func:`~rackbook.experts.placement.place`; None leaves the experts where a server that does
            not balance has them, one copy each.

    Raises:
        DataError: no or too few steps, layers and experts that change, or a block that reaches across an edge.
        ParameterError: slots that do not divide among the ranks.
    """
    watched = _Watched(rng)
    rearrangements: list[Rearrangement] = []
    waiting: dict[int, Placement] = {}
    windows = dict.fromkeys(eplb.decisions(num_steps) if policy else ())
    placement: Placement | None = None
    newest: Placement | None = None
    start = 0
    for block in _cut(blocks, eplb.edges(num_steps)):
        if placement is None or newest is None:
            redundant = eplb.num_redundant if policy else 0
            placement = newest = initial(*block.total.shape, redundant, eplb.num_ranks)
        if block.total.shape != (len(placement.slots), placement.num_experts):
            raise DataError(f"step {start}: (layers, experts) is {block.total.shape}, before it was another")
        if start in waiting:
            watched.serve_otherwise(placement)
            placement = waiting.pop(start)
        watched.add(start, block, placement)
        end = start + block.num_steps
        for step, total in windows.items():
            if step - eplb.window_steps <= start < step:
                windows[step] = block.total + (0 if total is None else total)
        if policy and end in windows and end < num_steps:
            total = windows.pop(end)
            new = policy(
                total, placement.num_slots, eplb.num_ranks, num_groups=eplb.num_groups, num_nodes=eplb.num_nodes
            )
            planned = float(balancedness_per_layer_step(new.expected_rank_loads(total)).mean())
            window = min(eplb.window_steps, end)
            rearrangements.append(Rearrangement(end, window, new, newest.moved_to(new), planned))
            waiting[end + eplb.delay_steps] = newest = new
        start = end
    if start != num_steps or placement is None:
        raise DataError(f"the loads end after {start} steps, expected {num_steps}")
    watched.evaluate(placement)
    return Replay(*(np.concatenate(parts) for parts in watched.found), tuple(rearrangements))


class _Watched:
    """The steps that are looked at, gathered as long as one placement serves them: many at once cost much less."""

    def __init__(self, rng: np.random.Generator | None) -> None:
        self.found: tuple[list[NDArray], ...] = ([], [], [], [])
        self._rng, self._period = rng, 0
        self._steps: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.integer]] = []

    def add(self, start: int, block: Block, placement: Placement) -> None:
        self._steps.append(start + block.offsets)
        self._tokens.append(block.tokens)
        if sum(map(len, self._steps)) >= STEPS_AT_ONCE:
            self.evaluate(placement)

    def serve_otherwise(self, before: Placement) -> None:
        self.evaluate(before)
        self._period += 1

    def evaluate(self, placement: Placement) -> None:
        if not self._steps:
            return
        by_rank = placement.rank_loads(np.concatenate(self._tokens), self._rng)
        steps = np.concatenate(self._steps)
        columns = (steps, np.full(len(steps), self._period), by_rank.mean(axis=-1), by_rank.max(axis=-1).astype(float))
        for parts, column in zip(self.found, columns, strict=True):
            parts.append(column)
        self._steps, self._tokens = [], []


def in_blocks(tokens: NDArray[np.integer], block_steps: int = 64) -> Iterator[Block]:
    """Loads that are in memory, or mapped from a file, as blocks of which every step is looked at.

    Args:
        tokens: tokens per expert, shape (steps, layers, experts).
        block_steps: bounds the memory that is needed beside them.
    """
    if tokens.ndim != 3:
        raise DataError(f"loads have the shape (steps, layers, experts), got {tokens.shape}")
    for start in range(0, len(tokens), block_steps):
        yield Block.of(np.asarray(tokens[start : start + block_steps]))


def _cut(blocks: Iterable[Block], edges: list[int]) -> Iterator[Block]:
    """The blocks, cut so that none reaches across an edge; what lies beyond the last edge is left out."""
    coming = iter(edges)
    edge = next(coming)
    start = 0
    for block in blocks:
        while block.num_steps > edge - start:
            first, block = block.cut(edge - start)
            yield first
            start, edge = edge, next(coming, None)
            if edge is None:
                return
        yield block
        start += block.num_steps
        if start == edge:
            edge = next(coming, None)
            if edge is None:
                return
