"""11 measured: one user's rate on a server whose GPUs share every weight, with the specialised decode and without."""

from __future__ import annotations

import polars as pl
from pydantic import BaseModel

from rackbook import clusters, plans, runs
from rackbook.engine import checks
from rackbook.intervals import mean_interval
from rackbook.measurements import server_lines, serving, single_node
from rackbook.measurements.recording import interpreter, recorded
from rackbook.runs import Run
from rackbook.tables import schema

TOPIC = "single_user"


def measure(params: BaseModel) -> Run:
    """Measure what the notebook's parameters ask for and keep it as a run.

    Args:
        params: parameters of notebook 11.

    Returns:
        The run, with the tables points (table ``single_user_measured``), runs (one row per run of the client), and
        those of :func:`rackbook.measurements.server_lines.keep`.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a server or a client failed; what was measured until then stays in an unfinished run.
    """
    cluster = clusters.cluster(params.cluster)
    plan = plans.plan(TOPIC, params, cluster)
    version = checks.check(plan)["version"]
    with recorded(TOPIC, params, params.cluster, interpreter(cluster)) as run:
        run.describe(vllm=version, left_out=list(plan.notes))
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        seen = serving.follow(serving.ready(plan, run), run)
        rows = seen.runs.with_columns(
            pl.lit(value, pl.Int64 if name == "num_gpus" else pl.String).alias(name)
            for name, value in single_node.place(plan).items()
        )
        run.write_points(rows, "runs")
        server_lines.keep(plan, run)
        found = points(rows)
        run.write_points(found)
        for doubt in doubts(found):
            run.flag(doubt)
    return runs.read(run.folder.with_name(run.id))


def points(rows: pl.DataFrame, confidence: float = 0.95) -> pl.DataFrame:
    """One row per server: the user's rate over the runs, with Student's t interval over them.

    The rate is one over the mean time per output token of a run; its slow tail is one over the P90 of that time.

    Args:
        rows: client runs, with bench_stage, hardware, model, num_gpus, concurrency, tpot_ms, tpot_p90_ms and
            acceptance_length.
        confidence: coverage of the intervals.

    Returns:
        Table ``single_user_measured`` but for its origin.
    """
    found = []
    for (stage,), group in rows.group_by("bench_stage", maintain_order=True):
        first = group.row(0, named=True)
        whole = group.drop_nulls("tpot_ms")
        row = {name: first[name] for name in ("hardware", "model", "num_gpus", "concurrency")}
        row |= {"bench_stage": stage, "repeats": group.height, "num_failed": group["num_failed"].sum()}
        reasons = sorted({reason for reason in group["missing_reason"] if reason})
        if whole.height < group.height:
            row |= dict.fromkeys(_VALUES)
            reasons.append("not every run has a time per output token")
        else:
            interval = mean_interval([1e3 / each for each in whole["tpot_ms"]], confidence)
            slow = [1e3 / each for each in whole["tpot_p90_ms"].drop_nulls()]
            row |= {
                "user_tok_per_s": interval.estimate,
                "user_low_tok_per_s": interval.low,
                "user_high_tok_per_s": interval.high,
                "user_slow_tail_tok_per_s": sum(slow) / len(slow) if slow else None,
                "acceptance_length": group["acceptance_length"].mean(),
            }
        if any(row[name] is None for name in _VALUES) and not reasons:
            reasons.append("one run has no interval" if group.height < 2 else "not reported")
        found.append(row | {"missing_reason": "; ".join(reasons) or None})
    names = [c.name for c in schema("single_user_measured").columns if c.name in found[0]]
    return pl.DataFrame(found, infer_schema_length=None).select(names)


def doubts(points: pl.DataFrame) -> list[str]:
    """Servers whose runs disagree about the user's rate, or that had one run.

    Args:
        points: of :func:`points`.
    """
    found = []
    for row in points.iter_rows(named=True):
        stage, rate, high = row["bench_stage"], row["user_tok_per_s"], row["user_high_tok_per_s"]
        if rate is not None and high is None:
            found.append(f"{stage}: one run, its spread is not known")
        elif rate is not None and high - rate > single_node.UNSTABLE * rate:
            found.append(f"{stage}: {rate:.1f} ± {high - rate:.1f} tokens/s over {row['repeats']} runs, limit ± 20 %")
    return found


_VALUES = (
    "user_tok_per_s", "user_low_tok_per_s", "user_high_tok_per_s", "user_slow_tail_tok_per_s", "acceptance_length",
)  # fmt: skip
