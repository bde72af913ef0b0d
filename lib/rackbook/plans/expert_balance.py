"""06: a server that balances its experts and logs the balance, one that only logs it, one that tells its routing."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, launch
from rackbook.engine.bench import Load
from rackbook.engine.plan import RUN_FOLDER, Plan, Process, Stage
from rackbook.plans import serving
from rackbook.plans.settings import Settings as _Settings
from rackbook.recipes import Recipe, argument

ROUTED = "routed"
"""Stage whose server returns the routed experts with its answers."""

ROUTED_EXPERTS_DIR = "RACKBOOK_ROUTED_EXPERTS_DIR"
"""Variable by which the lab's plugin is told where to record."""

LAB_REQUESTS, LAB_PROMPT_TOKENS, LAB_OUTPUT_TOKENS = 32, 16, 24
"""A batch of the lab that decodes together; more tokens would make a run too large to keep beside the notebook."""

_ROUTED_REQUESTS = 512
_NEVER = 1_000_000_000
_LAB_MINUTES = 1.0
_OUTPUT_TOKENS = 8192
"""Long answers keep the batch in decode for several rearrangements."""


class Settings(_Settings):
    """What is measured; defaults are the source's where it prints them."""

    ranks: int = Field(default=32, ge=2, description="expert-parallel size")
    requests_per_rank: int = Field(default=72, ge=1, description="decoding requests on each rank")
    redundant_per_rank: int = Field(default=1, ge=0, description="redundant experts on each rank")
    window_steps: int = Field(default=1000, ge=1, description="steps whose load counts")
    interval_steps: int = Field(default=3000, ge=2, description="steps from one rearrangement to the next")
    measured_input_tokens: int = Field(default=1024, ge=1, description="length of a prompt")
    measured_routed_requests: int | None = Field(
        default=None, ge=1, description="requests whose routed experts are returned"
    )
    measured_routed_input_tokens: int = Field(default=128, ge=1, description="length of their prompts")
    measured_routed_output_tokens: int = Field(default=24, ge=2, description="length of their answers")


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: with balancing, and without; then a server that returns the routed experts.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    if cluster.is_lab:
        return _lab_plan(settings, recipe, cluster)
    fit.need_gpus(cluster, "expert parallelism")
    (size,), notes = serving.whole(cluster, recipe, [settings.ranks], "ranks")
    balanced, unbalanced = (_stage(settings, recipe, cluster, size, balanced) for balanced in (True, False))
    stages = (balanced, unbalanced, _routed(settings, recipe, unbalanced))
    notes = (
        *notes,
        f"rackbook itself sends the {routed_requests(settings, size)} prompts of the stage {ROUTED}, "
        f"{settings.measured_routed_input_tokens} random tokens each, and asks for "
        f"{settings.measured_routed_output_tokens}; returning the experts needs another model runner, so a run of its "
        "own",
        "random prompts route otherwise than a real workload: send one of your own for the claim about real routing",
        "0.33.0 cannot balance this model's drafter and logs no balancedness of it",
        "the log's balancedness is a ratio of sums over the layers, the source's a mean of the layers' ratios",
    )
    longest = settings.measured_input_tokens + _OUTPUT_TOKENS
    needs = serving.needs(recipe, "aggregated", longest, checkpoint=True, changes={})
    effective = settings.model_dump(mode="json") | {
        "ranks": size, "measured_routed_requests": routed_requests(settings, size),
    }  # fmt: skip
    return Plan("expert_balance", cluster, recipe, stages, needs, notes, effective)


def eplb(settings: Settings, num_ranks: int, balanced: bool) -> dict[str, Any]:
    """The configuration of the balancer; without balancing it only logs."""
    return {
        "num_redundant_experts": settings.redundant_per_rank * num_ranks if balanced else 0,
        "window_size": settings.window_steps,
        "step_interval": settings.interval_steps if balanced else _NEVER,
        "log_balancedness": True,
        "log_balancedness_interval": 10,
    }


