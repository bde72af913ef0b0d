"""09 measured: prefill and decode engines behind a router, under the requests of a trace."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from pydantic import BaseModel

from rackbook import clusters, plans, runs
from rackbook.engine import checks
from rackbook.engine.plan import Plan
from rackbook.errors import ParameterError
from rackbook.locations import shown
from rackbook.measurements import serving, single_node
from rackbook.measurements.recording import interpreter, recorded
from rackbook.runs import Run
from rackbook.tables import column

TOPIC = "serving_pareto"

COUNTED = "input, cached prefix included, and output"
"""What ``bench serve`` counts in its total throughput: the prompts as sent, and the answers."""

WORKLOAD = "TRACE"


def measure(params: BaseModel) -> Run:
    """Measure what the notebook's parameters ask for and keep it as a run.

    Returns:
        The run, with the tables points (table ``serving_pareto``), loads (table ``serving_measured``) and runs (one row
        per run of the client).

    Raises:
        ParameterError: no workload.
        UnfitError: the cluster cannot do it.
        RackbookError: a server or the client failed; what was measured until then stays in an unfinished run.
    """
    cluster = clusters.cluster(params.cluster)
    plan = plans.plan(TOPIC, params, cluster)
    workload = Path(params.workload_path)
    if not workload.is_file():
        raise ParameterError(
            f"workload_path: got {shown(workload) if params.workload_path else 'nothing'}, allowed: a file of requests "
            "as `vllm bench serve` reads timed_trace; the published workload is not public"
        )
    found = checks.check(plan)
    with recorded(TOPIC, params, params.cluster, interpreter(cluster)) as run:
        run.describe(vllm=found["version"])
        run.write_text("plan.txt", plan.text() + "\n")
        seen = serving.follow(serving.ready(plan, run), run)
        run.write_points(seen.runs, "runs")
        run.write_points(single_node.points(plan, seen.runs), "loads")
        run.write_points(points(plan, seen.runs, workload.stem))
    return runs.read(run.folder.with_name(run.id))


def points(plan: Plan, rows: pl.DataFrame, workload: str) -> pl.DataFrame:
    """Each run of the client as a row of the table ``serving_pareto``.

    Throughput is per GPU of all engines, prefill and decode. Interactivity is 1000 ÷ TPOT, its P90 the slow tail:
    1000 ÷ the 90th percentile of TPOT.

    Args:
        plan: what ran.
        rows: of :func:`rackbook.measurements.serving.follow`.
        workload: name of the trace.
    """
    services = plan.stages[0].services
    prefill = {process.arguments[process.arguments.index("--port") + 1] for process in services
               if process.role == "prefill" and "--port" in process.arguments}  # fmt: skip
    decode = next(process for process in services if process.role == "decode")
    ranks = int(decode.arguments[decode.arguments.index("--data-parallel-size") + 1])
    seats = int(decode.arguments[decode.arguments.index("--max-num-seqs") + 1])
    place = single_node.place(plan)
    found = [
        {
            "engine": single_node.ENGINE,
            "hardware": place["hardware"],
            "model": place["model"],
            "workload": workload,
            "setting": f"{len(prefill)} prefill engines, decode DEP{ranks}",
            "num_prefill_engines": len(prefill),
            "num_decode_engines": 1,
            "ep_size": ranks,
            "concurrency": row["concurrency"],
            "batch_cap": seats,
            "acceptance_length": row["acceptance_length"],
            "tokens_counted": COUNTED,
            "approximate": False,
            "total_tok_per_s_per_gpu": _per(row["total_tok_per_s"], place["num_gpus"]),
            "interactivity_p90_tok_per_s": None if row["tpot_p90_ms"] is None else 1e3 / row["tpot_p90_ms"],
            "ttft_p90_s": row["ttft_p90_s"],
            "missing_reason": row["missing_reason"],
        }
        for row in rows.iter_rows(named=True)
    ]
    return pl.DataFrame(found, schema={name: column(name).dtype for name in found[0]}, orient="row")


def _per(value: float | None, count: int) -> float | None:
    return None if value is None else value / count
