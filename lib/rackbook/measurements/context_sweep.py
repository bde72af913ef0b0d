"""01 measured: the decode step of one batch at several context lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import polars as pl

from rackbook import clusters, plans, runs
from rackbook.clusters import Cluster
from rackbook.engine import checks, decode_steps, forward_run, lab_settings
from rackbook.engine.decode_steps import Batch
from rackbook.engine.fit import UnfitError
from rackbook.engine.lab import Lab
from rackbook.engine.server import Server
from rackbook.errors import ParameterError
from rackbook.intervals import mean_interval
from rackbook.measurements import serving
from rackbook.measurements.recording import LAB_HARDWARE, LAB_MODEL, interpreter, keep_server, recorded, say
from rackbook.runs import Run
from rackbook.tables import column

TOPIC = "context_sweep"

UNSTABLE = 0.2
"""Half the interval over repeats ÷ their mean, above which a point is flagged."""

_VOCABULARY = 1024


class Wanted(Protocol):
    """The parameters of notebook 01 that concern the measurement."""

    cluster: str
    measured_contexts: list[int]
    measured_requests_per_rank: int
    measured_ranks: int | None
    measured_draft_tokens: int
    confidence: float


@dataclass(frozen=True)
class Sweep:
    """What is measured on a server.

    Attributes:
        context_tokens: context lengths.
        requests_per_rank: requests that decode at once on each rank.
        num_ranks: data-parallel ranks.
        steps: decode steps per batch.
        repeats: batches per context, each with prompts of its own.
        seed: of the first batch's prompts.
        confidence: coverage of the intervals over repeats.
    """

    context_tokens: Sequence[int]
    requests_per_rank: int
    num_ranks: int = 1
    steps: int = 48
    repeats: int = 5
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not self.context_tokens or len(set(self.context_tokens)) < len(self.context_tokens):
            raise ParameterError(f"measured_contexts: got {list(self.context_tokens)}, allowed: different lengths")


def measure(params: Wanted) -> Run:
    """Measure what the notebook's parameters ask for and keep it as a run.

    On GPUs ``vllm bench forward`` times the forward pass; on the CPU lab, where that does not run, a server decodes and
    its own iteration log gives the step.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: it failed on the way; what was measured until then stays in an unfinished run.
    """
    where = clusters.cluster(params.cluster)
    if where.is_lab:
        return on_lab(params)
    return on_gpus(params, where)


def on_gpus(params: Wanted, cluster: Cluster) -> Run:
    """Time the batches with ``vllm bench forward``.

    Returns:
        The run, with the tables points and forward, the latter as :func:`rackbook.engine.forward_run.measure` gives it.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a process failed, or wrote something else than its result.
    """
    plan = plans.plan(TOPIC, params, cluster)
    found = checks.check(plan)
    with recorded(TOPIC, params, params.cluster, interpreter(cluster), found["elsewhere"]) as run:
        run.describe(vllm=found["version"])
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        timed = forward_run.measure(plan, run, say)
        run.write_points(timed, "forward")
        run.write_points(points_of_forward(timed))
    return runs.read(run.folder.with_name(run.id))


def points_of_forward(timed: pl.DataFrame) -> pl.DataFrame:
    """What ``bench forward`` timed, as points of the sweep; one run of it has no interval over repeats."""
    names = ("hardware", "model", "ep_size", "requests_per_rank", "draft_tokens", "timing_scope", "context_tokens")
    return timed.select(
        *names,
        pl.col("forward_ms").alias("step_ms"),
        pl.lit(None, pl.Float64).alias("step_low_ms"),
        pl.lit(None, pl.Float64).alias("step_high_ms"),
        pl.lit(1, pl.Int64).alias("repeats"),
        pl.col("num_replays").alias("num_steps"),
        pl.format(
            "one run has no interval; its samples spread by {} %", pl.col("sample_spread_percent").round(2)
        ).alias("missing_reason"),
    )


def on_lab(params: Wanted, *, lab: Lab | None = None, steps: int = 32, repeats: int = 5) -> Run:
    """Sweep the context on the CPU lab.

    Args:
        params: parameters of the notebook, kept with the run.
        lab: the lab; installed first if it is not.
        steps: decode steps per batch.
        repeats: batches per context.

    Returns:
        The run, with the tables points and steps.

    Raises:
        UnfitError: the lab has no drafter, or too small a KV cache.
        RackbookError: the lab or the server fails.
    """
    sweep = Sweep(
        params.measured_contexts, params.measured_requests_per_rank, params.measured_ranks or 1, steps, repeats,
        confidence=params.confidence,
    )  # fmt: skip
    plan = plans.plan(TOPIC, params, params.cluster)
    lab = lab or Lab()
    longest = max(sweep.context_tokens) + sweep.steps + 1
    model = lab.model(context_tokens=_room(longest), vocabulary=_VOCABULARY)
    _fit_lab(sweep.requests_per_rank * longest, kv_bytes_per_token(model))
    lab.install(say)
    checks.check(plan)
    with recorded(TOPIC, params, params.cluster, lab.python) as run:
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_json("effective.json", plan.effective)
        ready, log = serving.ready(plan, run, lab, model), run.raw("server.full.log")
        (stage,) = ready.stages
        with serving.start(stage, ready, run, log) as server:
            steps_found = sweep_server(server, sweep)
            run.write_points(steps_found, "steps")
        keep_server(run, log)
        found = points(steps_found, sweep, hardware=LAB_HARDWARE, model=LAB_MODEL)
        run.write_points(found)
        for doubt in doubts(found):
            run.flag(doubt)
    return runs.read(run.folder.with_name(run.id))


def kv_bytes_per_token(model: Path) -> int:
    """KV cache of one token, from a model's ``config.json``: keys and values of every layer, 2 bytes an element."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 2


