"""Tables of balancing replayed: one part of the model under a router with preferences, and what each setting buys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.experts.balancedness import (
    balancedness_of_sums,
    balancedness_per_layer_step,
    recovered_fraction,
)
from rackbook.experts.popularity import HOLD_STEPS
from rackbook.experts.recovery import WITH, WITHOUT
from rackbook.experts.replay import Eplb, Replay, replay
from rackbook.experts.setups import Setup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rackbook.experts.uniform import Part

BINS_PER_INTERVAL = 12
"""Points per rearrangement interval in a course over steps."""

STAYS, DRIFTS = "preferences that stay", "preferences that drift"
LOG_LINE = "sum over layers of means ÷ sum of maxima, per step, as vLLM logs it"
WINDOW = "mean over layers of mean ÷ max, loads summed over a period"


def course(setups: Iterable[Setup]) -> pl.DataFrame:
    """Balancedness over the steps, without and with EPLB.

    Returns:
        part, balance_of, step (middle of a bin), balancedness_per_layer_step (mean over layers and the looked-at steps
        of the bin), window_steps (null before the first rearrangement), origin, source.
    """
    rows = []
    for setup in setups:
        width = max(1, setup.eplb.interval_steps // BINS_PER_INTERVAL)
        for balance_of, found in ((WITHOUT, setup.without), (WITH, setup.balanced)):
            ratios = found.per_layer_step.mean(axis=1)
            # a bin ends where a placement does
            keys = found.period * setup.num_steps + found.steps // width
            for key in np.unique(keys):
                chosen = keys == key
                period = int(found.period[chosen][0])
                window = found.rearrangements[period - 1].window_steps if period else None
                rows.append(
                    {
                        "part": setup.part,
                        "balance_of": balance_of,
                        "step": int(found.steps[chosen].mean()) + 1,
                        "balancedness_per_layer_step": float(ratios[chosen].mean()),
                        "window_steps": window,
                        "origin": "simulated",
                        "source": setup.source(),
                    }
                )
    return pl.DataFrame(rows)


def moves(setups: Iterable[Setup], expert_gb: dict[Part, float], gb_per_s: float) -> pl.DataFrame:
    """What each rearrangement costs, and what it promised.

    Args:
        setups: parts that are balanced.
        expert_gb: size of one expert of one layer, by part.
        gb_per_s: assumed rate at which a rank receives experts.

    Returns:
        part, step (steps done before it), window_steps, num_experts_moved (received, over all ranks and layers that are
        simulated), moved_percent (of the slots), moved_gb_per_rank (the rank that receives most), move_ms (its time at
        the assumed rate), num_duplicates, planned_balancedness (of the window's load), origin, source, formula.
    """
    rows = []
    for setup in setups:
        for change in setup.balanced.rearrangements:
            most_gb = float(change.moved.sum(axis=0).max()) * expert_gb[setup.part]
            rows.append(
                {
                    "part": setup.part,
                    "step": change.step,
                    "window_steps": change.window_steps,
                    "num_experts_moved": int(change.moved.sum()),
                    "moved_percent": 100 * float(change.moved.sum()) / change.placement.slots.size,
                    "moved_gb_per_rank": most_gb,
                    "move_ms": 1e3 * most_gb / gb_per_s,
                    "num_duplicates": change.placement.num_duplicates,
                    "planned_balancedness": change.planned,
                    "origin": "simulated",
                    "source": setup.source(),
                    "formula": f"experts × {1e3 * expert_gb[setup.part]:.1f} MB ÷ {gb_per_s:g} GB/s",
                }
            )
    return pl.DataFrame(rows)


def recoverable(setups: Iterable[tuple[str, Setup]], printed: dict[tuple[Part, str], float]) -> pl.DataFrame:
    """What balancing recovers, of what uniform routing has and of what any placement could have.

    Args:
        setups: with what they assume, e.g. :data:`STAYS`.
        printed: balancedness by part and ``balance_of``.

    Returns:
        part, assumption, before, after, printed_after, uniform_balancedness, hindsight_balancedness,
        balancedness_bound, recovered_percent (of the gap to uniform routing), recovered_of_bound_percent, origin,
        source.
    """
    rows = []
    for assumption, setup in setups:
        before, after, uniform, bound = setup.before(), setup.after(), setup.batch.approximation(), setup.bound()
        rows.append(
            {
                "part": setup.part,
                "assumption": assumption,
                "before": before,
                "after": after,
                "printed_after": printed[setup.part, WITH],
                "uniform_balancedness": uniform,
                "hindsight_balancedness": setup.hindsight(),
                "balancedness_bound": bound,
                "recovered_percent": 100 * recovered_fraction(before, after, uniform) if uniform > before else None,
                "recovered_of_bound_percent": 100 * recovered_fraction(before, after, bound)
                if bound > before
                else None,
                "origin": "simulated",
                "source": setup.source(),
            }
        )
    return pl.DataFrame(rows)


def replayed_definitions(setups: Iterable[Setup]) -> pl.DataFrame:
    """Quantities called balancedness, of the same replayed steps.

    Returns:
        part, balance_of, definition, balancedness, bias (less the source's quantity), origin, source.
    """
    from rackbook.experts.uniform import PER_LAYER_STEP, SUMMED_LOADS

    rows = []
    for setup in setups:
        for balance_of, found in ((WITHOUT, setup.without), (WITH, setup.balanced)):
            later = found.period == found.period.max()
            ratios, means, maxima = found.per_layer_step[later], found.means[later], found.maxima[later]
            by_rank = _period_rank_loads(setup, found)
            source_value = float(ratios.mean())
            for definition, value in (
                (PER_LAYER_STEP, source_value),
                (LOG_LINE, float((means.sum(axis=1) / maxima.sum(axis=1)).mean())),
                (WINDOW, float(balancedness_per_layer_step(by_rank).mean())),
                (SUMMED_LOADS, balancedness_of_sums(by_rank)),
            ):
                rows.append(
                    {
                        "part": setup.part,
                        "balance_of": balance_of,
                        "definition": definition,
                        "balancedness": value,
                        "bias": value - source_value,
                        "origin": "simulated",
                        "source": setup.source(),
                    }
                )
    return pl.DataFrame(rows)


def _period_rank_loads(setup: Setup, found: Replay) -> np.ndarray:
    """Expected loads of the ranks, summed over the steps of the last period; shape (layers, ranks)."""
    from rackbook.experts.placement import initial

    begin = found.rearrangements[-1].step if found.rearrangements else 0
    starts = np.cumsum([0, *(block.num_steps for block in setup.blocks)])[:-1]
    total = np.sum([b.total for start, b in zip(starts, setup.blocks, strict=True) if start >= begin], axis=0)
    if found.rearrangements:
        placement = found.rearrangements[-1].placement
    else:
        placement = initial(*total.shape, 0, setup.eplb.num_ranks)
    return placement.expected_rank_loads(total)


def point(setup: Setup, **more: object) -> dict[str, object]:
    """One setting: balancedness without and with EPLB, of uniform routing, and the bound.

    Returns:
        part, num_ranks, num_redundant_experts, window_steps, interval_steps, before, after, uniform_balancedness,
        balancedness_bound, origin, source, and what is given beside.
    """
    return {
        "part": setup.part,
        "num_ranks": setup.eplb.num_ranks,
        "num_redundant_experts": setup.eplb.num_redundant,
        "window_steps": setup.eplb.window_steps,
        "interval_steps": setup.eplb.interval_steps,
        "before": setup.before(),
        "after": setup.after(),
        "uniform_balancedness": setup.batch.approximation(),
        "balancedness_bound": setup.bound(),
        "origin": "simulated",
        "source": setup.source(),
        **more,
    }


def by_redundancy(setups: Sequence[Setup], per_rank: Iterable[int]) -> pl.DataFrame:
    """:func:`point` for numbers of redundant experts on each rank."""
    rows = []
    for setup in setups:
        for number in per_rank:
            eplb = replace(setup.eplb, num_redundant=number * setup.eplb.num_ranks)
            rows.append(point(replace(setup, eplb=eplb), redundant_per_rank=number))
    return pl.DataFrame(rows)


def by_memory(setups: Sequence[Setup], memories: Iterable[float]) -> pl.DataFrame:
    """:func:`point` for preferences that last shorter or longer."""
    rows = []
    for setup in setups:
        for memory in memories:
            drifting = replace(setup, router=replace(setup.router, memory_steps=memory))
            rows.append(point(drifting, memory_steps=memory))
    return pl.DataFrame(rows)


def by_window(setup: Setup, windows: Sequence[int], intervals: Sequence[int]) -> pl.DataFrame:
    """Balancedness with EPLB for windows and intervals, on the same loads.

    All settings are judged over the same steps: those after the first rearrangement of the longest interval.

    Returns:
        part, window_steps, interval_steps, after, rearrangements_per_1000_steps, origin, source.
    """
    longest = Eplb(setup.eplb.num_ranks, setup.eplb.num_redundant, max(windows), max(intervals))
    steps = longest.first_step + max(intervals)
    settings = [replace(longest, window_steps=w, interval_steps=i) for w in windows for i in intervals]
    block_steps = min(eplb.block_steps(steps, HOLD_STEPS) for eplb in settings)
    blocks = list(setup.router.blocks(steps, block_steps))
    rows = []
    for eplb in settings:
        found = replay(blocks, steps, eplb, rng=np.random.default_rng([setup.seed, 1]))
        judged = found.steps >= longest.first_step
        rows.append(
            {
                "part": setup.part,
                "window_steps": eplb.window_steps,
                "interval_steps": eplb.interval_steps,
                "after": float(found.per_layer_step[judged].mean()),
                "rearrangements_per_1000_steps": 1000 / eplb.interval_steps,
                "origin": "simulated",
                "source": setup.source(),
            }
        )
    return pl.DataFrame(rows)
