"""03: the same decode step at several expert-parallel sizes, kernel by kernel."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, forward
from rackbook.engine.cases import Case, decode
from rackbook.engine.plan import Plan
from rackbook.plans import serving
from rackbook.plans.settings import CONTEXT_TOKENS, ForwardSettings
from rackbook.recipes import Recipe

MAX_MODEL_LEN = 262_144


class Settings(ForwardSettings):
    """What is measured; defaults are the source's."""

    measured_ep_sizes: list[Annotated[int, Field(ge=1)]] = Field(
        default=[4, 8, 16, 32], min_length=1, description="expert-parallel sizes"
    )
    measured_context_tokens: int = Field(default=CONTEXT_TOKENS, ge=2, description="context of every request")
    requests_per_gpu: int = Field(default=64, ge=1, description="requests in each rank's batch")
    draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step")


def cases(settings: Settings) -> tuple[Case, ...]:
    """The one batch, the same at every size."""
    return (decode("step", settings.requests_per_gpu, settings.measured_context_tokens, settings.draft_tokens),)


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: one start per size, the target alone, with even routing.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    fit.need_gpus(cluster, "vllm bench forward")
    sizes, notes = serving.fitting(cluster, recipe, settings.measured_ep_sizes, "measured_ep_sizes", "EP")
    if not sizes:
        fit.hosts_for(cluster, min(settings.measured_ep_sizes), "measured_ep_sizes")
    limit = min(MAX_MODEL_LEN, recipe.context_limit)
    needed = settings.measured_context_tokens + settings.draft_tokens + 1
    stages = tuple(
        forward.stage(
            cluster, recipe, cases(settings), name=f"ep{size}", num_ranks=size, ranks_parameter="measured_ep_sizes",
            context_parameter="measured_context_tokens", max_model_len=max(limit, needed),
            max_step_tokens=settings.measured_step_tokens, draft_tokens=settings.draft_tokens or None, profile=True,
            exclude_drafter=bool(settings.draft_tokens), extra=("--routing", "balanced"),
            without_drafter="Set draft_tokens to 0 and acceptance_length to 1", **settings.quality,
        )
        for size in sizes
    )  # fmt: skip
    needs = forward.needs(recipe, "aggregated", settings.measured_context_tokens)
    return Plan("wide_ep_scaling", cluster, recipe, stages, needs, notes)
