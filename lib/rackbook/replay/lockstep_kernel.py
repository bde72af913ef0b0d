"""The step loop of :mod:`rackbook.replay.lockstep`, compiled.

A step depends on the one before it, and an arrival may change each of them, so the loop cannot become arithmetic on
arrays. The compiled code is kept beside this file, or in the user's cache folder where that cannot be written to.
"""

from __future__ import annotations

import numpy as np
from numba import njit

GIVEN, LEAST_REQUESTS, LEAST_TOKENS = 0, 1, 2
ROUTERS = {"round-robin": GIVEN, "least-requests": LEAST_REQUESTS, "least-tokens": LEAST_TOKENS}

_NONE = -1


@njit(cache=True)
def steps(
    arrival, cached, new, rank_of, num_ranks, router, fixed_ns, token_ns, attended_ns, shared_ns, budget
):  # pragma: no cover - compiled
    """Run one stream of requests until all are computed.

    Args:
        arrival: in ns, ascending; shape [requests].
        cached: prefix that is not computed; shape [requests].
        new: tokens to compute; shape [requests].
        rank_of: rank of each request; a router other than GIVEN writes its choice here; shape [requests].
        num_ranks: data-parallel ranks.
        router: GIVEN, LEAST_REQUESTS or LEAST_TOKENS.
        fixed_ns: of every step.
        token_ns: per computed token.
        attended_ns: per attended token.
        shared_ns: per token of the mean over the ranks.
        budget: most tokens that a rank computes in a step.

    Returns:
        Start and duration in ns, shape [steps]; tokens and attended tokens, shape [steps, ranks].
    """
    num_requests = arrival.size
    following = np.full(num_requests, _NONE)  # the next request in the same rank's queue
    head, tail = np.full(num_ranks, _NONE), np.full(num_ranks, _NONE)
    done = np.zeros(num_ranks, np.int64)  # computed tokens of the head
    load, known = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    room = 256
    start, duration = np.empty(room, np.int64), np.empty(room, np.int64)
    tokens, attended = np.empty((room, num_ranks), np.int64), np.empty((room, num_ranks), np.int64)
    now, sent, step = 0, 0, 0
    while True:
        while sent < num_requests and arrival[sent] <= now:
            weight = new[sent] if router == LEAST_TOKENS else 1
            if router != GIVEN:
                rank_of[sent] = np.argmin(known)
            rank = rank_of[sent]
            known[rank] += weight
            load[rank] += weight
            if head[rank] == _NONE:
                head[rank] = sent
            else:
                following[tail[rank]] = sent
            tail[rank] = sent
            sent += 1
        known[:] = load
        if step == room:
            room *= 2
            start, duration = _grown(start, room), _grown(duration, room)
            tokens, attended = _grown_rows(tokens, room), _grown_rows(attended, room)
        longest, total = 0.0, 0
        for rank in range(num_ranks):
            left, pairs, request = budget, 0, head[rank]
            while request != _NONE and left > 0:
                chunk = min(new[request] - done[rank], left)
                depth = cached[request] + done[rank]
                pairs += chunk * depth + chunk * (chunk + 1) // 2
                left -= chunk
                done[rank] += chunk
                if router == LEAST_TOKENS:
                    load[rank] -= chunk
                if done[rank] == new[request]:
                    request, done[rank] = following[request], 0
                    if router != LEAST_TOKENS:
                        load[rank] -= 1
            head[rank] = request
            computed = budget - left
            total += computed
            tokens[step, rank], attended[step, rank] = computed, pairs
            longest = max(longest, fixed_ns + computed * token_ns + pairs * attended_ns)
        if total:
            start[step], duration[step] = now, np.int64(np.rint(longest + total / num_ranks * shared_ns))
            now += duration[step]
            step += 1
        elif sent < num_requests:
            now = arrival[sent]
        else:
            return start[:step].copy(), duration[:step].copy(), tokens[:step].copy(), attended[:step].copy()


@njit(cache=True)
def _grown(values, room):  # pragma: no cover - compiled
    larger = np.empty(room, np.int64)
    larger[: values.size] = values
    return larger


@njit(cache=True)
def _grown_rows(values, room):  # pragma: no cover - compiled
    larger = np.empty((room, values.shape[1]), np.int64)
    larger[: values.shape[0]] = values
    return larger