def _stage(settings: Settings, recipe: Recipe, cluster: Cluster, num_ranks: int, balanced: bool) -> Stage:
    options = eplb(settings, num_ranks, balanced)
    serving.check(cluster, recipe, "aggregated", num_ranks, "ranks", options["num_redundant_experts"])
    longest = settings.measured_input_tokens + _OUTPUT_TOKENS
    fit.need_context(recipe, longest, "measured_input_tokens")
    arguments = (
        *recipe.arguments("aggregated"), "--max-model-len", str(longest), "--max-num-seqs",
        str(settings.requests_per_rank), "--enable-eplb", *argument("--eplb-config", options),
    )  # fmt: skip
    services = launch.server(
        cluster, model=recipe.model_id, num_ranks=num_ranks, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated"), role="server", parameter="ranks",
    )  # fmt: skip
    running = settings.requests_per_rank * num_ranks
    loads = [Load(running, settings.measured_input_tokens, _OUTPUT_TOKENS, 2 * running)]
    name = "balanced" if balanced else "unbalanced"
    steps = serving.clients(cluster, recipe, launch.url(cluster), loads, repeats=1, name=name)
    took = serving.duration(recipe, loads, 1, num_ranks, dummy=False)
    return Stage(name, took.minutes, took.basis, services=services, steps=steps)


def routed_requests(settings: Settings, num_ranks: int) -> int:
    """Requests whose routed experts are returned; as many as decode together, and few enough to keep, unless set."""
    return settings.measured_routed_requests or min(_ROUTED_REQUESTS, settings.requests_per_rank * num_ranks)


def _routed(settings: Settings, recipe: Recipe, unbalanced: Stage) -> Stage:
    """The server without balancing once more, with the routed experts in its answers: logical ids, whatever EPLB does.

    Raises:
        UnfitError: the recipe does not say of which model, or the prompts are too long.
    """
    prompt, answer = settings.measured_routed_input_tokens, settings.measured_routed_output_tokens
    longest = settings.measured_input_tokens + _OUTPUT_TOKENS
    if prompt + answer > longest:
        raise fit.UnfitError(
            f"servers for {longest:,} tokens", f"{prompt + answer:,}",
            "Lower measured_routed_input_tokens or measured_routed_output_tokens, or raise measured_input_tokens",
        )  # fmt: skip
    if recipe.model is None:
        raise fit.UnfitError(
            f"a recipe without a model of the catalog ({recipe.key})", "the number of its experts",
            f"Set model in {recipe.file}",
        )  # fmt: skip

    def returning(process: Process) -> Process:
        return dataclasses.replace(
            process,
            arguments=(*process.arguments, "--enable-return-routed-experts"),
            environment={**process.environment, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        )

    count = routed_requests(settings, unbalanced.num_gpus)
    took = serving.duration(recipe, [Load(count, prompt, answer, count)], 1, unbalanced.num_gpus, dummy=False)
    return Stage(ROUTED, took.minutes, took.basis, services=tuple(map(returning, unbalanced.services)))


def _lab_plan(settings: Settings, recipe: Recipe, cluster: Cluster) -> Plan:
    """A server whose plug-in writes down which experts the router chose."""
    arguments = ("--no-enable-prefix-caching", "--max-num-seqs", str(LAB_REQUESTS))
    services = launch.server(
        cluster, model=serving.model_of(cluster, recipe), num_ranks=1, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated") | {ROUTED_EXPERTS_DIR: f"{RUN_FOLDER}/{ROUTED}"}, role="server",
        parameter="ranks",
    )  # fmt: skip
    took = serving.lab_duration(recipe, _LAB_MINUTES)
    stage = Stage("server", took.minutes, took.basis, services=services)
    effective, replaced = settings.on_lab(
        ranks=1, requests_per_rank=LAB_REQUESTS, redundant_per_rank=None, window_steps=None, interval_steps=None,
        measured_input_tokens=None, measured_routed_requests=LAB_REQUESTS,
        measured_routed_input_tokens=LAB_PROMPT_TOKENS, measured_routed_output_tokens=LAB_OUTPUT_TOKENS,
    )  # fmt: skip
    notes = (
        f"rackbook sends {LAB_REQUESTS} requests from this process",
        "random weights: no trained router's choice",
        *replaced,
    )
    needs = serving.needs(recipe, "aggregated", 0, checkpoint=False, changes={})
    return Plan("expert_balance", cluster, recipe, (stage,), needs, notes, effective)
