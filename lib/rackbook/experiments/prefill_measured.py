"""04, a run of ``vllm bench forward``: prefills with a switch on and off, and what that gains."""

from __future__ import annotations

import polars as pl

from rackbook import prefill_switches
from rackbook.engine.cases import Case
from rackbook.experiments import vocabulary
from rackbook.runs import Run

BASELINE = "baseline"
PREFILLS = (
    "hardware", "model", "num_ranks", "bench_stage", "new_tokens", "cached_tokens", "forward_ms",
    "prefill_tok_per_s_per_gpu", "sample_spread_percent", "graph_vs_eager_rms", "graph_deterministic", "finite",
    "stable", "doubt", "origin", "source",
)  # fmt: skip
GAINS = (
    "hardware", "fix", "new_tokens", "cached_tokens", "switched_on_ms", "switched_off_ms", "gain_percent", "alone",
    "stable", "against_fix", "origin", "source", "formula",
)  # fmt: skip


def prefills(run: Run | None) -> pl.DataFrame:
    """Every prefill of a run with its quality; empty without one.

    Returns:
        Columns :data:`PREFILLS`; the throughput counts the new tokens of the one request on each rank.
    """
    if run is None:
        return vocabulary.frame(PREFILLS)
    rows = []
    for row in run.points().iter_rows(named=True):
        (request,) = Case.parse(row["bench_case"]).requests
        rate = 1e3 * request.query_tokens / row["forward_ms"]
        sizes = {"new_tokens": request.query_tokens, "cached_tokens": request.prefix_tokens}
        rows.append(row | sizes | {"prefill_tok_per_s_per_gpu": rate})
    return vocabulary.frame(PREFILLS, rows)


def gains(measured: pl.DataFrame) -> pl.DataFrame:
    """What each switch gains in throughput, at each number of new tokens at which both states were measured.

    Args:
        measured: of :func:`prefills`.

    Returns:
        Columns :data:`GAINS`, in the order of the fixes.
    """
    times = {
        (stage, size): (time, stable)
        for stage, size, time, stable in measured.select(
            "bench_stage", "new_tokens", "forward_ms", "stable"
        ).iter_rows()
    }
    rows = []
    for switch in prefill_switches.read().switch:
        stages = {state: BASELINE if switch.default == state else f"{switch.name}_{state}" for state in ("on", "off")}
        for size in measured["new_tokens"].unique().sort():
            on, off = times.get((stages["on"], size)), times.get((stages["off"], size))
            if on is None or off is None:
                continue
            first = measured.row(0, named=True)
            rows.append(
                {
                    "hardware": first["hardware"],
                    "fix": switch.fix,
                    "new_tokens": size,
                    "cached_tokens": first["cached_tokens"],
                    "switched_on_ms": on[0],
                    "switched_off_ms": off[0],
                    "gain_percent": 100 * (off[0] / on[0] - 1),
                    "alone": switch.alone,
                    "stable": on[1] and off[1],
                    "against_fix": switch.against_fix,
                    "origin": "measured",
                    "source": first["source"],
                    "formula": f"{off[0]:.4g} ms ÷ {on[0]:.4g} ms − 1",
                }
            )
    return vocabulary.frame(GAINS, rows)
