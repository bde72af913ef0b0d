"""05: servers for the mirror and lag replays; the client of the replays is rackbook's own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.cores import core_ids
from rackbook.engine import lab_model, lab_settings, launch
from rackbook.engine.plan import Plan, Process, Stage
from rackbook.plans import serving
from rackbook.plans.settings import Settings as _Settings
from rackbook.recipes import Recipe

MAX_MODEL_LEN = 262_144
_PAIRS_MINUTES = 10.0
LAB_STEP_TOKENS = 2_048
"""Most tokens that a rank of the lab computes in a step."""
PUBLISHED_RANKS = [2, 4]


class Settings(_Settings):
    """What is measured; defaults are the source's where it prints them."""

    ranks: list[Annotated[int, Field(ge=2)]] = Field(
        default=PUBLISHED_RANKS, min_length=1, description="ranks of each server"
    )
    max_num_batched_tokens: int = Field(default=16_384, ge=1, description="tokens per step and rank, at most")


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: one server per number of ranks, prefix caching off.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    if cluster.is_lab:
        return _lab_plan(settings, recipe, cluster)
    sizes, notes = serving.whole(cluster, recipe, settings.ranks, "ranks")
    limit = min(MAX_MODEL_LEN, recipe.context_limit)
    stages = tuple(_stage(settings, recipe, cluster, size, limit) for size in sizes)
    needs = serving.needs(recipe, "aggregated", limit, checkpoint=False, changes={})
    notes = (*notes, "the replays themselves are sent by rackbook, from this process")
    effective = settings.model_dump(mode="json") | {"ranks": sizes}
    return Plan("dp_imbalance", cluster, recipe, stages, needs, notes, effective)


def _stage(settings: Settings, recipe: Recipe, cluster: Cluster, num_ranks: int, limit: int) -> Stage:
    serving.check(cluster, recipe, "aggregated", num_ranks, "ranks")
    arguments = (
        *recipe.arguments("aggregated", without=("--speculative-config", "--load-format")), "--load-format", "dummy",
        "--max-model-len", str(limit), "--max-num-batched-tokens", str(settings.max_num_batched_tokens),
        "--no-enable-prefix-caching", "--enable-logging-iteration-details", "--api-server-count", "1",
    )  # fmt: skip
    services = launch.server(
        cluster, model=serving.model_of(cluster, recipe), num_ranks=num_ranks, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated"), role="server", parameter="ranks",
    )  # fmt: skip
    minutes = recipe.startup.dummy_minutes + _PAIRS_MINUTES
    basis = (
        f"{recipe.startup.dummy_minutes:g} min to start ({recipe.startup.basis}); {_PAIRS_MINUTES:g} min for the pairs "
        "of replays (assumed; it follows the trace)"
    )
    return Stage(f"dep{num_ranks}", minutes, basis, services=services)


def _lab_plan(settings: Settings, recipe: Recipe, cluster: Cluster) -> Plan:
    """Two ranks in one server, then one server per rank, which share nothing but the machine."""
    step_tokens = min(settings.max_num_batched_tokens, LAB_STEP_TOKENS)
    arguments = (
        "--dtype", lab_model.COMPUTE_DOMINATED["dtype"], "--max-num-batched-tokens", str(step_tokens),
        "--enable-logging-iteration-details", "--no-enable-prefix-caching",
    )  # fmt: skip

    def served(num_ranks: int, port: int, **cores: str) -> tuple[Process, ...]:
        return launch.server(
            cluster, model=serving.model_of(cluster, recipe), num_ranks=num_ranks, gpus_per_rank=1,
            arguments=arguments, environment=recipe.variables("aggregated") | cores, role="server", parameter="ranks",
            port=port,
        )  # fmt: skip

    took = serving.lab_duration(recipe, _PAIRS_MINUTES)
    port = launch.SERVER_PORT
    shares = lab_settings.cores_by_rank(core_ids(), 2).split("|")
    alone = tuple(
        process
        for rank, cores in enumerate(shares)
        for process in served(1, port + rank, VLLM_CPU_OMP_THREADS_BIND=cores)
    )
    stages = (
        Stage("together", took.minutes, took.basis, services=served(2, port)),
        Stage("alone", took.minutes, took.basis, services=alone),
    )
    effective, replaced = settings.on_lab(ranks=[2], max_num_batched_tokens=step_tokens)
    notes = (
        "two ranks on two cores; the source has two and four",
        "the replays themselves are sent by rackbook, from this process; ports are free ones when it runs",
        *replaced,
    )
    needs = serving.needs(recipe, "aggregated", 0, checkpoint=False, changes={})
    return Plan("dp_imbalance", cluster, recipe, stages, needs, notes, effective)
