"""03, a run of ``vllm bench forward`` at several sizes: the time of the expert kernel and of the target's step."""

from __future__ import annotations

import polars as pl

from rackbook.experiments import forward_runs, vocabulary
from rackbook.models.kernel_components import over_ranks
from rackbook.runs import Run

MEGA_MOE = "mega_moe_impl"
"""In the name of the kernel that holds routed experts and their communication."""

_SETTING = ("hardware", "model", "ep_size", "requests_per_rank", "context_tokens", "draft_tokens", "timing_scope")
SIZES = (
    *_SETTING, "moe_ms", "forward_ms", "sample_spread_percent", "graph_vs_eager_rms", "graph_deterministic", "finite",
    "stable", "doubt", "missing_reason", "origin", "source",
)  # fmt: skip


def sizes(run: Run | None) -> pl.DataFrame:
    """One row per size of a run; empty without one.

    Returns:
        Columns :data:`SIZES`. ``moe_ms`` is the least over the ranks, as a kernel that waits for other ranks lasts
        longer than its own work; it is null where no kernel has the name, with the reason.

    Raises:
        DataError: the kernel times are not what they should be.
    """
    if run is None:
        return vocabulary.frame(SIZES)
    rows = []
    for row in run.points().iter_rows(named=True):
        found, reason = _moe_ms(run, row)
        rows.append(row | {"moe_ms": found, "missing_reason": reason})
    return vocabulary.frame(SIZES, rows).sort("ep_size")


def points(measured: pl.DataFrame) -> pl.DataFrame:
    """The measured expert kernel as points of the step chart: ep_size, component, step_ms, origin, source."""
    return measured.drop_nulls("moe_ms").select(
        "ep_size",
        pl.lit("target MoE").alias("component"),
        pl.col("moe_ms").alias("step_ms"),
        "origin",
        "source",
    )


def _moe_ms(run: Run, row: dict[str, object]) -> tuple[float | None, str | None]:
    profiles = forward_runs.kernel_times(run, row)
    if profiles is None:
        return None, "the run holds no kernel times of this size"
    least = over_ranks(profiles.kernels, "min").filter(pl.col("kernel").str.contains(MEGA_MOE, literal=True))
    if least.is_empty():
        return None, f"no kernel is called {MEGA_MOE}: another expert kernel ran on this hardware"
    return least["kernel_us"].sum() / 1e3, None
