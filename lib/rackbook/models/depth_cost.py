"""What a token pays for each token of context that it attends to, from published decode and prefill throughputs."""

from __future__ import annotations

import polars as pl

from rackbook import catalog
from rackbook.models.line import fit_line


def derived_depth_cost_ps(points: pl.DataFrame) -> tuple[float, str]:
    """Cost of one token attending to one more token of context, in ps, from the published decode sweep.

    The slope of the step over context, divided by the tokens that the step computes on a rank. That decode and prefill
    pay the same per pair is an assumption.

    Args:
        points: table ``context_sweep``.

    Returns:
        The cost and its formula.
    """
    line = fit_line(points["context_tokens"], points["step_ms"])
    requests = points["requests_per_rank"][0]
    tokens = 1 + catalog.model("deepseek-v4.1-flash").draft.block_tokens.known
    slope = f"{line.slope * 1e6:.3g} ns per context token"
    formula = f"derived from the decode sweep: {slope} ÷ ({requests} · {tokens} tokens)"
    return line.slope * 1e9 / (requests * tokens), formula


def depth_cost_bound_ps(prefill: pl.DataFrame) -> tuple[float, str]:
    """Largest cost of depth that the published prefill throughput on a cached prefix allows, in ps.

    Args:
        prefill: table ``prefill_ablation_throughput``.

    Returns:
        The bound, if depth were all that prefill costs, and its formula.
    """
    row = prefill.filter(pl.col("stage") == "after").row(0, named=True)
    depth = row["cached_tokens"] + row["new_tokens"] / 2
    rate = row["prefill_tok_per_s_per_gpu"]
    formula = f"derived: 1 ÷ {rate / 1e3:g}K tokens/s ÷ {depth:,.0f} tokens of context, if depth were all that it costs"
    return 1e12 / rate / depth, formula
