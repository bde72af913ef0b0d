"""04: prefills on top of a cached prefix, with what can be switched on and off one switch at a time."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

from pydantic import Field

from rackbook import prefill_switches, published
from rackbook.clusters import Cluster
from rackbook.engine import fit, forward
from rackbook.engine.cases import Case, cached_prefill, in_k
from rackbook.engine.plan import Plan, Stage
from rackbook.errors import ParameterError, one_of
from rackbook.plans.settings import CONTEXT_TOKENS, ForwardSettings, K
from rackbook.recipes import Recipe

MAX_MODEL_LEN = 262_144
_ROOM_FOR_REPLAY = 1024
"""Tokens that a prefix hit may add to the step; vLLM's own allowance."""

BASELINE, ON, OFF = "baseline", "on", "off"


class Settings(ForwardSettings):
    """What is measured; defaults are the source's where it prints them."""

    measured_new_tokens: list[Annotated[int, Field(ge=2)]] = Field(
        default=[4 * K, 8 * K, 16 * K, 32 * K, 64 * K], min_length=1, description="new tokens of a prefill"
    )
    measured_cached_tokens: int = Field(default=CONTEXT_TOKENS, ge=1, description="tokens in the cached prefix")
    measured_ranks: int = Field(default=4, ge=1, description="data-parallel ranks")
    measured_fixes: list[str] = Field(
        default=list(prefill_switches.NAMES),
        min_length=1,
        description=f"what is switched: {', '.join(prefill_switches.NAMES)}",
    )


def cases(settings: Settings) -> tuple[Case, ...]:
    """One prefill per size, one request on each rank."""
    return tuple(
        cached_prefill(f"n{in_k(tokens)}", tokens, settings.measured_cached_tokens)
        for tokens in settings.measured_new_tokens
    )


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run: the recipe as it is, then each switch on and off.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
    """
    settings = Settings.of(given)
    for name in settings.measured_fixes:
        if name not in prefill_switches.NAMES:
            raise ParameterError(f"measured_fixes: {one_of(name, prefill_switches.NAMES, 'switch')}")
    fit.need_gpus(cluster, "vllm bench forward")
    known = prefill_switches.read()
    stages, notes = [_stage(settings, recipe, cluster, BASELINE, ())], []
    for name in settings.measured_fixes:
        switch = known.named(name)
        if not fit.covers(switch.compute_capabilities, cluster.capability):
            notes.append(
                f"left out, because {cluster.key} has compute capability {cluster.capability}: {switch.fix}, which "
                f"needs {' or '.join(switch.compute_capabilities)}"
            )
            continue
        for state, text in ((ON, switch.on), (OFF, switch.off)):
            if state != switch.default:  # which the first stage has measured
                stages.append(_stage(settings, recipe, cluster, f"{name}_{state}", tuple(shlex.split(text))))
    longest = settings.measured_cached_tokens + max(settings.measured_new_tokens)
    needs = forward.needs(recipe, "aggregated", longest)
    return Plan("prefill_ablation", cluster, recipe, tuple(stages), needs, tuple(notes))


def _stage(settings: Settings, recipe: Recipe, cluster: Cluster, name: str, extra: tuple[str, ...]) -> Stage:
    longest = settings.measured_cached_tokens + max(settings.measured_new_tokens)
    rate = _published_tok_per_s()
    return forward.stage(
        cluster, recipe, cases(settings), name=name, num_ranks=settings.measured_ranks,
        ranks_parameter="measured_ranks", context_parameter="measured_new_tokens or measured_cached_tokens",
        max_model_len=max(min(MAX_MODEL_LEN, recipe.context_limit), longest),
        max_step_tokens=max(settings.measured_step_tokens, max(settings.measured_new_tokens) + _ROOM_FOR_REPLAY),
        draft_tokens=None, extra=extra, step_ms=[1e3 * tokens / rate for tokens in settings.measured_new_tokens],
        step_basis=f"the new tokens at S1's {rate:,.0f} tokens/s per GPU before the fixes", **settings.quality,
    )  # fmt: skip


def _published_tok_per_s() -> float:
    rates = published.read("prefill_ablation_throughput")
    return rates.filter(rates["stage"] == "before")["prefill_tok_per_s_per_gpu"].item()
