"""02: the kernels of one decode step, with the drafter and without it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import forward
from rackbook.engine.cases import Case, decode, in_k
from rackbook.engine.plan import Plan
from rackbook.plans.settings import CONTEXT_TOKENS, ForwardSettings
from rackbook.recipes import Recipe

ASSUMED_RANKS = 32
"""The source prints no size for its breakdown; this is that of its other decode steps."""

WITH_DRAFTER, TARGET_ONLY = "with_drafter", "target_only"


class Settings(ForwardSettings):
    """What is measured; defaults are the source's where it prints them."""

    measured_context_tokens: int = Field(default=CONTEXT_TOKENS, ge=2, description="context of every request")
    measured_ranks: int | None = Field(default=None, ge=1, description="data-parallel ranks")
    measured_requests_per_rank: int = Field(default=64, ge=1, description="requests in each rank's batch")
    measured_draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step")


def cases(settings: Settings) -> tuple[Case, ...]:
    """The one batch."""
    tokens = settings.measured_context_tokens
    return (decode(f"c{in_k(tokens)}", settings.measured_requests_per_rank, tokens, settings.measured_draft_tokens),)


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: the target alone, and, where there are drafts, the target with its drafter.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    num_ranks, notes = forward.ranks_on(cluster, recipe, settings.measured_ranks, ASSUMED_RANKS)
    scopes = (TARGET_ONLY, WITH_DRAFTER) if settings.measured_draft_tokens else (TARGET_ONLY,)
    stages = tuple(
        forward.stage(
            cluster, recipe, cases(settings), name=scope, num_ranks=num_ranks, ranks_parameter="measured_ranks",
            context_parameter="measured_context_tokens", max_model_len=recipe.context_limit,
            max_step_tokens=settings.measured_step_tokens, draft_tokens=settings.measured_draft_tokens or None,
            profile=True, exclude_drafter=scope == TARGET_ONLY and bool(settings.measured_draft_tokens),
            without_drafter="Set measured_draft_tokens to 0", **settings.quality,
        )
        for scope in scopes
    )  # fmt: skip
    needs = forward.needs(recipe, "aggregated", settings.measured_context_tokens)
    return Plan("step_breakdown", cluster, recipe, stages, needs, notes)
