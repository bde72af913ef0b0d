"""12: one node under a load that fills it, with CUDA graphs captured to different sizes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, forward, launch
from rackbook.engine.bench import Load
from rackbook.engine.plan import Plan, Stage
from rackbook.plans import serving
from rackbook.plans.settings import K
from rackbook.plans.settings import Settings as _Settings
from rackbook.recipes import Recipe, argument

PUBLISHED_RANKS = 8
_LAB_GRID = ((1, 2, 4), 64, 32)
"""Concurrencies, prompt and answer in tokens that two cores manage."""


class Settings(_Settings):
    """What is measured; defaults are the source's."""

    measured_captures: list[Annotated[int, Field(ge=1)]] = Field(
        default=[1536, 8192], min_length=1, description="largest captured steps; the last one gets every load"
    )
    measured_input_tokens: list[Annotated[int, Field(ge=1)]] = Field(
        default=[128, 1 * K, 8 * K], min_length=1, description="lengths of a prompt"
    )
    measured_output_tokens: int = Field(default=1 * K, ge=1, description="length of an answer")
    measured_prefill_tokens: int | None = Field(default=8 * K, ge=1, description="prompt with one output token")
    measured_ranks: int | None = Field(default=None, ge=1, description="data-parallel ranks")
    requests_per_rank: int = Field(default=256, ge=1, description="requests that run on each rank")
    max_model_len: int = Field(default=16_384, ge=1, description="longest request")
    max_step_tokens: int = Field(default=8192, ge=1, description="most tokens of a step")
    draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step")
    measured_repeats: int = Field(default=3, ge=1, description="runs per load")


def loads(settings: Settings, num_ranks: int) -> tuple[Load, ...]:
    """What the client sends to the server with the largest graphs."""
    running = settings.requests_per_rank * num_ranks
    found = [
        Load(running, tokens, settings.measured_output_tokens, 4 * running, 64)
        for tokens in settings.measured_input_tokens
    ]
    if settings.measured_prefill_tokens is not None:
        found.append(Load(running, settings.measured_prefill_tokens, 1, 4 * running, 64))
    return tuple(found)


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: one server per size of the graphs; every load on the last, prompts as long as answers on all.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    if cluster.is_lab:
        return _lab_plan(settings, recipe, cluster)
    num_ranks, notes = forward.ranks_on(cluster, recipe, settings.measured_ranks, PUBLISHED_RANKS)
    every = loads(settings, num_ranks)
    longest = max(load.input_tokens + load.output_tokens for load in every)
    if longest > settings.max_model_len:
        fit.need_context(recipe, longest, "measured_input_tokens")
        raise fit.UnfitError(
            f"max_model_len {settings.max_model_len}", f"{longest}, the longest request", "Raise max_model_len"
        )
    fit.need_context(recipe, settings.max_model_len, "max_model_len")
    same = [load for load in every if load.input_tokens == load.output_tokens] or [every[0]]
    stages = tuple(
        _stage(
            settings, recipe, cluster, num_ranks, capture, every if place == len(settings.measured_captures) else same
        )
        for place, capture in enumerate(settings.measured_captures, start=1)
    )
    notes = (
        *notes,
        "one client at this concurrency may itself be what is slow: its use of a core is recorded",
        "random prompts: few drafts are accepted, so every decode rate is a floor",
    )
    needs = serving.needs(recipe, "aggregated", settings.max_model_len, checkpoint=True, changes={})
    effective = settings.model_dump(mode="json") | {"measured_ranks": num_ranks}
    return Plan("single_node", cluster, recipe, stages, needs, notes, effective)


def _stage(
    settings: Settings,
    recipe: Recipe,
    cluster: Cluster,
    num_ranks: int,
    capture: int,
    sent: tuple[Load, ...] | list[Load],
) -> Stage:
    serving.check(cluster, recipe, "aggregated", num_ranks, "measured_ranks")
    drafter: tuple[str, ...] = ()
    if settings.draft_tokens:
        drafter = argument(
            "--speculative-config",
            forward.speculation(
                recipe, "aggregated", settings.draft_tokens, "Set draft_tokens to 0 and acceptance_length to 1"
            ),
        )
    arguments = (
        *recipe.arguments("aggregated", without=("--speculative-config", "--max-cudagraph-capture-size")), *drafter,
        "--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.requests_per_rank),
        "--max-num-batched-tokens", str(settings.max_step_tokens), "--max-cudagraph-capture-size", str(capture),
    )  # fmt: skip
    services = launch.server(
        cluster, model=recipe.model_id, num_ranks=num_ranks, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated"), role="server", parameter="measured_ranks",
    )  # fmt: skip
    name = f"capture{capture}"
    repeats = settings.measured_repeats
    steps = serving.clients(cluster, recipe, launch.url(cluster), sent, repeats=repeats, name=name)
    took = serving.duration(recipe, sent, repeats, num_ranks, dummy=False)
    return Stage(name, took.minutes, took.basis, services=services, steps=steps)


def _lab_plan(settings: Settings, recipe: Recipe, cluster: Cluster) -> Plan:
    concurrencies, prompt, answer = _LAB_GRID
    sent = [Load(each, prompt, answer, 4 * each) for each in concurrencies]
    arguments = (*recipe.arguments("aggregated"), "--max-model-len", str(recipe.context_limit))
    services = launch.server(
        cluster, model=serving.model_of(cluster, recipe), num_ranks=1, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated"), role="server", parameter="measured_ranks",
    )  # fmt: skip
    repeats = settings.measured_repeats
    steps = serving.clients(cluster, recipe, launch.url(cluster), sent, repeats=repeats, name="grid")
    took = serving.duration(recipe, sent, repeats, 0, dummy=True)
    stage = Stage("grid", took.minutes, took.basis, services=services, steps=steps)
    effective, replaced = settings.on_lab(
        measured_captures=None, measured_input_tokens=[prompt], measured_output_tokens=answer,
        measured_prefill_tokens=None, measured_ranks=1, requests_per_rank=list(concurrencies),
        max_model_len=recipe.context_limit, max_step_tokens=None, draft_tokens=0,
    )  # fmt: skip
    notes = ("a small grid that two cores manage; no CUDA graphs on a CPU", *replaced)
    needs = serving.needs(recipe, "aggregated", recipe.context_limit, checkpoint=False, changes={})
    return Plan("single_node", cluster, recipe, (stage,), needs, notes, effective)