def _fit_lab(kv_tokens: int, kv_bytes_per_token: int) -> None:
    room = lab_settings.KV_CACHE_GIB * 2**30 // kv_bytes_per_token
    if kv_tokens > room:
        raise UnfitError(
            f"room for {room:,} tokens in the lab's KV cache of {lab_settings.KV_CACHE_GIB} GiB",
            f"{kv_tokens:,} tokens on a rank",
            "Lower measured_contexts or measured_requests_per_rank",
        )


def sweep_server(server: Server, sweep: Sweep) -> pl.DataFrame:
    """Decode every batch; the order runs through all contexts before it repeats.

    Returns:
        repeat, context_tokens, rank, iteration, num_decode_requests, step_ms: one row per step and rank that decoded
        the whole batch and nothing else. A first, unmeasured batch of the shortest context warms the server up.

    Raises:
        RackbookError: a request fails, the server ended, or its log has no such step.
    """
    contexts = sorted(sweep.context_tokens)
    frames, seed = [], sweep.seed
    for repeat in range(sweep.repeats + 1):
        for tokens in contexts if repeat else contexts[:1]:
            say(f"context {tokens:,} tokens, " + (f"repeat {repeat} of {sweep.repeats}" if repeat else "warm-up"))
            batch = Batch(sweep.requests_per_rank, tokens, sweep.steps, sweep.num_ranks)
            server.check()
            found = decode_steps.measure(
                server.base_url, server.model, server.log_path, batch, vocabulary=_VOCABULARY, seed=seed
            )
            seed += 1
            if repeat:
                frames.append(found.with_columns(repeat=pl.lit(repeat), context_tokens=pl.lit(tokens)))
    names = ("repeat", "context_tokens", "rank", "iteration", "num_decode_requests", "step_ms")
    return pl.concat(frames).select(pl.col(name).cast(column(name).dtype) for name in names)


def points(steps: pl.DataFrame, sweep: Sweep, *, hardware: str, model: str) -> pl.DataFrame:
    """One point per context: the mean over repeats of the median step, with Student's t interval over repeats.

    The median keeps a stalled step from standing for its batch; the interval is over repeats, because steps of one
    batch are not independent.

    Args:
        steps: of :func:`sweep_server`.
        sweep: what was measured.
        hardware: for the column.
        model: for the column.

    Returns:
        Columns of the table ``context_sweep_measured``; ``num_steps`` counts those of one rank.
    """
    rows = []
    for (tokens,), group in steps.sort("context_tokens", "repeat").group_by("context_tokens", maintain_order=True):
        medians = group.group_by("repeat", maintain_order=True).agg(pl.col("step_ms").median())["step_ms"]
        interval = mean_interval(medians.to_list(), sweep.confidence)
        rows.append(
            {
                "hardware": hardware,
                "model": model,
                "ep_size": sweep.num_ranks,
                "requests_per_rank": sweep.requests_per_rank,
                "draft_tokens": 0,
                "timing_scope": "target_only",
                "context_tokens": tokens,
                "step_ms": interval.estimate,
                "step_low_ms": interval.low,
                "step_high_ms": interval.high,
                "repeats": interval.num_values,
                "num_steps": group.height // sweep.num_ranks,
                "missing_reason": "one repeat has no interval" if interval.low is None else None,
            }
        )
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in rows[0]}, orient="row")


def doubts(points: pl.DataFrame) -> list[str]:
    """Contexts whose repeats disagree, or that were measured once."""
    found = []
    for row in points.iter_rows(named=True):
        at = f"context {row['context_tokens']:,} tokens"
        if row["step_low_ms"] is None:
            found.append(f"{at}: one repeat, its spread is not known")
        elif (row["step_high_ms"] - row["step_low_ms"]) / 2 > UNSTABLE * row["step_ms"]:
            half = (row["step_high_ms"] - row["step_low_ms"]) / 2
            found.append(f"{at}: {row['step_ms']:.2f} ± {half:.2f} ms over {row['repeats']} repeats, limit ± 20 %")
    return found


def _room(tokens: int) -> int:
    """The next power of two: few different models, so few files in the cache."""
    return 1 << (tokens - 1).bit_length()
