"""12, the modelled steps of a rank that mixes prefill with decoding, and the CUDA graphs that cover them."""

from __future__ import annotations

from typing import Protocol

import polars as pl

from rackbook.models.graph_cover import MixedSteps

NUM_STEP_SIZES = 8


class Described(Protocol):
    """The parameters of notebook 12 that describe the steps."""

    capture_tokens: list[int]
    requests_per_rank: int
    num_ranks: int
    prompt_tokens: int
    output_tokens: int
    max_step_tokens: int
    draft_tokens: int
    acceptance_percent: float


def steps_of(params: Described) -> MixedSteps:
    """The steps that the parameters describe."""
    return MixedSteps(
        requests_per_rank=params.requests_per_rank,
        prompt_tokens=params.prompt_tokens,
        output_tokens=params.output_tokens,
        tokens_per_step=1 + params.acceptance_percent / 100 * params.draft_tokens,
        draft_tokens=params.draft_tokens,
        max_step_tokens=params.max_step_tokens,
        num_ranks=params.num_ranks,
    )


def step_sizes(params: Described) -> pl.DataFrame:
    """Size of a step by the number of prompts that start in it, and the smallest ceiling that covers it.

    Returns:
        num_new_prompts, step_tokens, graph_cover (a ceiling, or "none"), origin "modelled", source, formula.
    """
    steps = steps_of(params)
    rows = []
    for started in range(min(NUM_STEP_SIZES, params.requests_per_rank) + 1):
        tokens = steps.step_tokens(started)
        covering = [c for c in params.capture_tokens if c >= tokens]
        rows.append(
            {
                "num_new_prompts": started,
                "step_tokens": tokens,
                "graph_cover": f"{covering[0]:,}" if covering else "none",
                "origin": "modelled",
                "source": "parameters",
                "formula": f"{params.requests_per_rank - started} × {1 + params.draft_tokens} + "
                f"{started} × {params.prompt_tokens:,}, at most {params.max_step_tokens:,}",
            }
        )
    return pl.DataFrame(rows)


def graph_cover(params: Described) -> pl.DataFrame:
    """Share of the steps that each ceiling covers, between two ways in which requests can start.

    Returns:
        max_capture_tokens, num_new_prompts (most on any rank; null where not even decoding alone fits),
        covered_low_percent (requests start independently), covered_high_percent (all in one wave), origin "modelled",
        source, missing_reason.
    """
    steps = steps_of(params)
    rows = []
    for ceiling in params.capture_tokens:
        most = steps.most_prompts_within(ceiling)
        shares = sorted((steps.covered_if_independent(ceiling), steps.covered_if_together(ceiling)))
        rows.append(
            {
                "max_capture_tokens": ceiling,
                "num_new_prompts": most if most >= 0 else None,
                "covered_low_percent": 100 * shares[0],
                "covered_high_percent": 100 * shares[1],
                "origin": "modelled",
                "source": "parameters",
                "missing_reason": None
                if most >= 0
                else f"{steps.decode_only_tokens:,} tokens of decoding alone do not fit",
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)
