"""Speed of the lockstep simulator, in rank-steps per second, against the same semantics in plain Python."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from measure import Ratio, interleaved

from rackbook.replay.lockstep import StepCost, replay
from rackbook.replay.queues import Queue, lag

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lockstep_reference as reference

COST = StepCost(fixed_ms=10.0, us_per_token=13.0, ps_per_attended_token=8.5)
CAP = 16_384
GOAL = 1.0
"""Million rank-steps per second."""


def requests(num: int, mean_tokens: float, load: float | None) -> Queue:
    """Prompts of exponential length, all at the start or as a Poisson stream at a load of one rank."""
    generator = np.random.default_rng(0)
    new = np.maximum(generator.exponential(mean_tokens, num).astype(np.int64), 1)
    cached = generator.integers(0, 50_000, num)
    waiting = Queue(np.zeros(num, dtype=np.int64), cached, new)
    if load is None:
        return waiting
    arrival = np.cumsum(generator.exponential(COST.alone_s(waiting, CAP) / num / load, num))
    return Queue(np.rint(arrival * 1e9).astype(np.int64), cached, new)


def rate(what: str, queue: Queue, num_ranks: int) -> Ratio:
    """Million rank-steps per second of ours and of the reference, on one lag replay of 5 s."""
    plan = lag(queue, num_ranks, 5.0)
    size = replay(plan, COST, CAP).tokens.size
    times = interleaved(lambda: replay(plan, COST, CAP), lambda: reference.replay(plan, COST, CAP))
    ours, plain = (size / seconds / 1e6 for seconds in times)
    return Ratio(what, ours, plain, "M/s", ours / plain, f"≥ {GOAL:g} M rank-steps/s", ours >= GOAL)


def ratios() -> list[Ratio]:
    """Saturated queues, which the replays measure, and a stream below capacity, where arrivals change most steps."""
    saturated = requests(2_000, 50_000, None)
    stream = requests(4_000, 14_000, 0.8)
    return [
        *(rate(f"lag replay, saturated, {n} ranks", saturated, n) for n in (2, 4, 8, 32)),
        *(rate(f"lag replay, 80 % load, {n} ranks", stream, n) for n in (2, 4, 32)),
    ]
