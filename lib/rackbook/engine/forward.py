"""``vllm bench forward``: command lines from batches, and the runs themselves; it times the forward pass on GPUs alone.

It measures neither sampling nor the host's work nor uneven load, takes every draft for accepted, starts from a KV cache
of zeros and, with random weights, routes evenly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rackbook.clusters import Cluster
from rackbook.engine import fit, launch
from rackbook.engine.cases import Case
from rackbook.engine.plan import RUN_FOLDER, Needs, Stage
from rackbook.recipes import Recipe, argument

CHANGE = {61339: "vllm bench forward"}
"""The change that brought it."""

ITERS, SAMPLES = 20, 5
"""Replays in a sample, and samples; vLLM's own defaults."""

SETUP_MINUTES_PER_CASE = 1.0
WARM_UP_S = 1.0
_ASSUMED_STEP_MS = 20.0
_STEP_BASIS = f"{_ASSUMED_STEP_MS:g} ms each, assumed; S1 prints decode steps of 8.9 to 23 ms"


def arguments(
    recipe: Recipe,
    cases: Sequence[Case],
    *,
    name: str,
    num_ranks: int,
    max_model_len: int,
    max_step_tokens: int,
    draft_tokens: int | None,
    role: str = "aggregated",
    iters: int = ITERS,
    samples: int = SAMPLES,
    profile: bool = False,
    exclude_drafter: bool = False,
    extra: Sequence[str] = (),
    without_drafter: str = "",
) -> tuple[str, ...]:
    """The command line of vLLM, from ``bench`` on.

    Args:
        recipe: model and arguments.
        cases: the batches, the same on every rank.
        name: of the stage; names the files that it writes.
        num_ranks: data-parallel ranks.
        max_model_len: longest context that the engine is set up for.
        max_step_tokens: most tokens in a step; the expert kernel's buffers follow it, so a comparison holds it fixed.
        draft_tokens: drafts per request and step; None without a drafter.
        role: of the recipe.
        iters: replays in a sample.
        samples: samples per batch.
        profile: whether each kernel's time is recorded as well.
        exclude_drafter: whether only the target is timed.
        extra: further arguments, in place of the recipe's; a table is laid over the recipe's.
        without_drafter: as for :func:`speculation`.
    """
    drafter: tuple[str, ...] = ()
    if draft_tokens is not None:
        drafter = argument("--speculative-config", speculation(recipe, role, draft_tokens, without_drafter))
    own = ("--speculative-config", *(word for word in extra if word.startswith("--")))
    extra = _laid_over(recipe, role, extra)
    return (
        "bench", "forward", "--model", recipe.model_id, *recipe.arguments(role, without=own), *drafter,
        "--kv-len-jitter", "0", "--data-parallel-size", str(num_ranks),
        "--max-model-len", str(max_model_len), "--max-num-batched-tokens", str(max_step_tokens), *extra,
        *(("--exclude-drafter",) if exclude_drafter else ()),
        *(word for case in cases for word in ("--case", str(case))),
        "--iters", str(iters), "--samples", str(samples), "--output-json", f"{RUN_FOLDER}/{name}.json",
        *(("--profile-dir", f"{RUN_FOLDER}/{name}.profile") if profile else ()),
    )  # fmt: skip


def speculation(recipe: Recipe, role: str, draft_tokens: int, without_drafter: str = "", **more: Any) -> dict[str, Any]:
    """The recipe's speculative configuration with another number of drafts.

    Args:
        recipe: of the model.
        role: of the recipe.
        draft_tokens: per request and step.
        without_drafter: what the user sets to measure without drafts; empty where that cannot be.
        more: further entries.

    Raises:
        UnfitError: the recipe has no drafter.
    """
    for option in recipe.options(role):
        if option.flag == "--speculative-config" and isinstance(option.value, dict):
            return option.value | {"num_speculative_tokens": draft_tokens} | more
    add = f"dd --speculative-config to {recipe.file}"
    raise fit.UnfitError(
        f"a recipe without --speculative-config ({recipe.key})",
        f"a drafter for {draft_tokens} drafts",
        f"{without_drafter}, or a{add}" if without_drafter else f"A{add}",
    )


def _laid_over(recipe: Recipe, role: str, extra: Sequence[str]) -> tuple[str, ...]:
    """Further arguments whose tables hold what the recipe's table of the same option says as well."""
    tables = {option.flag: option.value for option in recipe.options(role) if isinstance(option.value, dict)}
    words = list(extra)
    for place, flag in enumerate(words[:-1]):
        if flag in tables and words[place + 1].startswith("{"):
            _, words[place + 1] = argument(flag, tables[flag] | json.loads(words[place + 1]))
    return tuple(words)


