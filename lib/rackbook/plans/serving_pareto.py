"""09: prefill engines, a decode engine and a router between them, at several numbers of clients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rackbook import published
from rackbook.clusters import Cluster
from rackbook.engine import bench, fit, launch
from rackbook.engine.plan import RUN_FOLDER, Plan, Process, Stage
from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.plans import serving
from rackbook.plans.settings import Settings as _Settings
from rackbook.recipes import Recipe
from rackbook.replay.trace_files import MOONCAKE_BLOCK_TOKENS, TIMED_BLOCK_TOKENS

ROUTER_PORT, PREFILL_PORT, DECODE_PORT = 8090, 8100, 8200
_SIDE_CHANNEL_PORT, _RPC_PORT = 5600, 13345
"""Each engine takes ports of its own: the side channel one per rank."""

_MINUTES_PER_RUN = 15.0
_GOODPUT = ("ttft:5000", "tpot:25")
WORKLOAD = "TRACE"
"""Stands for the file of requests until one is given."""


class Settings(_Settings):
    """What is measured; where None, the smallest published deployment, or a smaller one that fits."""

    measured_prefill_engines: int | None = Field(default=None, ge=1, description="prefill engines")
    measured_decode_ranks: int | None = Field(default=None, ge=1, description="ranks of the decode engine")
    measured_max_seqs: int | None = Field(default=None, ge=1, description="requests that run on a decode rank")
    measured_concurrency: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None, description="clients at a time"
    )
    workload_path: str = Field(default="", description="trace of requests, as vllm bench serve reads timed_trace")
    measured_repeats: int = Field(default=3, ge=1, description="runs per number of clients, prompts new in each")


def plan(given: Any, recipe: Recipe, cluster: Cluster) -> Plan:
    """What would run.

    Raises:
        UnfitError: the cluster, the recipe or the model cannot do it.
        ParameterError: a setting that is not allowed.
        DataError: the recipe has no such roles or no router.
    """
    settings = Settings.of(given)
    fit.need_gpus(cluster, "prefill and decode engines")
    prefill_ranks = recipe.role("prefill").num_ranks or 1
    point = published.read("serving_pareto_topology").drop_nulls("concurrency").sort("concurrency").row(0, named=True)
    engines = settings.measured_prefill_engines or point["num_prefill_engines"]
    decode_ranks = settings.measured_decode_ranks or point["ep_size"]
    max_seqs = settings.measured_max_seqs or point["max_seqs_per_rank"]
    loads = settings.measured_concurrency or [point["concurrency"]]
    notes = ["admissions per step have no cap in vLLM 0.33.0; the published deployments had one"]
    asked = settings.measured_prefill_engines or settings.measured_decode_ranks
    if not asked and engines * prefill_ranks + decode_ranks > cluster.num_gpus:
        engines, decode_ranks = 1, recipe.role("decode").num_ranks or 1
        loads = settings.measured_concurrency or [max_seqs * decode_ranks]
        notes.append(
            f"{engines} prefill engine and DEP{decode_ranks}, because {cluster.key} has {cluster.num_gpus} GPUs: not "
            "one of the published deployments"
        )
    if not settings.workload_path:
        notes.append("TRACE stands for the workload: give workload_path; the published one is not public")
    elif not Path(settings.workload_path).is_file():
        notes.append(f"{settings.workload_path} is not there: {TIMED_BLOCK_TOKENS} tokens per hash id are assumed")
    needed = engines * prefill_ranks + decode_ranks
    if needed > cluster.num_gpus:
        fit.hosts_for(cluster, needed, "measured_prefill_engines or measured_decode_ranks")
    sizes = (engines, prefill_ranks, decode_ranks)
    prefill, decode, prefill_urls, decode_urls = _engines(recipe, cluster, *sizes, max_seqs)
    router = _router(recipe, prefill_urls, decode_urls)
    steps = _clients(settings, recipe, cluster, loads)
    minutes = recipe.startup.real_minutes + _MINUTES_PER_RUN * len(steps)
    basis = (
        f"{recipe.startup.real_minutes:g} min to start ({recipe.startup.basis}); {_MINUTES_PER_RUN:g} min per run "
        "(assumed; it follows the trace)"
    )
    stage = Stage("served", minutes, basis, services=(*prefill, *decode, router), steps=steps)
    needs = serving.needs(recipe, "decode", 0, checkpoint=True, changes={})
    effective = settings.model_dump(mode="json") | {
        "measured_prefill_engines": engines, "measured_decode_ranks": decode_ranks, "measured_max_seqs": max_seqs,
        "measured_concurrency": loads,
    }  # fmt: skip
    return Plan("serving_pareto", cluster, recipe, (stage,), needs, tuple(notes), effective)


def tokens_per_id(workload: Path) -> int:
    """Tokens that a hash id of a trace stands for, 16 or Mooncake's 512; no line says which.

    The client cuts a prompt, without a word, where the ids times this number end.

    Raises:
        DataError: a line without input_length and hash_ids, or lines whose ids fit neither number.
    """
    sizes = [TIMED_BLOCK_TOKENS, MOONCAKE_BLOCK_TOKENS]
    for number, line in enumerate(workload.read_text("utf-8").splitlines(), start=1):
        where = f"{shown(workload)}, line {number}"
        try:
            entry = json.loads(line)
            ids, tokens = len(entry["hash_ids"]), int(entry["input_length"])
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(
                f"{where}: got {line[:80]!r} ({type(problem).__name__}: {problem}), expected a JSON object with "
                "timestamp, input_length, output_length and hash_ids"
            ) from None
        sizes = [size for size in sizes if ids == -(-tokens // size)]
        if not sizes:
            raise DataError(
                f"{where}: got {ids} hash ids for {tokens} tokens, expected one per {TIMED_BLOCK_TOKENS} in every line "
                f"or one per {MOONCAKE_BLOCK_TOKENS}; vllm bench serve would cut the prompts"
            )
    return sizes[0]


def _engines(
    recipe: Recipe, cluster: Cluster, engines: int, prefill_ranks: int, decode_ranks: int, max_seqs: int
) -> tuple[list[Process], list[Process], list[str], list[str]]:
    """Prefill engines side by side on the first hosts, the decode engine behind them."""
    per_host = cluster.num_gpus_per_host
    serving.check(cluster, recipe, "prefill", prefill_ranks, f"num_ranks of the role prefill in {recipe.file}")
    serving.check(cluster, recipe, "decode", decode_ranks, "measured_decode_ranks")
    if prefill_ranks > per_host:
        raise fit.UnfitError(
            f"hosts of {per_host} GPUs on {cluster.key}", f"{prefill_ranks} for a prefill engine",
            f"Set num_ranks of the role prefill in {recipe.file}",
        )  # fmt: skip
    on_host = per_host // prefill_ranks
    prefill, urls = [], []
    for engine in range(engines):
        host, place = divmod(engine, on_host)
        port = PREFILL_PORT + engine
        prefill += launch.server(
            cluster, model=recipe.model_id, num_ranks=prefill_ranks, gpus_per_rank=1,
            arguments=recipe.arguments("prefill"),
            environment=recipe.variables("prefill") | _side_channel(cluster, host, engine * prefill_ranks),
            role="prefill", parameter="measured_prefill_engines", first_host=host, port=port,
            rpc_port=_RPC_PORT + engine, gpus=range(place * prefill_ranks, (place + 1) * prefill_ranks),
        )  # fmt: skip
        urls.append(launch.url(cluster, host, port))
    hosts = fit.hosts_for(cluster, decode_ranks, "measured_decode_ranks")
    first, place = divmod(engines - 1, on_host)
    free = (place + 1) * prefill_ranks  # behind the last engine: a host may hold GPUs that no engine fills
    if free + decode_ranks > per_host:
        first, free = first + 1, 0
    if first + hosts > cluster.num_hosts:
        raise fit.UnfitError(
            f"{cluster.num_hosts} hosts on {cluster.key}", f"{first + hosts}, {first} of them for prefill",
            "Lower measured_prefill_engines or measured_decode_ranks",
        )  # fmt: skip
    decode = launch.server(
        cluster, model=recipe.model_id, num_ranks=decode_ranks, gpus_per_rank=1,
        arguments=(*recipe.arguments("decode"), "--max-num-seqs", str(max_seqs)),
        environment=recipe.variables("decode") | _side_channel(cluster, first, engines * prefill_ranks),
        role="decode", parameter="measured_decode_ranks", first_host=first, port=DECODE_PORT,
        rpc_port=_RPC_PORT + engines, gpus=None if hosts > 1 else range(free, free + decode_ranks),
    )  # fmt: skip
    decode_urls = [launch.url(cluster, first + host, DECODE_PORT) for host in range(hosts)]
    return prefill, _with_own_addresses(cluster, list(decode)), urls, decode_urls


def _with_own_addresses(cluster: Cluster, processes: list[Process]) -> list[Process]:
    """Each host of an engine names its own address to the others."""
    return [
        dataclasses.replace(
            process,
            environment=dict(process.environment)
            | {"VLLM_NIXL_SIDE_CHANNEL_HOST": cluster.address(process.host_index)},
        )
        for process in processes
    ]


def _side_channel(cluster: Cluster, host: int, offset: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": cluster.address(host),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_CHANNEL_PORT + offset),
    }


def _router(recipe: Recipe, prefill_urls: list[str], decode_urls: list[str]) -> Process:
    if not recipe.router:
        raise fit.UnfitError(
            f"no router in {recipe.file}", "a command between clients and engines", f"Add router to {recipe.file}"
        )
    words: list[str] = []
    for word in recipe.router:
        if word == "PREFILL_URLS":
            words += [part for url in prefill_urls for part in ("--prefill", url)]
        elif word == "DECODE_URLS":
            words += [part for url in decode_urls for part in ("--decode", url)]
        else:
            words.append(word)
    return Process("router", tuple(words))


def _clients(settings: Settings, recipe: Recipe, cluster: Cluster, loads: list[int]) -> tuple[tuple[Process], ...]:
    """The runs one after the other: all loads, then all again, each with prompts that no earlier run has sent."""
    block = TIMED_BLOCK_TOKENS
    if Path(settings.workload_path).is_file():
        block = tokens_per_id(Path(settings.workload_path))
    order = [(repeat, load) for repeat in range(1, settings.measured_repeats + 1) for load in loads]
    return tuple(
        (_client(settings, recipe, cluster, load, repeat, seed, block),) for seed, (repeat, load) in enumerate(order)
    )


def _client(
    settings: Settings, recipe: Recipe, cluster: Cluster, concurrency: int, repeat: int, seed: int, block: int
) -> Process:
    words = (
        "bench", "serve", "--base-url", f"http://127.0.0.1:{ROUTER_PORT}", "--model", recipe.model_id,
        "--dataset-name", "timed_trace", "--dataset-path", settings.workload_path or WORKLOAD, "--no-self-timed",
        "--timed-trace-chunk-hash-size", str(block), "--seed", str(seed),
        "--max-concurrency", str(concurrency), "--num-prompts", str(4 * concurrency), "--goodput", *_GOODPUT,
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99",
        "--save-result", "--save-detailed", "--result-dir", RUN_FOLDER,
        "--result-filename", f"served-c{concurrency}-{repeat}.json",
    )  # fmt: skip
    variables = serving.client_environment(cluster, recipe) | bench.trace_variables(seed)
    return launch.client(cluster, words, variables)
