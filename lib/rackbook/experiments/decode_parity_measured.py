"""10, a run of ``vllm bench forward``: vLLM's half of the curve, step by batch size."""

from __future__ import annotations

import polars as pl

from rackbook.experiments import vocabulary
from rackbook.runs import Run

STEPS = (
    "hardware", "model", "num_ranks", "batch_size", "context_tokens", "draft_tokens", "timing_scope", "step_ms",
    "least_output_tok_per_s_per_gpu", "most_output_tok_per_s_per_gpu", "sample_spread_percent", "graph_vs_eager_rms",
    "graph_deterministic", "finite", "drafts_agree", "stable", "doubt", "origin", "source",
)  # fmt: skip


def steps(run: Run | None) -> pl.DataFrame:
    """One row per batch size of a run; empty without one.

    A step yields at least one token per request, and at most one and all drafts: what is accepted it does not tell.

    Returns:
        Columns :data:`STEPS`.
    """
    if run is None:
        return vocabulary.frame(STEPS)
    per_s = 1e3 * pl.col("requests_per_rank") / pl.col("forward_ms")
    return (
        run.points()
        .with_columns(
            pl.col("requests_per_rank").alias("batch_size"),
            pl.col("forward_ms").alias("step_ms"),
            per_s.alias("least_output_tok_per_s_per_gpu"),
            (per_s * (1 + pl.col("draft_tokens"))).alias("most_output_tok_per_s_per_gpu"),
        )
        .select(STEPS)
        .sort("batch_size")
    )
