"""08: the same decode step in a server and as a bare forward pass."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rackbook.clusters import Cluster
from rackbook.engine import fit, forward, launch
from rackbook.engine.bench import Load
from rackbook.engine.cases import Case, decode
from rackbook.engine.plan import Plan, Stage
from rackbook.plans import serving
from rackbook.plans.settings import CONTEXT_TOKENS, ForwardSettings
from rackbook.recipes import Recipe, argument

MAX_MODEL_LEN = 262_144
FILLED = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
"""A connector that fills the KV cache of a prompt instead of computing it, so that only decoding is left."""

_WITHOUT_DRAFTER = "Set measured_draft_tokens to 0"

_LAB_LENGTHS = (256, 64, 4)
"""Prompt and answer in tokens and requests per rank that two cores manage."""


class Settings(ForwardSettings):
    """What is measured; defaults are the source's where it prints them."""

    measured_ep_sizes: list[Annotated[int, Field(ge=1)]] = Field(
        default=[16, 32], min_length=1, description="expert-parallel sizes"
    )
    measured_requests_per_rank: int = Field(default=64, ge=1, description="requests that run on each rank")
    measured_context_tokens: int = Field(default=CONTEXT_TOKENS, ge=64, description="context of every request")
    measured_output_tokens: int = Field(default=512, ge=1, description="tokens that each request decodes")
    measured_draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step")
    measured_acceptance_length: float = Field(default=3.5, ge=1, description="tokens per step, synthetic")
    measured_repeats: int = Field(default=3, ge=1, description="runs of the client")


def cases(settings: Settings) -> tuple[Case, ...]:
    """The one batch of the bare forward pass."""
    return (
        decode(
            "step",
            settings.measured_requests_per_rank,
            settings.measured_context_tokens,
            settings.measured_draft_tokens,
        ),
    )


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: per size a server under load, then the bare step; on the CPU lab the server alone.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    sizes, notes = [1], ()
    if not cluster.is_lab:
        sizes, notes = serving.whole(cluster, recipe, settings.measured_ep_sizes, "measured_ep_sizes")
    stages = []
    for size in sizes:
        stages.append(_served(settings, recipe, cluster, size))
        if not cluster.is_lab:
            stages.append(_bare(settings, recipe, cluster, size))
    if cluster.is_lab:
        prompt, answer, per_rank = _LAB_LENGTHS
        effective, replaced = settings.on_lab(
            measured_ep_sizes=sizes, measured_requests_per_rank=per_rank, measured_context_tokens=prompt,
            measured_output_tokens=answer, measured_draft_tokens=0, measured_acceptance_length=None,
            measured_iters=None, measured_samples=None, measured_step_tokens=None,
        )  # fmt: skip
        notes = ("the bare step is not measured: vllm bench forward does not run on a CPU", *replaced)
        needs = serving.needs(recipe, "aggregated", recipe.context_limit, checkpoint=False, changes={})
        return Plan("engine_gap", cluster, recipe, tuple(stages), needs, notes, effective)
    if max(sizes) > 1 and "--api-server-count" not in recipe.arguments("aggregated"):
        notes = (*notes, "vLLM starts an API server per rank, and with several it logs no iterations: no table of them")
    notes = (*notes, "the source's steps are of a build before the fixes of the host's work, which this is not")
    needs = serving.needs(
        recipe, "aggregated", settings.measured_context_tokens, checkpoint=False, changes=forward.CHANGE
    )
    effective = settings.model_dump(mode="json") | {"measured_ep_sizes": sizes}
    return Plan("engine_gap", cluster, recipe, tuple(stages), needs, notes, effective)


def _served(settings: Settings, recipe: Recipe, cluster: Cluster, num_ranks: int) -> Stage:
    serving.check(cluster, recipe, "aggregated", num_ranks, "measured_ep_sizes")
    lab = cluster.is_lab
    if lab:
        prompt, answer, per_rank = _LAB_LENGTHS
    else:
        answer, per_rank = settings.measured_output_tokens, settings.measured_requests_per_rank
        # the first step's drafts end at the wanted context
        prompt = settings.measured_context_tokens - (1 + settings.measured_draft_tokens)
        fit.need_context(recipe, prompt + answer, "measured_context_tokens or measured_output_tokens")
    drafter: tuple[str, ...] = ()
    if settings.measured_draft_tokens and not lab:
        synthetic = {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": settings.measured_acceptance_length,
        }
        value = forward.speculation(recipe, "aggregated", settings.measured_draft_tokens, _WITHOUT_DRAFTER, **synthetic)
        drafter = argument("--speculative-config", value)
    filled = FILLED if lab else FILLED | {"kv_connector_extra_config": {"startup_fill": True}}
    longest = recipe.context_limit if lab else max(min(MAX_MODEL_LEN, recipe.context_limit), prompt + answer)
    arguments = (
        *recipe.arguments("aggregated", without=("--speculative-config", "--load-format")),
        *(() if lab else ("--load-format", "dummy")),  # the lab's weights lie in a file
        "--max-model-len", str(longest), "--max-num-seqs", str(per_rank), "--no-enable-prefix-caching",
        "--enable-logging-iteration-details", *drafter, *argument("--kv-transfer-config", filled),
    )  # fmt: skip
    services = launch.server(
        cluster, model=serving.model_of(cluster, recipe), num_ranks=num_ranks, gpus_per_rank=1, arguments=arguments,
        environment=recipe.variables("aggregated"), role="server", parameter="measured_ep_sizes",
    )  # fmt: skip
    running = per_rank * num_ranks
    loads = [Load(running, prompt, answer, 2 * running)]
    repeats = settings.measured_repeats
    name = f"served_dep{num_ranks}"
    steps = serving.clients(cluster, recipe, launch.url(cluster), loads, repeats=repeats, name=name)
    took = serving.duration(recipe, loads, repeats, 0 if cluster.is_lab else num_ranks, dummy=True, prefill=False)
    return Stage(name, took.minutes, took.basis, services=services, steps=steps)


def _bare(settings: Settings, recipe: Recipe, cluster: Cluster, num_ranks: int) -> Stage:
    needed = settings.measured_context_tokens + settings.measured_draft_tokens + 1
    return forward.stage(
        cluster, recipe, cases(settings), name=f"bare_dep{num_ranks}", num_ranks=num_ranks,
        ranks_parameter="measured_ep_sizes", context_parameter="measured_context_tokens",
        max_model_len=max(min(MAX_MODEL_LEN, recipe.context_limit), needed),
        max_step_tokens=settings.measured_step_tokens, draft_tokens=settings.measured_draft_tokens or None,
        without_drafter=_WITHOUT_DRAFTER, **settings.quality,
    )  # fmt: skip
