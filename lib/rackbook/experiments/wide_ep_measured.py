"""03, a run of ``vllm bench forward`` at several sizes: the time of the expert kernel and of the target's step."""

from __future__ import annotations

import polars as pl

from rackbook.importers.kernel_profiles import SUFFIX, read_kernel_profiles
from rackbook.models.kernel_components import over_ranks
from rackbook.runs import Run
from rackbook.tables import column

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
        return pl.DataFrame(schema={name: column(name).dtype for name in SIZES})
    rows = []
    for row in run.points().iter_rows(named=True):
        found, reason = _moe_ms(run, row)
        rows.append(row | {"moe_ms": found, "missing_reason": reason})
    return pl.DataFrame(
        [{name: row[name] for name in SIZES} for row in rows],
        schema={name: column(name).dtype for name in SIZES},
    ).sort("ep_size")


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
    stage, case = str(row["bench_stage"]), str(row["bench_case"]).partition("=")[0]
    if not any(file.startswith(f"{stage}.{case}.rank") and file.endswith(SUFFIX) for file in run.files):
        return None, "the run holds no kernel times of this size"
    profiles = read_kernel_profiles(
        run.path / f"{stage}.{case}", stage=None, hardware=str(row["hardware"]), model=str(row["model"]),
        nsight_forwards=1,
    )  # fmt: skip
    least = over_ranks(profiles.kernels, "min").filter(pl.col("kernel").str.contains(MEGA_MOE, literal=True))
    if least.is_empty():
        return None, f"no kernel is called {MEGA_MOE}: another expert kernel ran on this hardware"
    return least["kernel_us"].sum() / 1e3, None
