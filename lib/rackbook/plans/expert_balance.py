"""06: a server that balances its experts and logs the balance, and one that only logs it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, launch
from rackbook.engine.bench import Load
from rackbook.engine.plan import RUN_FOLDER, Plan, Stage
from rackbook.plans import serving
from rackbook.plans.settings import Settings as _Settings
from rackbook.recipes import Recipe, argument

_NEVER = 1_000_000_000
_LAB_REQUESTS, _LAB_MINUTES = 32, 1.0
_OUTPUT_TOKENS = 8192
"""Long answers keep the batch in decode for several rearrangements."""


class Settings(_Settings):
    """What is measured; defaults are the source's where it prints them."""

    ranks: int = Field(default=32, ge=2, description="expert-parallel size")
    requests_per_rank: int = Field(default=72, ge=1, description="decoding requests on each rank")
    measured_redundant_experts: int = Field(default=32, ge=0, description="copies of experts that balancing may place")
    measured_window_steps: int = Field(default=1000, ge=1, description="steps whose load counts")
    measured_interval_steps: int = Field(default=3000, ge=2, description="steps from one rearrangement to the next")
    measured_input_tokens: int = Field(default=1024, ge=1, description="length of a prompt")


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: with balancing, and without.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    if cluster.is_lab:
        return _lab_plan(recipe, cluster)
    fit.need_gpus(cluster, "expert parallelism")
    (size,), notes = serving.whole(cluster, [settings.ranks])
    stages = tuple(_stage(settings, recipe, cluster, size, balanced) for balanced in (True, False))
    notes = (
        *notes,
        "random prompts route otherwise than a real workload: send one of your own for the claim about real routing",
        "0.33.0 cannot balance this model's drafter and logs no balancedness of it",
        "the log's balancedness is a ratio of sums over the layers, the source's a mean of the layers' ratios",
    )
    longest = settings.measured_input_tokens + _OUTPUT_TOKENS
    needs = serving.needs(recipe, "aggregated", longest, checkpoint=True, changes={})
    return Plan("expert_balance", cluster, recipe, stages, needs, notes)


def eplb(settings: Settings, balanced: bool) -> dict[str, Any]:
    """The configuration of the balancer; without balancing it only logs."""
    return {
        "num_redundant_experts": settings.measured_redundant_experts if balanced else 0,
        "window_size": settings.measured_window_steps,
        "step_interval": settings.measured_interval_steps if balanced else _NEVER,
        "log_balancedness": True,
        "log_balancedness_interval": 10,
    }


def _stage(settings: Settings, recipe: Recipe, cluster: Cluster, num_ranks: int, balanced: bool) -> Stage:
    redundant = settings.measured_redundant_experts if balanced else 0
    serving.check(cluster, recipe, "aggregated", num_ranks, "ranks or measured_redundant_experts", redundant)
    longest = settings.measured_input_tokens + _OUTPUT_TOKENS
    fit.need_context(recipe, longest, "measured_input_tokens")
    arguments = (
        *recipe.arguments("aggregated"), "--max-model-len", str(longest), "--max-num-seqs",
        str(settings.requests_per_rank), "--enable-eplb", *argument("--eplb-config", eplb(settings, balanced)),
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


def _lab_plan(recipe: Recipe, cluster: Cluster) -> Plan:
    """A server whose plug-in writes down which experts the router chose."""
    arguments = ("--no-enable-prefix-caching", "--max-num-seqs", str(_LAB_REQUESTS))
    services = launch.server(
        cluster, model=serving.model_of(cluster, recipe), num_ranks=1, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated") | {"RACKBOOK_ROUTED_EXPERTS_DIR": f"{RUN_FOLDER}/routed"},
        role="server", parameter="ranks",
    )  # fmt: skip
    took = serving.lab_duration(recipe, _LAB_MINUTES)
    stage = Stage("server", took.minutes, took.basis, services=services)
    notes = (f"rackbook sends {_LAB_REQUESTS} requests from this process", "random weights: no trained router's choice")
    needs = serving.needs(recipe, "aggregated", 0, checkpoint=False, changes={})
    return Plan("expert_balance", cluster, recipe, (stage,), needs, notes)
