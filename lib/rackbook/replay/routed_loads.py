"""One stream of requests, routed to ranks by several policies at several loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import ParameterError
from rackbook.replay.lockstep import POLICIES, StepCost, route
from rackbook.replay.queues import Queue, queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rackbook.replay.traces import Trace


def policies(
    drawn: Sequence[Trace], loads_percent: Sequence[float], num_ranks: int, cost: StepCost, cap: int
) -> pl.DataFrame:
    """Time to the end of the prefill when a router deals one stream of requests to the ranks.

    Every policy sees the same requests; :func:`at_load` sets the load. A prefix is not computed, whichever rank the
    request goes to, if all traces know their prefixes.

    Args:
        drawn: a trace per repeat.
        loads_percent: offered loads.
        num_ranks: behind the router.
        cost: of a rank's step.
        cap: tokens per step and rank, at most.

    Returns:
        policy, load_percent, num_ranks, num_requests (of a repeat), prefix_caching, ttft_p50_s and ttft_p99_s over all
        repeats, the P99 of the best and the worst repeat, wait_percent, origin "simulated".
    """
    caching = all(trace.requests["cached_tokens"].null_count() == 0 for trace in drawn)
    rows = []
    for load in loads_percent:
        streams = [at_load(trace, load / 100, num_ranks, cost, cap, prefix_caching=caching) for trace in drawn]
        for policy in POLICIES:
            runs = [route(stream, num_ranks, policy, cost, cap)[0] for stream in streams]
            waits = [np.concatenate([run.wait_for_prompt_ns(rank) for rank in range(num_ranks)]) * 1e-9 for run in runs]
            tails = [float(np.percentile(wait, 99)) for wait in waits]
            own_ns = sum(float(run.own_ns.sum()) for run in runs) / num_ranks
            step_ns = sum(float(run.step_ns.sum()) for run in runs)
            rows.append(
                {
                    "policy": policy,
                    "load_percent": load,
                    "num_ranks": num_ranks,
                    "num_requests": len(streams[0]),
                    "prefix_caching": caching,
                    "ttft_p50_s": float(np.percentile(np.concatenate(waits), 50)),
                    "ttft_p99_s": float(np.percentile(np.concatenate(waits), 99)),
                    "ttft_p99_low_s": min(tails),
                    "ttft_p99_high_s": max(tails),
                    "wait_percent": 100 * (1 - own_ns / step_ns),
                    "origin": "simulated",
                }
            )
    return pl.DataFrame(rows)


def at_load(trace: Trace, load: float, num_ranks: int, cost: StepCost, cap: int, *, prefix_caching: bool) -> Queue:
    """The requests of a trace, their arrivals compressed so that they offer a load.

    Args:
        trace: the requests.
        load: time that the ranks would need in full steps, each alone, over the time in which the requests arrive.
        num_ranks: ranks that share the work.
        cost: of a rank's step.
        cap: tokens per step and rank, at most.
        prefix_caching: whether known prefixes are left out.

    Raises:
        ParameterError: all requests arrive at once.
    """
    lasts_s = trace.requests["arrival_s"][-1]
    if not lasts_s > 0:
        raise ParameterError(f"{trace.name}: all requests arrive at once, so no load can be set")
    work_s = cost.alone_s(queue(trace, prefix_caching=prefix_caching), cap)
    return queue(trace.scaled(rate=load * num_ranks * lasts_s / work_s), prefix_caching=prefix_caching)
