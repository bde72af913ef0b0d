"""The simulated load of admissions of notebook 07: one burst, arrivals drawn or recorded, each under several caps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import DataError, ParameterError
from rackbook.hostwork import burst_costs, measured
from rackbook.hostwork.admission import Arrivals, draw_arrivals, one_burst
from rackbook.hostwork.cap_sweep import NO_CAP, compare_caps
from rackbook.models.host_accounts import admission_costs, published_cap
from rackbook.models.host_steps import ADMISSION, BURSTS, before_and_after

if TYPE_CHECKING:
    from rackbook.experiments.cpu_overhead import Evidence, Params

WINDOW_S, REPEATS = 30.0, 5
"""Simulated time of one repeat, and independent repeats."""


def burst_trade(points: pl.DataFrame, params: Params) -> pl.DataFrame:
    """One burst of the published size and the published prompt length on one rank, admitted under each cap.

    Returns:
        admission_cost, ns_per_token, cap, num_steps, step_max_ms, delay_p50_ms, delay_max_ms, origin "simulated",
        source. Nothing is random here.
    """
    size, _ = before_and_after(points, BURSTS, "admissions_per_step")
    prompt = points.filter(pl.col("pr") == ADMISSION)["prompt_tokens"][0]
    burst = one_burst(size, num_ranks=params.num_ranks, prompt_tokens=prompt)
    return (
        _compare_caps([burst], points, params, whole_run=True)
        .select("admission_cost", "ns_per_token", "cap", "num_steps", "step_max_ms", "delay_p50_ms", "delay_max_ms")
        .with_columns(
            pl.lit("simulated").alias("origin"),
            pl.lit(f"one burst of {size} × {prompt:,} tokens, nothing random").alias("source"),
        )
    )


def burst_waste(points: pl.DataFrame, params: Params) -> pl.DataFrame:
    """The published burst on one rank and dealt over all, with the published cap and without: who waits, and how long.

    Returns:
        admission_cost, the columns of :func:`rackbook.hostwork.burst_costs.burst_waste`, origin "simulated", source.
    """
    size, cap = before_and_after(points, BURSTS, "admissions_per_step")
    prompt = points.filter(pl.col("pr") == ADMISSION)["prompt_tokens"][0]
    cases = [
        burst_costs.burst_waste(
            size,
            prompt_tokens=prompt,
            num_ranks=params.num_ranks,
            ns_per_token=cost,
            base_step_ms=params.base_step_ms,
            caps=(None, cap),
        ).select(pl.lit(name).alias("admission_cost"), pl.all())
        for name, cost in simulated_costs(points, params).items()
    ]
    return pl.concat(cases).with_columns(
        pl.lit("simulated").alias("origin"),
        pl.lit(f"one burst of {size} × {prompt:,} tokens, nothing random").alias("source"),
    )


def sweep(points: pl.DataFrame, params: Params, costs: dict[str, float] | None = None) -> pl.DataFrame:
    """Step and admission delay under load, for each kind of arrivals, admission cost and cap.

    Args:
        points: table ``cpu_overhead``.
        params: the load.
        costs: ns per token by name; :func:`simulated_costs` if None.

    Returns:
        arrivals, the columns of :func:`rackbook.hostwork.cap_sweep.compare_caps`, origin "simulated", source (the
        seed). Without bursts there is no such kind of arrivals; with a trace there is one more.
    """
    burst_share, burst_size, ranks_per_burst = params.bursts
    kinds = {"one by one": 0.0} | ({"partly in bursts": burst_share} if burst_share else {})
    cases = []
    for number, (kind, share) in enumerate(kinds.items()):
        streams = [
            draw_arrivals(
                np.random.default_rng([params.seed, number, repeat]),
                num_ranks=params.num_ranks,
                requests_per_s=params.requests_per_s,
                window_s=WINDOW_S,
                prompt_tokens=params.prompt_tokens,
                burst_share=share,
                burst_size=int(burst_size),
                ranks_per_burst=int(ranks_per_burst),
            )
            for repeat in range(REPEATS)
        ]
        case = _compare_caps(streams, points, params, costs=costs)
        cases.append(case.select(pl.lit(kind).alias("arrivals"), pl.all(), pl.lit(sample(params)).alias("source")))
    if params.trace_path is not None:
        trace = _trace(params)
        case = _compare_caps([trace[0]], points, params, costs=costs)
        cases.append(
            case.select(pl.lit("as in the trace").alias("arrivals"), pl.all(), pl.lit(trace[1]).alias("source"))
        )
    found = pl.concat(cases).with_columns(pl.lit("simulated").alias("origin"))
    return found.select(pl.exclude("source"), "source")


def _trace(params: Params) -> tuple[Arrivals, str]:
    from rackbook.replay import trace_files

    try:
        trace = trace_files.read(params.trace_path)
    except DataError as problem:
        raise ParameterError(f"trace_path: {problem}") from None
    lasted_s = trace.requests["arrival_s"][-1]
    rate = params.requests_per_s * lasted_s / trace.requests.height if lasted_s else 1.0
    found = burst_costs.from_trace(trace.scaled(rate=rate), num_ranks=params.num_ranks, window_s=WINDOW_S)
    return found, f"{trace.name} at {params.requests_per_s:g} requests/s, the first {len(found)} dealt in turn"


def best_caps(swept: pl.DataFrame, params: Params) -> pl.DataFrame:
    """The best cap under the limit on the step, see :func:`rackbook.hostwork.burst_costs.best_caps`, "simulated"."""
    chosen = burst_costs.best_caps(swept, params.slo_step_ms)
    return chosen.select(pl.exclude("source"), pl.lit("simulated").alias("origin"), "source")


def simulated_caps(points: pl.DataFrame, params: Params) -> list[int | None]:
    """The caps that are simulated: the parameter's, the published one, and none."""
    return [*sorted({*params.caps, published_cap(points)}), None]


