"""12 measured: a server under a grid of loads, with CUDA graphs captured to different sizes."""

from __future__ import annotations

from typing import Any

import polars as pl
from pydantic import BaseModel

from rackbook import catalog, clusters, plans, runs
from rackbook.clusters import Cluster
from rackbook.engine import bench_runs, checks
from rackbook.engine.lab import Lab
from rackbook.engine.plan import Plan, Stage
from rackbook.measurements import server_lines, serving
from rackbook.measurements.recording import LAB_HARDWARE, LAB_MODEL, interpreter, recorded, say
from rackbook.runs import Run

TOPIC = "single_node"

ENGINE = "vLLM"

UNSTABLE = 0.2
"""Half the interval over runs ÷ their mean, above which a load is flagged."""


def measure(params: BaseModel, *, lab: Lab | None = None) -> Run:
    """Measure what the notebook's parameters ask for and keep it as a run.

    Args:
        params: parameters of notebook 12.
        lab: the CPU lab, where that is the cluster; the usual one if None.

    Returns:
        The run, with the tables points (table ``serving_measured``), runs (one row per run of the client), and those of
        :func:`rackbook.measurements.server_lines.keep`.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a server or a client failed; what was measured until then stays in an unfinished run.
    """
    cluster = clusters.cluster(params.cluster)
    plan = plans.plan(TOPIC, params, cluster)
    python = prepared(cluster, lab)
    version = checks.check(plan)["version"]
    with recorded(TOPIC, params, params.cluster, python) as run:
        run.describe(vllm=version)
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        seen = serving.follow(serving.ready(plan, run, lab), run)
        run.write_points(_at(plan, seen.runs), "runs")
        server_lines.keep(plan, run)
        found = points(plan, seen.runs)
        run.write_points(found)
        for doubt in doubts(found):
            run.flag(doubt)
    return runs.read(run.folder.with_name(run.id))


def prepared(cluster: Cluster, lab: Lab | None) -> str | None:
    """The Python that has vLLM; installs the lab if that is the cluster."""
    if not cluster.is_lab:
        return interpreter(cluster)
    return str((lab or Lab()).install(say).python)


def points(plan: Plan, rows: pl.DataFrame, confidence: float = 0.95) -> pl.DataFrame:
    """Each load of each stage over its repeats, as rows of the table ``serving_measured``.

    Args:
        plan: what ran.
        rows: of :func:`rackbook.measurements.serving.follow`.
        confidence: coverage of the intervals.
    """
    frames = []
    for stage in plan.stages:
        of_stage = rows.filter(pl.col("bench_stage") == stage.name).drop("bench_stage")
        if not of_stage.is_empty():
            found = bench_runs.summary(of_stage, confidence)
            frames.append(found.with_columns(pl.lit(stage.name).alias("bench_stage"), _capture(stage)))
    return _at(plan, pl.concat(frames)).with_columns(pl.lit(ENGINE).alias("engine"))


def doubts(points: pl.DataFrame) -> list[str]:
    """Loads whose runs disagree, or that were measured once."""
    found = []
    for row in points.iter_rows(named=True):
        lengths = "" if row["input_tokens"] is None else f"{row['input_tokens']} → {row['output_tokens']}, "
        at = f"{row['bench_stage']}, {lengths}{row['concurrency']} at once"
        mean, high = row["output_tok_per_s"], row["output_high_tok_per_s"]
        if mean is not None and high is None:
            found.append(f"{at}: one run, its spread is not known")
        elif mean is not None and high - mean > UNSTABLE * mean:
            found.append(f"{at}: {mean:.1f} ± {high - mean:.1f} tokens/s over {row['repeats']} runs, limit ± 20 %")
    return found


def place(plan: Plan) -> dict[str, Any]:
    """Hardware and model of a plan, in the words of the published tables."""
    if plan.cluster.is_lab:
        return {"hardware": LAB_HARDWARE, "model": LAB_MODEL, "num_gpus": None}
    hardware = catalog.hardware(str(plan.cluster.hardware)).name
    return {"hardware": hardware, "model": plan.recipe.model_name, "num_gpus": plan.num_gpus}


def _at(plan: Plan, rows: pl.DataFrame) -> pl.DataFrame:
    types = {"hardware": pl.String, "model": pl.String, "num_gpus": pl.Int64}
    return rows.with_columns(pl.lit(value, types[name]).alias(name) for name, value in place(plan).items())


def _capture(stage: Stage) -> pl.Expr:
    words = stage.services[0].arguments
    flag = "--max-cudagraph-capture-size"
    value = int(words[words.index(flag) + 1]) if flag in words else None
    return pl.lit(value, pl.Int64).alias("max_capture_tokens")
