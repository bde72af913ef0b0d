"""Caps on admissions compared: each cap and each cost of an admission on the same arrivals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import ParameterError
from rackbook.hostwork.admission import Arrivals, Run, simulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_CAP = "none"
"""How a frame names the absence of a cap."""


def compare_caps(
    repeats: Sequence[Arrivals],
    *,
    caps: Sequence[int | None],
    ns_per_token: Mapping[str, float],
    base_step_ms: float,
    hidden_ms: float = 0.0,
    whole_run: bool = False,
) -> pl.DataFrame:
    """Simulate every cap with every cost and take statistics over the pooled repeats.

    Args:
        repeats: independent streams of arrivals; every cap and every cost sees the same ones.
        caps: caps per step and rank; None for no cap.
        ns_per_token: CPU time of an admission per prompt token, by name.
        base_step_ms: duration of a step without admissions.
        hidden_ms: admission work per step that hides behind the GPU.
        whole_run: take the step's statistics over all steps, not only over those that start in the window.

    Returns:
        One row per cost and cap: admission_cost, ns_per_token, cap, num_steps, step_mean_ms, step_p50_ms, step_p99_ms
        with the lowest and the highest repeat, step_max_ms, the same of the delay (from arrival to the end of the
        admitting step, over all requests) but for the mean, num_waiting, admission_load_percent. The delay is null
        where nobody arrived; the load is null in a window of no length, and above 100 the queues grow over the window.

    Raises:
        ParameterError: no repeat, or a cap, a cost or a time that is out of range.
    """
    if not repeats:
        raise ParameterError("repeats: got none, allowed: at least one stream of arrivals")
    rows = []
    for name, cost in ns_per_token.items():
        for cap in caps:
            runs = [
                simulate(stream, cap=cap, ns_per_token=cost, base_step_ms=base_step_ms, hidden_ms=hidden_ms)
                for stream in repeats
            ]
            case = {"admission_cost": name, "ns_per_token": cost, "cap": NO_CAP if cap is None else str(cap)}
            load = _load_percent(repeats, cap=cap, ns_per_token=cost, base_step_ms=base_step_ms, hidden_ms=hidden_ms)
            rows.append(case | _statistics(runs, whole_run=whole_run) | {"admission_load_percent": load})
    return pl.DataFrame(rows)


def _statistics(runs: list[Run], *, whole_run: bool) -> dict[str, float | int | None]:
    steps = [run.step_ms if whole_run else run.step_ms[run.in_window] for run in runs]
    delays = [run.delay_ms for run in runs if run.delay_ms.size]
    return {
        "num_steps": sum(step.size for step in steps),
        "step_mean_ms": float(np.concatenate(steps).mean()),
        **_percentiles("step", steps),
        **_percentiles("delay", delays),
        "num_waiting": sum(run.num_waiting for run in runs),
    }


def _load_percent(repeats: Sequence[Arrivals], **engine: float | None) -> float | None:
    """The time that it takes to admit all requests if they are there from the start, over that in which they arrive.

    No step then waits for an arrival: each admits what the cap and the queues allow, and the engine can do no more.
    """
    if not (window_ms := sum(stream.window_ms for stream in repeats)):
        return None
    at_once = [
        Arrivals(np.zeros(len(stream)), stream.rank, stream.prompt_tokens, stream.num_ranks, window_ms=0.0)
        for stream in repeats
    ]
    return 100 * sum(float(simulate(stream, **engine).step_ms.sum()) for stream in at_once) / window_ms


def _percentiles(name: str, repeats: list[np.ndarray]) -> dict[str, float | None]:
    names = [f"{name}_{statistic}_ms" for statistic in ("p50", "p99", "p99_low", "p99_high", "max")]
    if not repeats:
        return dict.fromkeys(names)
    pooled = np.concatenate(repeats)
    each = [float(np.percentile(repeat, 99)) for repeat in repeats]
    values = (*np.percentile(pooled, [50, 99]).tolist(), min(each), max(each), float(pooled.max()))
    return dict(zip(names, values, strict=True))
