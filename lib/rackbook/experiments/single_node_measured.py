"""12, a run on the source's node: which claims it settles, and what it says about them."""

from __future__ import annotations

import polars as pl

from rackbook.claims import Finding
from rackbook.experiments import live
from rackbook.models.node_throughput import K
from rackbook.runs import Run


def _at(input_tokens: int, output_tokens: int, capture_tokens: int = 8192) -> dict[str, object]:
    return {
        "hardware": "B300", "num_gpus": 8, "model": "deepseek-v4.1-flash", "concurrency": 2048,
        "max_capture_tokens": capture_tokens, "input_tokens": input_tokens, "output_tokens": output_tokens,
    }  # fmt: skip


SETTLED: dict[str, tuple[str, dict[str, object]]] = {
    "output_128_1k": ("output_tok_per_s", _at(128, K)),
    "output_128_1k_rounded": ("output_tok_per_s", _at(128, K)),
    "total_128_1k": ("total_tok_per_s", _at(128, K)),
    "tpot_128_1k_ms": ("tpot_ms", _at(128, K)),
    "output_1k_1k": ("output_tok_per_s", _at(K, K)),
    "tpot_1k_1k_ms": ("tpot_ms", _at(K, K)),
    "graphs_1536": ("output_tok_per_s", _at(K, K, 1536)),
    "graphs_8192": ("output_tok_per_s", _at(K, K)),
    "prefill_tok_per_s": ("prefill_tok_per_s", _at(8 * K, 1)),
    "acceptance_1k_percent": ("acceptance_percent", _at(K, K)),
    "acceptance_8k_percent": ("acceptance_percent", _at(8 * K, K)),
}
"""Claims that a run on the source's node settles: the column and the claim's conditions."""


def finding(name: str, run: Run | None, measured: pl.DataFrame) -> Finding | None:
    """What a run says about a claim; None if there is none, or if it does not bear on the claim.

    Args:
        name: one of :data:`SETTLED`.
        run: the run; None if there is none.
        measured: table ``serving_measured``: its points.
    """
    if run is None:
        return None
    value, conditions = SETTLED[name]
    drafts = run.params.get("draft_tokens")
    accepted = 100 * (pl.col("acceptance_length") - 1) / drafts if drafts else pl.lit(None, pl.Float64)
    points = measured.with_columns(
        (pl.col("total_tok_per_s") - pl.col("output_tok_per_s")).alias("prefill_tok_per_s"),
        accepted.alias("acceptance_percent"),
    )
    return live.finding(run, points, value, conditions)
