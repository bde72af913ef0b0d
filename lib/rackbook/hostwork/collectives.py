"""The synchronisation of the ranks, measured: all-reduces of a small vector over processes of this machine or others.

The timed vector is the one that vLLM adds up before each step: seven numbers of every rank. All-reduces follow each
other directly, nothing else runs in between, and all ranks come at once: that is the cost of the synchronisation
alone, not of waiting for a rank that is late.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rackbook.cores import usable_cores
from rackbook.errors import DataError, ParameterError
from rackbook.hostwork.foreign_load import Watch
from rackbook.hostwork.rank_group import MAX_RANKS, Block, RankGroup, Ranks
from rackbook.hostwork.ranks import launched
from rackbook.hostwork.ranks.lanes import ROWS
from rackbook.hostwork.ranks.member import ALGORITHMS
from rackbook.hostwork.sampling import Samples, interleaved
from rackbook.intervals import median_interval
from rackbook.locations import shown

WARM_UP_TURNS = 5
BLOCK_S = 0.08
"""A block is made about so long: its median is one repeat."""

LEAST_FOR_P99 = 100
"""All-reduces below which a P99 would be nothing but the longest."""

START_S_PER_RANK = 0.15
"""Rough time to start a rank, only to divide a budget."""


@dataclass(frozen=True)
class Collectives:
    """What was measured.

    Attributes:
        points: one row per all-reduce and number of ranks: all_reduce, num_ranks, num_hosts, num_cores, pinned,
            oversubscribed, num_values, sync_p50_ms with its interval sync_low_ms and sync_high_ms, sync_p99_ms,
            cpu_us_per_rank, waits_per_rank, segments_per_rank, num_repeats, num_samples, tight, missing_reason.
        absent: why an all-reduce was not measured, by name.
        versions: torch and vllm of the rank processes.
        doubts: what disturbed the measurement, with the number of ranks; launched ranks are not watched.
    """

    points: pl.DataFrame
    absent: dict[str, str]
    versions: dict[str, str | None]
    doubts: tuple[str, ...] = ()


def measure(
    rank_counts: Sequence[int],
    *,
    algorithms: Sequence[str] = ALGORITHMS,
    interpreter: Path | str | None = None,
    budget_s: float = 25.0,
    relative_halfwidth: float = 0.05,
) -> Collectives:
    """Measure on this machine.

    Args:
        rank_counts: numbers of ranks, each once.
        algorithms: names out of :data:`rackbook.hostwork.ranks.member.ALGORITHMS`.
        interpreter: the Python of the ranks; this one if None.
        budget_s: time for all of it; each number of ranks gets a share that grows with the ranks.
        relative_halfwidth: see :func:`rackbook.hostwork.sampling.interleaved`.

    Raises:
        ParameterError: no or doubled or impossible numbers of ranks, an unknown all-reduce, no such interpreter.
        RankError: a rank failed.
    """
    wrong = [count for count in rank_counts if not 2 <= count <= MAX_RANKS]
    if wrong or not rank_counts or len(set(rank_counts)) < len(rank_counts):
        raise ParameterError(f"rank_counts: got {list(rank_counts)}, allowed: different numbers from 2 to {MAX_RANKS}")
    rows: list[dict[str, Any]] = []
    doubts: list[str] = []
    end = time.monotonic() + budget_s
    with RankGroup(algorithms, interpreter) as group:
        if not group.algorithms:
            return Collectives(pl.DataFrame(), group.absent, group.versions)
        left = sorted(rank_counts)
        while left:
            share = (end - time.monotonic()) * (8 + left[0]) / sum(8 + count for count in left)
            budget = max(0.1, share - START_S_PER_RANK * left[0])
            before = Watch.now([group.pid])
            with group.ranks(left.pop(0)) as ranks:
                rows += _measured(ranks, group.algorithms, budget, relative_halfwidth)
            found = Watch.now([group.pid]).doubts(before, usable_cores())
            doubts += [f"{ranks.num_ranks} ranks: {doubt}" for doubt in found]
    return Collectives(pl.DataFrame(rows, infer_schema_length=None), group.absent, group.versions, tuple(doubts))


def _measured(
    ranks: Ranks, algorithms: Sequence[str], budget_s: float, relative_halfwidth: float
) -> list[dict[str, Any]]:
    blocks: dict[str, list[Block]] = {name: [] for name in algorithms}

    def repeat(name: str, num_turns: int) -> float:
        blocks[name].append(ranks.block(name, num_turns))
        return float(np.median(blocks[name][-1].durations_ms))

    turns = {}
    for name in algorithms:
        usual_ms = float(np.median(ranks.block(name, WARM_UP_TURNS).durations_ms))
        turns[name] = int(np.clip(BLOCK_S * 1e3 / usual_ms, 5, 200))
    found = interleaved(
        {name: lambda name=name: repeat(name, turns[name]) for name in algorithms},
        budget_s=budget_s,
        relative_halfwidth=relative_halfwidth,
    )
    where = {
        "num_ranks": ranks.num_ranks,
        "num_hosts": 1,
        "num_cores": ranks.num_cores,
        "pinned": ranks.pinned,
        "oversubscribed": ranks.oversubscribed,
    }
    return [_row(name, where, found[name], blocks[name]) for name in algorithms]


def read_launched(path: Path) -> Collectives:
    """Read the file that rank 0 of launched ranks wrote (``torchrun … -m rackbook.hostwork.ranks --out FILE``).

    Raises:
        DataError: no such file, or not one of these.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["format"] != launched.FORMAT:
            raise DataError(f"{shown(path)}: got format {found['format']!r}, this version reads {launched.FORMAT}")
        where = {
            "num_ranks": int(found["num_ranks"]),
            "num_hosts": int(found["num_hosts"]),
            "num_cores": int(found["cores_per_host"]),
            "pinned": False,
            "oversubscribed": bool(found["oversubscribed"]),
        }
        rows = []
        for name, parts in found["blocks"].items():
            blocks = [Block.of(part) for part in parts]
            medians = tuple(float(np.median(block.durations_ms)) for block in blocks)
            rows.append(_row(name, where, Samples(medians, median_interval(medians), tight=False), blocks))
        return Collectives(pl.DataFrame(rows, infer_schema_length=None), dict(found["absent"]), {})
    except FileNotFoundError:
        raise DataError(f"{shown(path)}: no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{shown(path)}: not what launched ranks write ({type(problem).__name__}: {problem})") from None


