"""06 measured: which experts a real server's router chose, from its own record or from its answers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl

from rackbook import catalog, clusters, plans, provenance, runs
from rackbook.clusters import Cluster
from rackbook.engine import checks, logs
from rackbook.engine.completions import complete_together, random_prompts
from rackbook.engine.lab import Lab
from rackbook.errors import RackbookError
from rackbook.experts.loads import LOADS, Loads
from rackbook.importers import routed_experts
from rackbook.measurements import serving
from rackbook.measurements.recording import interpreter, keep_server, recorded, say
from rackbook.plans.expert_balance import LAB_OUTPUT_TOKENS, LAB_PROMPT_TOKENS, LAB_REQUESTS, ROUTED
from rackbook.runs import Recorder, Run

TOPIC = "expert_balance"

LAB_SHAPE = {"layers": 4, "experts": 16, "top_k": 2}

_VOCABULARY = 1024


class Wanted(Protocol):
    """The parameters of notebook 06 that are read here; its plan reads the others."""

    cluster: str
    seed: int


def measure(params: Wanted) -> Run:
    """Keep which experts a server's router chose as a run: the lab's by its plugin, on GPUs by the server's answers.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a server fails.
    """
    where = clusters.cluster(params.cluster)
    if where.is_lab:
        return on_lab(params)
    return on_gpus(params, where)


def on_gpus(params: Wanted, cluster: Cluster) -> Run:
    """Log the balance with EPLB and without, then let a third server return the routed experts of one decode batch.

    Random prompts route otherwise than real ones.

    Returns:
        The run, with the tables runs (of the clients) and eplb (lines of the servers' logs), and the file
        :data:`~rackbook.experts.loads.LOADS`.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a server or a client failed; what was measured until then stays in an unfinished run.
    """
    plan = plans.plan(TOPIC, params, cluster)
    found = checks.check(plan)
    requests, prompt_tokens, output_tokens = (
        plan.effective[f"measured_routed_{what}"] for what in ("requests", "input_tokens", "output_tokens")
    )
    prompts = random_prompts(requests, prompt_tokens, checks.vocabulary(plan), params.seed)
    num_experts = catalog.model(str(plan.recipe.model)).experts.num_routed.known
    with recorded(TOPIC, params, params.cluster, interpreter(cluster)) as run:
        run.describe(vllm=found["version"], left_out=list(plan.notes))
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        ready = serving.ready(plan, run)
        run.write_points(serving.follow(ready, run).runs, "runs")
        run.write_points(logged(run.folder), "eplb")
        with serving.start(ready.stage(ROUTED), ready, run, run.raw(f"{ROUTED}.server.full.log")) as server:
            answers = complete_together(server.base_url, server.model, prompts, output_tokens)
        contents = [answer.content for answer in answers]
        loads = routed_experts.read_answers(contents, num_experts=num_experts, where="answers")
        _keep(run, loads, requests)
        for process in server.processes:
            keep_server(run, process.log, f"{ROUTED}.{process.name}.log")
    return runs.read(run.folder.with_name(run.id))


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
        The run, with the file :data:`~rackbook.experts.loads.LOADS` and the points layer, expert, expert_tokens (over
        all steps).

    Raises:
        DataError: the record lost tokens, see :func:`rackbook.experts.loads.checked`.
        RackbookError: the lab or the server fails.
    """
    plan = plans.plan(TOPIC, params, params.cluster)
    lab = (lab or Lab()).install(say)
    found = checks.check(plan)
    model = lab.model(vocabulary=_VOCABULARY, **LAB_SHAPE)
    with runs.record(TOPIC, params, machine=provenance.machine(lab.python)) as run:
        run.describe(cluster=Path(params.cluster).stem, vllm=found["version"])
        run.write_text("plan.txt", plan.text() + "\n")
        sent = {"measured_routed_requests": requests, "measured_routed_output_tokens": output_tokens}
        run.write_json("effective.json", {**plan.effective, **sent})
        ready, log = serving.ready(plan, run, lab, model), run.raw("server.full.log")
        (stage,) = ready.stages
        with serving.start(stage, ready, run, log) as server:
            prompts = random_prompts(requests, LAB_PROMPT_TOKENS, _VOCABULARY, params.seed)
            answers = complete_together(server.base_url, server.model, prompts, output_tokens)
        loads = routed_experts.read_folder(run.folder / ROUTED)
        check_tokens(loads, [(a.prompt_tokens, a.output_tokens) for a in answers])
        _keep(run, loads, requests)
        keep_server(run, log)
        shutil.rmtree(run.folder / ROUTED)
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
