"""Speed of the uniform-routing sampler at the published setting, against the plain numpy version."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
from measure import Ratio, at_most, faster, interleaved

from rackbook.experts.routing import sample_rank_loads

TARGET = {"num_ranks": 32, "num_tokens": 32 * 72 * 6, "num_experts": 384, "top_k": 6}
DRAFT = {"num_ranks": 32, "num_tokens": 32 * 72 * 5, "num_experts": 128, "top_k": 3}
OURS, PLAIN = 200, 3
"""Draws per timed call."""


def plain_rank_loads(
    *, num_ranks: int, num_tokens: int, num_experts: int, top_k: int, num_draws: int, seed: int
) -> np.ndarray:
    """What one writes first: the largest of one random number per token and expert, draw by draw; the same law."""
    rng = np.random.default_rng(seed)
    held = num_experts // num_ranks
    loads = np.empty((num_draws, num_ranks), np.int64)
    for draw in range(num_draws):
        chosen = np.argpartition(rng.random((num_tokens, num_experts)), num_experts - top_k, axis=1)[:, -top_k:]
        loads[draw] = np.bincount(chosen.ravel() // held, minlength=num_ranks)
    return loads


def peak_mib(function: partial) -> float:
    """Largest memory in use during a call, its result included, in MiB."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def ratios() -> list[Ratio]:
    """Time per draw of target and draft, and the memory for the target."""
    rows = []
    for part, batch in (("target", TARGET), ("draft", DRAFT)):
        ours = partial(sample_rank_loads, **batch, num_draws=OURS, seed=1)
        plain = partial(plain_rank_loads, **batch, num_draws=PLAIN, seed=1)
        ours()
        ours_s, plain_s = interleaved(ours, plain, repeats=7)
        what = f"one draw of uniform routing, {part} at DEP32 × 72 requests"
        rows.append(faster(what, 1e3 * ours_s / OURS, 1e3 * plain_s / PLAIN, "ms", 100))
    ours = partial(sample_rank_loads, **TARGET, num_draws=OURS, seed=1)
    plain = partial(plain_rank_loads, **TARGET, num_draws=PLAIN, seed=1)
    rows.append(at_most("peak memory of the target's draws", peak_mib(ours), peak_mib(plain), "MiB", 0.25))
    return rows