def _row(name: str, where: Mapping[str, Any], samples: Samples, blocks: Sequence[Block]) -> dict[str, Any]:
    pooled = np.concatenate([block.durations_ms for block in blocks])
    enough = pooled.size >= LEAST_FOR_P99
    segments = [block.segments for block in blocks if block.segments is not None]
    too_few = None if enough else f"P99: {pooled.size} all-reduces, it takes {LEAST_FOR_P99}"
    no_bounds = None if samples.interval.low is not None else f"interval: {len(samples.values)} repeats, it takes 6"
    return {
        "all_reduce": name,
        **where,
        "num_values": ROWS * where["num_ranks"],
        "sync_p50_ms": samples.interval.estimate,
        "sync_low_ms": samples.interval.low,
        "sync_high_ms": samples.interval.high,
        "sync_p99_ms": float(np.percentile(pooled, 99)) if enough else None,
        "cpu_us_per_rank": float(np.median([block.cpu_us for block in blocks])),
        "waits_per_rank": float(np.median([block.waits for block in blocks])),
        "segments_per_rank": float(np.median(segments)) if segments else None,
        "num_repeats": len(samples.values),
        "num_samples": int(pooled.size),
        "tight": samples.tight,
        "missing_reason": "; ".join(filter(None, (too_few, no_bounds))) or None,
    }
