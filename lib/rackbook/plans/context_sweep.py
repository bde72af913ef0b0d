"""01: one decode step at several context lengths, everything else the same."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, forward, launch
from rackbook.engine.cases import Case, decode, in_k
from rackbook.engine.plan import Plan, Stage
from rackbook.plans import serving
from rackbook.plans.engine_gap import FILLED
from rackbook.plans.settings import ForwardSettings, K
from rackbook.recipes import Recipe, argument

PUBLISHED_RANKS = 32
_LAB_MINUTES = 5.0


class Settings(ForwardSettings):
    """What is measured; defaults are the source's."""

    measured_contexts: list[Annotated[int, Field(ge=2)]] = Field(
        default=[64 * K, 128 * K, 855 * K], min_length=1, description="context lengths"
    )
    measured_ranks: int | None = Field(default=None, ge=1, description="data-parallel ranks")
    measured_requests_per_rank: int = Field(default=16, ge=1, description="requests in each rank's batch")
    measured_draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step")


def cases(settings: Settings) -> tuple[Case, ...]:
    """One batch per context length."""
    return tuple(
        decode(f"c{in_k(tokens)}", settings.measured_requests_per_rank, tokens, settings.measured_draft_tokens)
        for tokens in settings.measured_contexts
    )


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: the target alone, as the source times it, although each request brings its drafts.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    if cluster.is_lab:
        return _lab_plan(settings, recipe, cluster)
    batches = cases(settings)
    num_ranks, notes = forward.ranks_on(cluster, recipe, settings.measured_ranks, PUBLISHED_RANKS)
    stage = forward.stage(
        cluster, recipe, batches, name="forward", num_ranks=num_ranks, ranks_parameter="measured_ranks",
        context_parameter="measured_contexts", max_model_len=recipe.context_limit,
        max_step_tokens=settings.measured_step_tokens, draft_tokens=settings.measured_draft_tokens or None,
        exclude_drafter=bool(settings.measured_draft_tokens), without_drafter="Set measured_draft_tokens to 0",
        **settings.quality,
    )  # fmt: skip
    needs = forward.needs(recipe, "aggregated", max(settings.measured_contexts))
    effective = settings.model_dump(mode="json") | {"measured_ranks": num_ranks}
    return Plan("context_sweep", cluster, recipe, (stage,), needs, notes, effective)


def _lab_plan(settings: Settings, recipe: Recipe, cluster: Cluster) -> Plan:
    """A server whose prompts cost no prefill; its own log of iterations gives the step."""
    if settings.measured_draft_tokens:
        raise fit.UnfitError(
            "no drafter in the CPU lab's model", f"one for {settings.measured_draft_tokens} drafts per step",
            "Set measured_draft_tokens to 0",
        )  # fmt: skip
    arguments = (
        "--enable-logging-iteration-details", "--no-enable-prefix-caching", "--max-num-seqs",
        str(max(2, settings.measured_requests_per_rank)),
        *argument("--kv-transfer-config", FILLED),
    )  # fmt: skip
    num_ranks = settings.measured_ranks or 1
    services = launch.server(
        cluster, model=serving.model_of(cluster, recipe), num_ranks=num_ranks, gpus_per_rank=1,
        arguments=arguments, environment=recipe.variables("aggregated"), role="server", parameter="measured_ranks",
    )  # fmt: skip
    took = serving.lab_duration(recipe, _LAB_MINUTES)
    stage = Stage("server", took.minutes, took.basis, services=services)
    effective, replaced = settings.on_lab(
        measured_ranks=num_ranks, measured_iters=None, measured_samples=None, measured_step_tokens=None
    )
    notes = (
        "the batches are sent by rackbook, from this process; the model is made with room for the longest context",
        "no drafter, no GPU, another model: not the source's step",
        *replaced,
    )
    needs = serving.needs(recipe, "aggregated", max(settings.measured_contexts), checkpoint=False, changes={})
    return Plan("context_sweep", cluster, recipe, (stage,), needs, notes, effective)
