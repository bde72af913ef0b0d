"""02, a run of ``vllm bench forward`` with kernel times: its profiles, its shares, and its steps."""

from __future__ import annotations

import polars as pl

from rackbook.errors import DataError
from rackbook.experiments import forward_runs, vocabulary
from rackbook.importers.kernel_profiles import KernelProfiles
from rackbook.models.kernel_components import by_component, over_ranks, read_patterns
from rackbook.runs import Run
from rackbook.tables import column

TARGET_ONLY, WITH_DRAFTER = "measured, target alone", "measured, with the drafter"
"""Names of the two parts of a run, by the stage of its plan."""

_STAGES = {"target_only": TARGET_ONLY, "with_drafter": WITH_DRAFTER}
_SETTING = ("hardware", "model", "ep_size", "requests_per_rank", "context_tokens", "draft_tokens", "timing_scope")
STEPS = (
    "run", *_SETTING, "forward_ms", "sample_spread_percent", "graph_vs_eager_rms", "graph_deterministic", "finite",
    "stable", "doubt", "origin", "source",
)  # fmt: skip
SHARES = ("component", "step_share_percent", *_SETTING, "origin", "source")


def steps(run: Run | None) -> pl.DataFrame:
    """The timed steps of a run with their quality; empty without one.

    Returns:
        Columns :data:`STEPS`.
    """
    if run is None:
        return vocabulary.frame(STEPS)
    names = pl.col("bench_stage").replace_strict(_STAGES, default=pl.col("bench_stage"))
    return run.points().with_columns(names.alias("run")).select(STEPS)


def profiles(run: Run | None) -> dict[str, KernelProfiles]:
    """The kernel times of a run by its parts, the target alone first; empty without one.

    Raises:
        DataError: the run holds no kernel times, or they are not what they should be.
    """
    if run is None:
        return {}
    found = {}
    rows = run.points()
    for stage, name in _STAGES.items():
        of_stage = rows.filter(pl.col("bench_stage") == stage)
        if of_stage.is_empty():
            continue
        times = forward_runs.kernel_times(run, of_stage.row(0, named=True))
        if times is None:
            raise DataError(f"run {run.id}: no kernel times of {stage}; measure with a plan that profiles")
        found[name] = times
    return found


def shares(run: Run | None, found: dict[str, KernelProfiles]) -> pl.DataFrame:
    """The parts of the target's step in a run, by the median over the ranks, whatever the notebook shows.

    Returns:
        Columns :data:`SHARES`: one row per published part.
    """
    if run is None or TARGET_ONLY not in found:
        return vocabulary.frame(SHARES)
    row = steps(run).filter(pl.col("run") == TARGET_ONLY).row(0, named=True)
    components = by_component(over_ranks(found[TARGET_ONLY].kernels, "median"), read_patterns())
    parts = components.group_by("part_of_step", maintain_order=True).agg(pl.col("step_share_percent").sum())
    return parts.rename({"part_of_step": "component"}).select(
        "component",
        "step_share_percent",
        *(pl.lit(row[name], column(name).dtype).alias(name) for name in _SETTING),
        pl.lit("measured").alias("origin"),
        pl.lit(run.id).alias("source"),
    )
