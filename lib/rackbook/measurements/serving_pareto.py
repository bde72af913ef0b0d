"""09 measured: prefill and decode engines behind a router, under the requests of a trace."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from pydantic import BaseModel

from rackbook import clusters, plans, runs
from rackbook.engine import bench, bench_runs, checks
from rackbook.engine.plan import Plan
from rackbook.errors import ParameterError
from rackbook.locations import shown
from rackbook.measurements import server_lines, serving, single_node
from rackbook.measurements.recording import interpreter, recorded
from rackbook.plans.serving_pareto import tokens_per_id
from rackbook.replay import trace_files
from rackbook.replay.traces import Trace
from rackbook.runs import Run
from rackbook.tables import column

TOPIC = "serving_pareto"

COUNTED = "input, cached prefix included, and output"
"""What ``bench serve`` counts in its total throughput: the prompts as sent, and the answers."""


def measure(params: BaseModel) -> Run:
    """Measure what the notebook's parameters ask for and keep it as a run.

    Returns:
        The run, with the tables points (table ``serving_pareto``), loads (table ``serving_measured``), runs (one row
        per run of the client), and those of :func:`rackbook.measurements.server_lines.keep`.

    Raises:
        ParameterError: no workload, or one with too few requests.
        DataError: a workload that is no trace.
        UnfitError: the cluster cannot do it.
        RackbookError: a server or the client failed; what was measured until then stays in an unfinished run.
    """
    cluster = clusters.cluster(params.cluster)
    plan = plans.plan(TOPIC, params, cluster)
    workload = Path(params.workload_path)
    trace = requests(workload, plan)
    found = checks.check(plan)
    with recorded(TOPIC, params, params.cluster, interpreter(cluster)) as run:
        run.describe(vllm=found["version"])
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        seen = serving.follow(serving.ready(plan, run), run)
        run.write_points(seen.runs, "runs")
        server_lines.keep(plan, run)
        loads = single_node.points(plan, seen.runs)
        run.write_points(loads, "loads")
        run.write_points(points(plan, seen.runs, workload.stem))
        for doubt in (*single_node.doubts(loads), *warm(seen.runs, trace)):
            run.flag(doubt)
    return runs.read(run.folder.with_name(run.id))


def requests(workload: Path, plan: Plan) -> Trace:
    """The requests that the clients of a plan send.

    Raises:
        ParameterError: no file, or fewer requests than the plan's largest number of clients needs.
        DataError: a file of another form.
    """
    if not workload.is_file():
        raise ParameterError(
            f"workload_path: got {shown(workload) if workload.name else 'nothing'}, allowed: a file of requests "
            "as `vllm bench serve` reads timed_trace; the published workload is not public"
        )
    trace = trace_files.read_timed(workload, block_tokens=tokens_per_id(workload))
    needed = max(bench.asked(process.command).load.num_prompts for step in plan.stages[0].steps for process in step)
    if trace.requests.height < needed:
        raise ParameterError(
            f"workload_path: got {trace.requests.height} requests in {shown(workload)}, allowed: at least {needed}, "
            "four for each client; lower measured_concurrency or give a longer trace"
        )
    return trace


def warm(rows: pl.DataFrame, trace: Trace) -> list[str]:
    """Runs of the client that found more in the prefix cache than the trace itself repeats.

    Args:
        rows: of :func:`rackbook.measurements.serving.follow`.
        trace: what was sent; its known prefixes are what an endless cache hits that was empty at the start.
    """
    found = []
    for row in rows.iter_rows(named=True):
        sent = trace.head(row["num_prompts"]).requests
        own = 100 * sent["cached_tokens"].sum() / sent["input_tokens"].sum()
        hits = row["prefix_hit_percent"]
        if hits is not None and hits > own + bench_runs.HIT_MARGIN_PERCENT:
            found.append(
                f"{row['bench_stage']}, {row['concurrency']} at once, repeat {row['repeat']}: {hits:.0f} % of the "
                f"prompt tokens came from the prefix cache, the trace itself repeats {own:.0f} %"
            )
    return found


def points(plan: Plan, rows: pl.DataFrame, workload: str) -> pl.DataFrame:
    """Each number of clients as a row of the table ``serving_pareto``, the mean of its runs.

    Throughput is per GPU of all engines, prefill and decode. Interactivity is 1000 ÷ TPOT, its P90 the slow tail:
    1000 ÷ the 90th percentile of TPOT in a run.

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
    found = []
    for (concurrency,), group in rows.group_by("concurrency", maintain_order=True):
        reasons = {reason for reason in group["missing_reason"] if reason}
        values = {
            "acceptance_length": _mean(group["acceptance_length"]),
            "total_tok_per_s_per_gpu": _mean(group["total_tok_per_s"] / place["num_gpus"]),
            "interactivity_p90_tok_per_s": _mean(1e3 / group["tpot_p90_ms"]),
            "ttft_p90_s": _mean(group["ttft_p90_s"]),
        }
        found.append(
            {
                "engine": single_node.ENGINE,
                "hardware": place["hardware"],
                "model": place["model"],
                "workload": workload,
                "setting": f"{len(prefill)} prefill engines, decode DEP{ranks}",
                "num_prefill_engines": len(prefill),
                "num_decode_engines": 1,
                "ep_size": ranks,
                "concurrency": concurrency,
                "batch_cap": seats,
                "tokens_counted": COUNTED,
                "approximate": False,
                "missing_reason": "; ".join(sorted(reasons)) or None,
            }
            | values
        )
    return pl.DataFrame(found, schema={name: column(name).dtype for name in found[0]}, orient="row")


def _mean(values: pl.Series) -> float | None:
    """The mean over runs; None if one of them has no value."""
    return None if values.null_count() else sum(values.to_list()) / len(values)
