"""11: one user on a few GPUs that share every weight, with the specialised decode and without it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, forward, launch
from rackbook.engine.bench import Load
from rackbook.engine.plan import Plan, Stage
from rackbook.plans import serving
from rackbook.plans.settings import K
from rackbook.plans.settings import Settings as _Settings
from rackbook.recipes import Recipe, argument

SPECIALISED, BASELINE = "specialised", "baseline"
SPECIALISED_CAPABILITY = ("10.3",)
CHANGE = {61868: "specialised decode kernels, part 1"}
_MAX_MODEL_LEN = 262_144


class Settings(_Settings):
    """What is measured; the source prints neither prompts nor lengths."""

    measured_input_tokens: int = Field(default=1 * K, ge=1, description="length of a prompt")
    measured_output_tokens: int = Field(default=1 * K, ge=1, description="length of an answer")
    measured_prompts: int = Field(default=64, ge=1, description="requests per run, one at a time")
    measured_repeats: int = Field(default=3, ge=1, description="runs")
    draft_tokens: int = Field(default=5, ge=1, description="drafts per step")


def load(settings: Settings) -> Load:
    """What the client sends."""
    return Load(1, settings.measured_input_tokens, settings.measured_output_tokens, settings.measured_prompts, 4)


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: the specialised decode where the GPU has it, then the same server without it.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
        DataError: the recipe has no role for it.
    """
    settings = Settings.of(given)
    fit.need_gpus(cluster, "one user on GPUs that share every weight")
    special = fit.covers(SPECIALISED_CAPABILITY, cluster.capability)
    notes = () if special else (
        f"left out, because {cluster.key} has compute capability {cluster.capability}: the specialised decode, which "
        f"needs {' or '.join(SPECIALISED_CAPABILITY)}",
    )  # fmt: skip
    kinds = (SPECIALISED, BASELINE) if special else (BASELINE,)
    stages = tuple(_stage(settings, recipe, cluster, kind) for kind in kinds)
    notes = (
        *notes,
        "random prompts: few drafts are accepted, so the rate is a floor; the source's prompts are not known",
    )
    changes = CHANGE if special else {}
    longest = settings.measured_input_tokens + settings.measured_output_tokens
    needs = serving.needs(recipe, "single_user", longest, checkpoint=True, changes=changes)
    return Plan("single_user", cluster, recipe, stages, needs, notes, settings.model_dump(mode="json"))


def _stage(settings: Settings, recipe: Recipe, cluster: Cluster, kind: str) -> Stage:
    serving.check(cluster, recipe, "single_user", 1, f"gpus_per_rank of the role single_user in {recipe.file}")
    role = recipe.role("single_user")
    longest = settings.measured_input_tokens + settings.measured_output_tokens
    fit.need_context(recipe, longest, "measured_input_tokens or measured_output_tokens", settings.draft_tokens + 1)
    special = argument("--additional-config", {"decode_backend": "latency_specialized"}) if kind == SPECIALISED else ()
    arguments = (
        *recipe.arguments("single_user", without=("--speculative-config",)),
        *argument("--speculative-config", forward.speculation(recipe, "single_user", settings.draft_tokens)), *special,
        "--max-model-len", str(max(min(_MAX_MODEL_LEN, recipe.context_limit), longest)),
    )  # fmt: skip
    services = launch.server(
        cluster, model=recipe.model_id, num_ranks=1, gpus_per_rank=role.gpus_per_rank, arguments=arguments,
        environment=recipe.variables("single_user"), role="server", parameter="gpus_per_rank of the role single_user",
    )  # fmt: skip
    sent = [load(settings)]
    repeats = settings.measured_repeats
    steps = serving.clients(cluster, recipe, launch.url(cluster), sent, repeats=repeats, name=kind)
    seconds = repeats * settings.measured_prompts * settings.measured_output_tokens / _ASSUMED_TOK_PER_S
    basis = (
        f"{recipe.startup.real_minutes:g} min to start ({recipe.startup.basis}); the answers at "
        f"{_ASSUMED_TOK_PER_S:g} tokens/s (assumed, a quarter of the source's rate)"
    )
    return Stage(kind, recipe.startup.real_minutes + seconds / 60, basis, services=services, steps=steps)


_ASSUMED_TOK_PER_S = 200.0
