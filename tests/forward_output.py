"""Result files of ``vllm bench forward`` in the form of 0.33.0, made by hand: no GPU wrote a number in them."""

import statistics
from typing import Any

from rackbook.engine.cases import Case

SAMPLES_US = [9000.0, 9010.0, 8990.0, 9020.0]
"""One rank's replays; their median is 9005 µs."""


def latency(samples: list[float] = SAMPLES_US, *, spread: float = 0.1, timer: str = "graph_events_rank_max") -> dict:
    return {
        "timer": timer,
        "median": statistics.median(samples),
        "sample_spread_pct": spread,
        "mean": statistics.fmean(samples),
        "std": statistics.pstdev(samples),
        "min": min(samples),
        "p90": max(samples),
        "count": len(samples),
        "samples_us": samples,
    }


def rank(case: Case, **changes: Any) -> dict:
    drafts = case.requests[0].draft_tokens
    entry = {
        "num_tokens": case.num_tokens,
        "kv_blocks": 100,
        "routing": "balanced",
        "num_local_tokens": case.num_tokens,
        "num_tokens_after_padding": case.num_tokens,
        "batch_order": ["bench-0"],
        "timing_scope": "target_and_drafter" if drafts else "target_only",
        "eager_repeat": {"max_abs": 0.0, "relative_rms": 0.0},
        "graph_vs_eager": {"max_abs": 0.01, "relative_rms": 0.001},
        "graph_deterministic": True,
        "finite": True,
        "state_reset_bytes": 1000,
        "latency_us": latency(),
    }
    if drafts:
        entry["drafter"] = {
            "method": "dspark",
            "acceptance": "all",
            "num_draft_tokens": drafts,
            "output_shape": [case.num_requests, drafts],
            "graph_matches_eager": True,
            "valid_token_ids": True,
        }
    return entry | changes


def entry(case: Case, ranks: list[dict]) -> dict:
    requests = [
        {
            "query_len": request.query_tokens,
            "kv_len": request.context_tokens,
            "num_draft_tokens": request.draft_tokens,
            "chunked": request.chunked,
        }
        for request in case.requests
        for _ in range(request.count)
    ]
    return {"case": case.name, "requests": requests, "median_us": ranks[0]["latency_us"]["median"], "ranks": ranks}


def result(cases: list[Case], num_ranks: int, **changes: Any) -> list[dict]:
    return [entry(case, [rank(case, **changes) for _ in range(num_ranks)]) for case in cases]


def kernels(moe_us: float) -> dict:
    """One rank's kernel times; busy exceeds the span, as it does where streams overlap."""
    rows = [
        {"name": "mega_moe_impl", "us": moe_us, "pct": 0.0, "calls": 40, "example": "void mega_moe_impl<4>()"},
        {"name": "fp8_paged_mqa_logits", "us": 700.0, "pct": 0.0, "calls": 4, "example": ""},
        {"name": "nvjet_tst_64x8", "us": 1200.0, "pct": 0.0, "calls": 80, "example": ""},
    ]
    total = sum(row["us"] for row in rows)
    for row in rows:
        row["pct"] = round(100 * row["us"] / total, 2)
    return {
        "trace": "case.rank0.trace.json.gz",
        "replays": 3,
        "span_us": round(0.9 * total, 2),
        "busy_us": total,
        "pre_forward_us": 12.0,
        "activities": 124,
        "kernels": rows,
    }
