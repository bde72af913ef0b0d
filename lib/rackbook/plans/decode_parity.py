"""10: vLLM's half of the decode curve, one batch size after the other."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, forward
from rackbook.engine.cases import Case, decode
from rackbook.engine.plan import Plan
from rackbook.plans.settings import CONTEXT_TOKENS, ForwardSettings
from rackbook.recipes import Recipe

MAX_MODEL_LEN = 262_144


class Settings(ForwardSettings):
    """What is measured; defaults are the source's where it prints them."""

    measured_batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(
        default=[8, 16, 32, 64, 128, 256], min_length=1, description="requests in each rank's batch"
    )
    measured_context_tokens: int = Field(default=CONTEXT_TOKENS, ge=2, description="context of every request")
    measured_ranks: int = Field(default=4, ge=1, description="data-parallel ranks; the source prints none")
    draft_tokens: int = Field(default=3, ge=0, description="drafts per request and step")


def cases(settings: Settings) -> tuple[Case, ...]:
    """One batch per size."""
    return tuple(
        decode(f"b{size}", size, settings.measured_context_tokens, settings.draft_tokens)
        for size in settings.measured_batch_sizes
    )


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    batches, notes = _with_room(settings, recipe, cluster)
    most_tokens = max(case.num_tokens for case in batches)
    needed = settings.measured_context_tokens + settings.draft_tokens + 1
    stage = forward.stage(
        cluster, recipe, batches, name="forward", num_ranks=settings.measured_ranks, ranks_parameter="measured_ranks",
        context_parameter="measured_context_tokens",
        max_model_len=max(min(MAX_MODEL_LEN, recipe.context_limit), needed),
        max_step_tokens=max(settings.measured_step_tokens, most_tokens), draft_tokens=settings.draft_tokens or None,
        **settings.quality,
    )  # fmt: skip
    needs = forward.needs(recipe, "aggregated", settings.measured_context_tokens)
    notes = (*notes, "DeepInfer's half of the curve is not measured: it needs DeepInfer itself")
    return Plan("decode_parity", cluster, recipe, (stage,), needs, notes)


def _with_room(settings: Settings, recipe: Recipe, cluster: Cluster) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The batches whose KV cache a rank has room for, and a note that names the others; the smallest one anyway."""
    room = fit.kv_room(cluster, recipe, settings.measured_ranks)
    if room is None:
        return cases(settings), ()
    _, *larger = sorted(cases(settings), key=lambda case: case.num_requests)
    beyond = [case for case in larger if case.num_requests * settings.measured_context_tokens > room.tokens]
    kept = tuple(case for case in cases(settings) if case not in beyond)
    if not beyond:
        return kept, ()
    words = ", ".join(str(case.num_requests) for case in beyond)
    return kept, (
        f"left out, because a rank has room for about {room.tokens / 1e6:.1f}M tokens of KV cache ({room.basis}): "
        f"batches of {words}",
    )
