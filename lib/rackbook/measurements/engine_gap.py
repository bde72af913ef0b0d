"""08 measured: the step of a running engine, and the forward pass of the same batch or what comes nearest to it."""

from __future__ import annotations

import dataclasses

import polars as pl
from pydantic import BaseModel

from rackbook import clusters, plans, runs
from rackbook.engine import checks, forward_run
from rackbook.engine.lab import Lab
from rackbook.engine.plan import Plan
from rackbook.errors import RackbookError
from rackbook.intervals import mean_interval
from rackbook.measurements import server_lines, serving, single_node
from rackbook.measurements.recording import recorded, say
from rackbook.runs import Recorder, Run
from rackbook.tables import schema

TOPIC = "engine_gap"

NO_CPU_TIME = "host work by itself was not measured"


def measure(params: BaseModel, *, lab: Lab | None = None) -> Run:
    """Measure pairs of an engine's step and a forward pass and keep them as a run.

    Args:
        params: parameters of notebook 08.
        lab: the CPU lab, where that is the cluster; the usual one if None.

    Returns:
        The run, with the tables points (table ``engine_pairs``), runs (one row per run of the client), steps (one row
        per iteration of the engine, where it logs them), those of :func:`rackbook.measurements.server_lines.keep` and,
        on GPUs, forward.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a process failed; what was measured until then stays in an unfinished run.
    """
    cluster = clusters.cluster(params.cluster)
    plan = plans.plan(TOPIC, params, cluster)
    python = single_node.prepared(cluster, lab)
    found = checks.check(plan)
    with recorded(TOPIC, params, params.cluster, python) as run:
        run.describe(vllm=found["version"])
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        seen = serving.follow(serving.ready(plan, run, lab), run)
        run.write_points(seen.runs, "runs")
        if not seen.steps.is_empty():  # several API servers log none
            run.write_points(seen.steps, "steps")
        server_lines.keep(plan, run)
        forward = lab_forward(seen) if cluster.is_lab else gpu_forward(plan, run)
        found_pairs = pairs(plan, seen, forward)
        run.write_points(found_pairs)
        for doubt in (*doubts(seen.runs), *apart(found_pairs)):
            run.flag(doubt)
    return runs.read(run.folder.with_name(run.id))


def engine_step_ms(rows: pl.DataFrame) -> dict[str, float]:
    """The engine's step by stage: time per output token × tokens per step, mean over the client's runs.

    With speculative decoding a step gives as many tokens as are accepted, and one without it.

    Args:
        rows: client runs, with bench_stage, tpot_ms and acceptance_length.

    Raises:
        RackbookError: a run has no time per output token.
    """
    missing = rows.filter(pl.col("tpot_ms").is_null())
    if not missing.is_empty():
        raise RackbookError(f"{missing['bench_stage'][0]}: no time per output token: {missing['missing_reason'][0]}")
    step = pl.col("tpot_ms") * pl.col("acceptance_length").fill_null(1.0)
    return {
        str(stage): mean_interval(group.select(step).to_series().to_list()).estimate
        for (stage,), group in rows.group_by("bench_stage", maintain_order=True)
    }


def lab_forward(seen: serving.Found) -> dict[str, float]:
    """What comes nearest to a forward pass on the CPU lab: the iteration by the engine's own clock, by stage.

    It runs from the start of the model's execution to its result in the engine core, so it holds sampling and the way
    to the worker and back as well: an upper bound of the forward pass. The mean over repeats of the median step that
    only decodes, with as many requests as the client keeps under way.

    Raises:
        RackbookError: no such step was logged.
    """
    whole = seen.steps.filter(
        (pl.col("num_prefill_tokens") == 0)
        & (pl.col("num_decode_requests") == pl.col("concurrency"))
        & ~pl.col("dummy_step")
    )
    if whole.is_empty():
        raise RackbookError(
            f"the engine logged {seen.steps.height} iterations, none of which decodes all requests and nothing else"
        )
    medians = whole.group_by("bench_stage", "repeat", maintain_order=True).agg(pl.col("step_ms").median())
    means = medians.group_by("bench_stage", maintain_order=True).agg(pl.col("step_ms").mean())
    return dict(means.iter_rows())


def doubts(rows: pl.DataFrame) -> list[str]:
    """Stages whose client runs disagree about the time per output token, or that had one run."""
    found = []
    for (stage,), group in rows.group_by("bench_stage", maintain_order=True):
        interval = mean_interval(group["tpot_ms"].to_list())
        if interval.high is None:
            found.append(f"{stage}: one run of the client, its spread is not known")
        elif interval.high - interval.estimate > single_node.UNSTABLE * interval.estimate:
            half = interval.high - interval.estimate
            found.append(f"{stage}: {interval.estimate:.2f} ± {half:.2f} ms per output token, limit ± 20 %")
    return found


def apart(found: pl.DataFrame) -> list[str]:
    """Pairs whose two steps cannot be of one batch on one machine: the part took longer than the whole.

    Args:
        found: of :func:`pairs`.
    """
    return [
        f"{row['setting']}: the forward pass took {row['forward_ms']:.2f} ms and the engine's step "
        f"{row['engine_ms']:.2f} ms, so they were not measured under the same conditions"
        for row in found.filter(pl.col("forward_ms") > pl.col("engine_ms")).iter_rows(named=True)
    ]


def gpu_forward(plan: Plan, run: Recorder) -> dict[str, float]:
    """The bare forward pass by the stage of the server it belongs to, from ``vllm bench forward``."""
    bare = dataclasses.replace(plan, stages=tuple(stage for stage in plan.stages if not stage.services))
    timed = forward_run.measure(bare, run, say)
    run.write_points(timed, "forward")
    return {row["bench_stage"].replace("bare_", "served_"): row["forward_ms"] for row in timed.iter_rows(named=True)}


def pairs(plan: Plan, seen: serving.Found, forward: dict[str, float]) -> pl.DataFrame:
    """The pairs, as rows of the table ``engine_pairs``.

    Args:
        plan: what ran.
        seen: of its servers and clients.
        forward: forward pass in ms, by the stage of the server.
    """
    place = single_node.place(plan)
    kind = "the engine's own iteration time for the forward pass" if plan.cluster.is_lab else "vllm bench forward"
    rows = []
    for stage, engine_ms in engine_step_ms(seen.runs).items():
        load = seen.runs.filter(pl.col("bench_stage") == stage).row(0, named=True)
        rows.append(
            {
                "setting": f"{stage.removeprefix('served_').upper()}, {load['concurrency']} requests, "
                f"{load['input_tokens']:,} tokens",
                "hardware": place["hardware"],
                "model": place["model"],
                "forward_ms": forward[stage],
                "engine_ms": engine_ms,
                "cpu_ms": None,
                "origin": "measured",
                "source": "run",
                "locator": kind,
                "missing_reason": NO_CPU_TIME,
            }
        )
    return schema("engine_pairs").frame(rows)