def simulated_costs(points: pl.DataFrame, params: Params) -> dict[str, float]:
    """Admission cost in ns per prompt token: the two published ones (855K = 855 · 1,024), and the parameter's."""
    first = admission_costs(points).group_by("stage", maintain_order=True).first()
    costs = dict(first.select("stage", "ns_per_token").iter_rows())
    return costs if params.ns_per_token is None else costs | {"given": params.ns_per_token}


def measured_costs(costs: pl.DataFrame) -> dict[str, float]:
    """Admission cost in ns per prompt token by the copies that were measured: a list converted, a buffer reused."""
    return {name: measured.cost_of(costs, copy) for name, copy in measured.COSTS_OF_COPIES.items()}


def sample(params: Params) -> str:
    """What the drawn arrivals are a sample of, for a source: seed, repeats and their length."""
    return f"seed {params.seed}, {REPEATS} × {WINDOW_S:g} s"


def label(params: Params) -> str:
    """The simulated engine and load in a line, for a chart's subtitle."""
    share, size, ranks = params.bursts
    bursts = f"{share:.0%} in bursts of {size:g} on {'one rank' if ranks == 1 else f'{ranks:g} ranks'}"
    engine = f"{'one rank' if params.num_ranks == 1 else f'{params.num_ranks} ranks in lockstep'}, base step "
    engine += f"{params.base_step_ms:g} ms; {params.requests_per_s:g} requests/s"
    drawn = f"{params.prompt_tokens:,} tokens, {bursts if share else 'none in bursts'}; {sample(params)}"
    if params.trace_path is None:
        return f"{engine} of {drawn}"
    return f"{engine}; drawn: {drawn}; trace: arrivals and prompts of {Path(params.trace_path).name}"


def published_cap_against_none(evidence: Evidence) -> pl.DataFrame:
    """Under load, the published cap beside no cap.

    Returns:
        arrivals, admission_cost, cap, step_mean_ms, step_p50_ms, step_p99_ms, step_max_ms, delay_p50_ms, delay_p99_ms,
        delay_max_ms, num_waiting, admission_load_percent, origin, source: rows of ``sweep``, rounded to 0.1.
    """
    statistics = (
        "step_mean_ms",
        "step_p50_ms",
        "step_p99_ms",
        "step_max_ms",
        "delay_p50_ms",
        "delay_p99_ms",
        "delay_max_ms",
    )
    caps = [str(published_cap(evidence.points)), NO_CAP]
    return evidence.sweep.filter(pl.col("cap").is_in(caps)).select(
        "arrivals", "admission_cost", "cap", pl.col(statistics).round(1), "num_waiting",
        pl.col("admission_load_percent").round(1), "origin", "source",
    )  # fmt: skip


def _compare_caps(
    streams: list[Arrivals],
    points: pl.DataFrame,
    params: Params,
    *,
    costs: dict[str, float] | None = None,
    whole_run: bool = False,
) -> pl.DataFrame:
    return compare_caps(
        streams,
        caps=simulated_caps(points, params),
        ns_per_token=simulated_costs(points, params) if costs is None else costs,
        base_step_ms=params.base_step_ms,
        whole_run=whole_run,
    )