def stage(
    cluster: Cluster,
    recipe: Recipe,
    cases: Sequence[Case],
    *,
    name: str,
    num_ranks: int,
    ranks_parameter: str,
    context_parameter: str,
    max_model_len: int,
    draft_tokens: int | None,
    step_ms: Sequence[float] | None = None,
    step_basis: str = "",
    **options: Any,
) -> Stage:
    """One run of the benchmark: the engine starts once and times all batches.

    Args:
        cluster: where.
        recipe: model and arguments.
        cases: the batches.
        name: of the stage.
        num_ranks: data-parallel ranks.
        ranks_parameter: of the experiment, that sets their number.
        context_parameter: of the experiment, that sets the context.
        max_model_len: longest context that the engine is set up for.
        draft_tokens: as for :func:`arguments`.
        step_ms: estimate of each batch's step, for the estimate of the stage; an assumption of its own if None.
        step_basis: where that comes from.
        options: as for :func:`arguments`.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
    """
    role = options.get("role", "aggregated")
    fit.need_gpus(cluster, "vllm bench forward")
    fit.need_hardware(cluster, recipe, role)
    fit.need_experts_divisible(recipe, num_ranks, ranks_parameter)
    fit.need_memory(cluster, recipe, role, num_ranks, ranks_parameter)
    longest = max(case.context_tokens for case in cases)
    fit.need_context(recipe, longest, context_parameter, room=0 if draft_tokens is None else draft_tokens + 1)
    most = max(sum(request.count * request.context_tokens for request in case.requests) for case in cases)
    change = f"Lower {context_parameter} or the requests on a rank, or raise {ranks_parameter}"
    fit.need_kv(cluster, recipe, num_ranks, most, change)
    words = arguments(
        recipe, cases, name=name, num_ranks=num_ranks, max_model_len=max_model_len, draft_tokens=draft_tokens, **options
    )
    processes = launch.ranks(cluster, num_ranks, words, recipe.variables(role), "forward", ranks_parameter)
    minutes, basis = estimate(
        recipe, step_ms or [_ASSUMED_STEP_MS] * len(cases), step_basis or _STEP_BASIS,
        options.get("iters", ITERS), options.get("samples", SAMPLES),
    )  # fmt: skip
    return Stage(name, minutes, basis, steps=(processes,))


def estimate(
    recipe: Recipe, step_ms: Sequence[float], step_basis: str, iters: int = ITERS, samples: int = SAMPLES
) -> tuple[float, str]:
    """How long a run is likely to take, in minutes, and what that assumes."""
    replays_s = sum(WARM_UP_S + iters * samples * each / 1e3 for each in step_ms)
    minutes = recipe.startup.dummy_minutes + len(step_ms) * SETUP_MINUTES_PER_CASE + replays_s / 60
    basis = (
        f"{recipe.startup.dummy_minutes:g} min to start ({recipe.startup.basis}); per batch "
        f"{SETUP_MINUTES_PER_CASE:g} min for its first passes (assumed), {WARM_UP_S:g} s of warm-up and "
        f"{iters} × {samples} replays ({step_basis})"
    )
    return minutes, basis


def needs(recipe: Recipe, role: str, context_tokens: int) -> Needs:
    """What a plan of such runs needs."""
    found = recipe.role(role).compute_capabilities or recipe.compute_capabilities
    return Needs(recipe.vllm, CHANGE, found, context_tokens)


def ranks_on(cluster: Cluster, recipe: Recipe, wanted: int | None, published: int) -> tuple[int, tuple[str, ...]]:
    """How many ranks to measure with.

    Args:
        cluster: where.
        recipe: whose experts must spread evenly.
        wanted: by the user; None for the published number, or as many as the cluster allows.
        published: number of the source.

    Returns:
        The number, and notes for the plan where it is not the published one.
    """
    if wanted is not None:
        return wanted, (() if wanted == published else (f"{_ranks(wanted)} as asked for; the source has {published}",))
    if cluster.num_gpus >= published:
        return published, ()
    found = cluster.num_gpus
    while found > 1 and not _spreads(cluster, recipe, found):
        found -= 1
    return max(found, 1), (
        f"{_ranks(found)}, as many as {cluster.key} allows; the source has {published}: not its claim",
    )


def _spreads(cluster: Cluster, recipe: Recipe, num_ranks: int) -> bool:
    try:
        fit.need_experts_divisible(recipe, num_ranks, "")
        fit.hosts_for(cluster, num_ranks, "")
    except fit.UnfitError:
        return False
    return True


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
