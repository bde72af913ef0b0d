"""One part of the model under a router with preferences, and how it is balanced: what replayed tables start from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from rackbook.experts.balancedness import balancedness_per_layer_step
from rackbook.experts.bounds import greatest_balancedness
from rackbook.experts.placement import place
from rackbook.experts.popularity import HOLD_STEPS, Router, calibrated
from rackbook.experts.replay import Eplb, Replay, replay

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rackbook.experts.popularity import Family
    from rackbook.experts.replay import Block
    from rackbook.experts.uniform import Batch, Part


@dataclass(frozen=True)
class Setup:
    """One part of the model, its router, and how it is balanced.

    Attributes:
        batch: the part, and the batch of a step.
        router: stands for the real one.
        eplb: how experts are rearranged.
        num_steps: steps that are replayed.
        seed: of the copy that each pair goes to.
    """

    batch: Batch
    router: Router
    eplb: Eplb
    num_steps: int
    seed: int

    @property
    def part(self) -> Part:
        """The part of the model."""
        return self.batch.part

    @cached_property
    def blocks(self) -> list[Block]:
        """The loads; the same for everything that is done with them."""
        return list(self.router.blocks(self.num_steps, self.eplb.block_steps(self.num_steps, HOLD_STEPS)))

    @cached_property
    def without(self) -> Replay:
        """The steps with the experts where a server without balancing has them."""
        return replay(self.blocks, self.num_steps, self.eplb, policy=None)

    @cached_property
    def balanced(self) -> Replay:
        """The steps with EPLB."""
        return replay(self.blocks, self.num_steps, self.eplb, rng=np.random.default_rng([self.seed, 1]))

    def before(self) -> float:
        """The source's balancedness without EPLB; this and the next three are over the same steps."""
        return float(self.without.per_layer_step[self.without.steps >= self._judged_from].mean())

    def after(self) -> float:
        """The source's balancedness with EPLB."""
        return float(self.balanced.per_layer_step[self.balanced.steps >= self._judged_from].mean())

    def bound(self) -> float:
        """What no placement into these slots exceeds, even if it were chosen anew for every layer and step."""
        slots = self.batch.num_experts + self.eplb.num_redundant
        return float(greatest_balancedness(self._judged_tokens, slots, self.eplb.num_ranks).mean())

    def hindsight(self) -> float:
        """One placement for all of these steps, made with their load in hand."""
        total = np.sum([block.total for block in self._judged], axis=0)
        placement = place(total, self.batch.num_experts + self.eplb.num_redundant, self.eplb.num_ranks)
        by_rank = placement.rank_loads(self._judged_tokens, np.random.default_rng([self.seed, 2]))
        return float(balancedness_per_layer_step(by_rank).mean())

    @property
    def _judged_from(self) -> int:
        """The step from which the first rearrangement serves."""
        return self.eplb.first_step + self.eplb.delay_steps

    @property
    def _judged(self) -> list[Block]:
        starts = np.cumsum([0, *(block.num_steps for block in self.blocks)])[:-1]
        return [block for start, block in zip(starts, self.blocks, strict=True) if start >= self._judged_from]

    @property
    def _judged_tokens(self) -> NDArray[np.integer]:
        return np.concatenate([block.tokens for block in self._judged])

    def source(self) -> str:
        """What the numbers come from, for the column."""
        return f"router of skew {self.router.skew:.2f}, seed {self.router.seed}"


@cache
def fitted_router(
    published: Batch, num_layers: int, balancedness: float, seed: int, family: Family = "log-normal"
) -> Router:
    """A router whose skew is fitted to a printed balancedness without EPLB, at the printed setting.

    Args:
        published: the printed setting.
        num_layers: layers that are simulated.
        balancedness: the printed one.
        seed: of the router.
        family: how popularity follows from a score.
    """
    router = Router(
        num_layers=num_layers,
        num_experts=published.num_experts,
        top_k=published.top_k,
        num_tokens=published.num_tokens,
        skew=0.0,
        seed=seed,
        family=family,
    )
    return calibrated(router, balancedness, published.num_ranks)


def for_batch(router: Router, batch: Batch) -> Router:
    """The same preferences for another batch."""
    return replace(router, num_experts=batch.num_experts, top_k=batch.top_k, num_tokens=batch.num_tokens)


def shortened(setup: Setup, steps_after: int) -> Setup:
    """The setup, ended so many steps after its first rearrangement: enough where preferences stay."""
    return replace(setup, num_steps=min(setup.num_steps, setup.eplb.first_step + steps_after))
