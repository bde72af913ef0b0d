"""One rank's part in a block of timed all-reduces, every sum checked."""

from __future__ import annotations

import time
from typing import Any

from rackbook.hostwork.ranks import lanes, segments

try:
    import resource
except ImportError:  # not on Windows, where no rank runs
    resource = None  # type: ignore[assignment]


class WrongSumError(Exception):
    """An all-reduce that did not give the sum."""


def block(algorithm: Any, rank: int, num_ranks: int, first_turn: int, num_turns: int) -> dict[str, Any]:
    """Time all-reduces one after the other, as this rank sees them.

    One more is run first and not counted: the ranks do not begin a block at the same moment.

    Args:
        algorithm: has ``put(values)``, ``run()`` and ``result()``; only ``run`` is timed.
        rank: this rank.
        num_ranks: all ranks.
        first_turn: number of the first all-reduce; the numbers added up depend on it.
        num_turns: how many are counted.

    Returns:
        durations_ns: one per all-reduce; cpu_ns: CPU time of this process inside them, all threads, summed; waits:
        times that the process gave the CPU away, summed over the block; segments: TCP segments with data that it sent
        per all-reduce, the first one included, None where that is not known.

    Raises:
        WrongSumError: a sum that is not that of the contributions.
    """
    durations, cpu_ns, waits = [], 0, 0
    sent_before = segments.sent()
    for turn in range(first_turn, first_turn + 1 + num_turns):
        algorithm.put(lanes.contribution(rank, num_ranks, turn))
        waits_before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        cpu_before = time.process_time_ns()
        before = time.perf_counter_ns()
        algorithm.run()
        taken = time.perf_counter_ns() - before
        cpu_after = time.process_time_ns()
        if turn > first_turn:
            durations.append(taken)
            cpu_ns += cpu_after - cpu_before
            waits += resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits_before
        if (got := algorithm.result()) != (expected := lanes.expected_sum(num_ranks, turn)):
            place = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
            raise WrongSumError(
                f"rank {rank} of {num_ranks}, all-reduce {turn}: wrong sum in lane {place} of {len(expected)}: "
                f"got {got[place] if place is not None else len(got)}, expected "
                f"{expected[place] if place is not None else len(expected)}"
            )
    sent = segments.sent()
    per_turn = None if sent is None or sent_before is None else (sent - sent_before) / (num_turns + 1)
    return {"durations_ns": durations, "cpu_ns": cpu_ns, "waits": waits, "segments": per_turn}


def joined(parts: list[dict[str, Any]], num_turns: int) -> dict[str, Any]:
    """Put the ranks' views of one block together.

    Returns:
        durations_ns: of each all-reduce the longest of any rank; cpu_ns, waits and segments: per all-reduce and rank,
        mean; segments is None if a rank does not know them.
    """
    per = len(parts) * num_turns
    sent = [part["segments"] for part in parts]
    return {
        "durations_ns": [max(each) for each in zip(*(part["durations_ns"] for part in parts), strict=True)],
        "cpu_ns": sum(part["cpu_ns"] for part in parts) / per,
        "waits": sum(part["waits"] for part in parts) / per,
        "segments": None if None in sent else sum(sent) / len(sent),
    }
