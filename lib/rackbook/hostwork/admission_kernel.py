"""The step loop of :mod:`rackbook.hostwork.admission`, compiled.

A step depends on the one before it, so the loop cannot become arithmetic on arrays. The compiled code is kept beside
this file, or in the user's cache folder where that cannot be written to.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def steps(
    arrived_ms, rank_of, paid_ms, first_of_rank, window_ms, limit, base_step_ms, hidden_ms
):  # pragma: no cover - compiled
    """Step through the window and on until every request is admitted.

    The queues of all ranks lie one after the other in one array of places; head and tail are places in it.

    Args:
        arrived_ms: in order of arrival; shape [requests].
        rank_of: the rank of each, in order of arrival; shape [requests].
        paid_ms: work of all places before each, shape [requests + 1].
        first_of_rank: first place of each rank's queue; shape [ranks].
        window_ms: length of the window.
        limit: admissions per step and rank, at most.
        base_step_ms: step without admissions.
        hidden_ms: work per step that costs the step nothing.

    Returns:
        Start, duration and summed work in ms, shape [steps]; the step that admits each place, shape [requests].
    """
    num_requests, num_ranks = arrived_ms.size, first_of_rank.size
    head, tail = first_of_rank.copy(), first_of_rank.copy()
    step_of_place = np.empty(num_requests, np.int64)
    room = 1024
    starts, durations, works = np.empty(room), np.empty(room), np.empty(room)
    now, seen, num_waiting, step = 0.0, 0, 0, 0
    while now < window_ms or seen < num_requests or num_waiting > 0:
        while seen < num_requests and arrived_ms[seen] <= now:
            tail[rank_of[seen]] += 1
            num_waiting += 1
            seen += 1
        most, total = 0.0, 0.0
        if num_waiting > 0:
            for rank in range(num_ranks):
                first = head[rank]
                taken = min(tail[rank] - first, limit)
                if taken > 0:
                    head[rank] = first + taken
                    num_waiting -= taken
                    step_of_place[first : first + taken] = step
                    work = paid_ms[first + taken] - paid_ms[first]
                    most, total = max(most, work), total + work
        if step == room:
            room *= 2
            starts, durations, works = _grown(starts, room), _grown(durations, room), _grown(works, room)
        starts[step] = now
        durations[step] = base_step_ms + max(0.0, most - hidden_ms)
        works[step] = total
        now += durations[step]
        step += 1
    return starts[:step].copy(), durations[:step].copy(), works[:step].copy(), step_of_place


@njit(cache=True)
def _grown(values, room):  # pragma: no cover - compiled
    larger = np.empty(room)
    larger[: values.size] = values
    return larger
