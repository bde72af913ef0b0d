"""What a burst of admissions costs the other ranks, and which cap serves a limit on the step best."""

from __future__ import annotations

import numpy as np
import polars as pl

from rackbook.errors import ParameterError
from rackbook.hostwork.admission import Arrivals, simulate
from rackbook.hostwork.cap_sweep import NO_CAP
from rackbook.replay.traces import Trace
from rackbook.tables import column


def from_trace(trace: Trace, *, num_ranks: int, window_s: float) -> Arrivals:
    """The requests of a trace in its first seconds, dealt to the ranks in turn.

    Args:
        trace: requests with arrival times and prompt lengths; a known prefix is admitted like the rest.
        num_ranks: data-parallel ranks.
        window_s: how much of the trace; a shorter trace ends the window.

    Raises:
        ParameterError: no request in the window.
    """
    used = trace.requests.filter(pl.col("arrival_s") <= window_s)
    if used.is_empty():
        raise ParameterError(f"{trace.name}: no request in its first {window_s:g} s; allowed: a longer window")
    lasts = min(window_s, trace.requests["arrival_s"][-1])
    return Arrivals(
        arrived_ms=used["arrival_s"].to_numpy() * 1e3,
        rank=np.arange(used.height, dtype=np.int64) % num_ranks,
        prompt_tokens=used["input_tokens"].to_numpy().astype(np.int64),
        num_ranks=num_ranks,
        window_ms=max(lasts, 1e-3) * 1e3,
    )


def burst_waste(
    size: int,
    *,
    prompt_tokens: int,
    num_ranks: int,
    ns_per_token: float,
    base_step_ms: float,
    caps: tuple[int | None, ...],
) -> pl.DataFrame:
    """One burst, on one rank or dealt over all: how long the ranks that admit nothing wait for those that do.

    Args:
        size: requests of the burst.
        prompt_tokens: of each.
        num_ranks: data-parallel ranks in lockstep.
        ns_per_token: CPU time of an admission per prompt token.
        base_step_ms: step without admissions.
        caps: caps per step and rank; None for none.

    Returns:
        placement_of_burst, cap, num_steps, step_max_ms, delay_max_ms, rank_wait_s: for each step the time by which
        each rank's own admissions end before the slowest rank's, summed over ranks and steps.
    """
    rows = []
    for where, ranks in (("one rank", np.zeros(size)), (f"all {num_ranks}", np.arange(size) % num_ranks)):
        burst = Arrivals(
            np.zeros(size), np.sort(ranks).astype(np.int64), np.full(size, prompt_tokens), num_ranks, window_ms=0.0
        )
        for cap in caps:
            run = simulate(burst, cap=cap, ns_per_token=ns_per_token, base_step_ms=base_step_ms)
            stalled_ms = num_ranks * float((run.step_ms - base_step_ms).sum())
            rows.append(
                {
                    "placement_of_burst": where,
                    "cap": NO_CAP if cap is None else str(cap),
                    "num_steps": run.step_ms.size,
                    "step_max_ms": float(run.step_ms.max()),
                    "delay_max_ms": float(run.delay_ms.max()),
                    "rank_wait_s": max(0.0, stalled_ms - float(run.work_ms.sum())) * 1e-3,
                }
            )
    return pl.DataFrame(rows)


def best_caps(sweep: pl.DataFrame, slo_step_ms: float) -> pl.DataFrame:
    """For every kind of arrivals and cost: the cap that admits soonest among those that keep up and keep the limit.

    A cap keeps up where the engine can admit in the window what arrives in it: its admission_load_percent is not above
    100. It keeps the limit where no step is longer.

    Args:
        sweep: arrivals, admission_cost, cap, source and the statistics of
            :func:`rackbook.hostwork.cap_sweep.compare_caps`.
        slo_step_ms: longest step that is allowed, in every repeat.

    Returns:
        arrivals, admission_cost, slo_step_ms, best_cap, and there step_max_ms, delay_p99_ms, num_waiting and
        admission_load_percent; null with a missing_reason where no cap does both; source. A cap whose delay exceeds the
        shortest by no more than that differs from repeat to repeat admits equally soon; the loosest of these is best.
    """
    rows = []
    for (arrivals, cost), group in sweep.group_by("arrivals", "admission_cost", maintain_order=True):
        head = {
            "arrivals": arrivals, "admission_cost": cost, "slo_step_ms": slo_step_ms, "source": group["source"][0],
        }  # fmt: skip
        within = group.with_row_index("place").filter(pl.col("step_max_ms") <= slo_step_ms)
        kept = within.filter(pl.col("admission_load_percent") <= 100)
        if kept.is_empty():
            rows.append(head | {"missing_reason": _why_none(group, within)})
            continue
        soonest = kept.sort("delay_p99_ms", nulls_last=True).row(0, named=True)
        if soonest["delay_p99_ms"] is not None:
            spread = soonest["delay_p99_high_ms"] - soonest["delay_p99_low_ms"]
            kept = kept.filter(pl.col("delay_p99_ms") <= soonest["delay_p99_ms"] + spread)
        best = kept.sort("place").row(-1, named=True)
        kept_columns = ("step_max_ms", "delay_p99_ms", "num_waiting", "admission_load_percent")
        rows.append(head | {"best_cap": best["cap"]} | {name: best[name] for name in kept_columns})
    names = (
        "arrivals", "admission_cost", "slo_step_ms", "best_cap", "step_max_ms", "delay_p99_ms", "num_waiting",
        "admission_load_percent", "missing_reason", "source",
    )  # fmt: skip
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in names})


def _why_none(group: pl.DataFrame, within: pl.DataFrame) -> str:
    if within.is_empty():
        return f"no cap keeps the limit, the shortest longest step is {group['step_max_ms'].min():.1f} ms"
    least = within["admission_load_percent"].min()
    return f"no cap within the limit keeps up: to admit all takes {least:.0f} % of the time in which they arrive"
