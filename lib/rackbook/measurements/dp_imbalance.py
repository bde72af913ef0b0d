"""Mirror and lag replays on a running server, for notebook 05: what is sent where, and what is kept of it.

Two set-ups are measured. In the one engine in question the ranks step together, so a lag may cost something. Separate
servers of one rank each are the control: their ranks do not wait for each other, so it must not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rackbook import runs
from rackbook.errors import DataError
from rackbook.measurements.dp_imbalance_servers import ALONE, TOGETHER, Servers, set_ups
from rackbook.plans.dp_imbalance import LAB_STEP_TOKENS
from rackbook.replay import trace_files, traces
from rackbook.replay.traces import Trace

if TYPE_CHECKING:
    from rackbook.experiments.dp_imbalance import Params
    from rackbook.replay.measurement import Design, Measured
    from rackbook.runs import Recorder, Run

__all__ = ["ALONE", "TOGETHER", "design", "live_trace", "measure", "read_trace"]

TOPIC = "dp_imbalance"
TURNS = 16
"""Requests of a user in closed loop, on average."""

THINK_S = 0.5
"""Mean time from an answer to the same user's next request."""

TIMEOUT_S = 600.0
LATENESS_MS = 5.0
LAB_LENGTH_SCALE = 1 / 256
"""Agent prompts of some 50,000 tokens, cut down to what a CPU computes in a second."""
CONTEXT_TOKENS, LAB_CONTEXT_TOKENS = 262_000, 16_000
"""Longest prompts that are drawn; a little less than the servers that are started here take."""
LAB_LATENESS_MS = 100.0
"""On the lab the client shares the cores with the servers; requests take hundreds of milliseconds there."""

PROBES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0)
"""Lengths of the single prompts, as parts of the tokens that a step may hold."""


def live_trace(params: Params, *, on_lab: bool) -> Trace:
    """The requests: the user's trace, or agent sessions; every answer is one token, so what is measured is prefill.

    Args:
        params: the notebook's.
        on_lab: the agent sessions are cut down to the lab's size; a trace of the user's never is.

    Raises:
        DataError: the trace file is not what it should be.
    """
    num_requests = params.users * TURNS if params.users else params.num_requests
    scale = params.length_scale * (LAB_LENGTH_SCALE if on_lab and not params.trace_path else 1)
    if params.trace_path:
        trace = trace_files.read(params.trace_path).head(num_requests)
    else:
        longest = LAB_CONTEXT_TOKENS if on_lab else CONTEXT_TOKENS
        law = traces.Sessions(max_context_tokens=int(longest / scale))
        trace = traces.agentic(np.random.default_rng([params.seed, 3]), num_requests, sessions=law)
    scaled = trace.scaled(rate=params.rate_scale or 1.0, length=scale)
    return replace(scaled, requests=scaled.requests.with_columns(pl.lit(1, pl.Int64).alias("output_tokens")))


def design(params: Params, trace: Trace, num_ranks: int, step_tokens: int, *, probed: bool) -> Design:
    """What is replayed on a set-up, with probes or without."""
    from rackbook.replay.measurement import Design

    return Design(
        trace=trace,
        num_ranks=num_ranks,
        lag_s=params.lag_s,
        pairs=params.pairs,
        users=params.users,
        think_s=THINK_S,
        seed=params.seed,
        probe_lengths=tuple(sorted({max(1, round(part * step_tokens)) for part in PROBES})) if probed else (),
        step_tokens=step_tokens,
    )


def measure(params: Params) -> Run:
    """Run the experiment and read it back.

    With ``base_url`` the servers are there already: one address, or several with commas between, and after a semicolon
    those of the control, if there are any. Else the servers are started on the cluster.

    Raises:
        ParameterError: parameters that do not fit the servers.
        UnfitError: the cluster cannot do it.
        RackbookError: a server does not start.
        KeyboardInterrupt: by the user; what was measured lies in the unfinished run.
    """
    # Only a measurement needs all this, and a notebook that shows a stored run should not wait for it.
    from rackbook import clusters
    from rackbook.engine.lab import Lab
    from rackbook.measurements.recording import interpreter, recorded, say
    from rackbook.replay import measurement
    from rackbook.replay.targets import Settings

    cluster = clusters.cluster(params.cluster)
    on_lab = cluster.is_lab and not params.base_url
    trace = live_trace(params, on_lab=on_lab)
    step_tokens = min(params.max_num_batched_tokens, LAB_STEP_TOKENS) if on_lab else params.max_num_batched_tokens
    if params.base_url:  # servers that run beside this process already would count as foreign work
        context = runs.record(TOPIC, params)
    else:
        context = recorded(TOPIC, params, params.cluster, Lab().install(say).python if on_lab else interpreter(cluster))
    with context as run:
        trace.requests.select("request", "session", "arrival_s", "input_tokens", "cached_tokens").write_csv(
            run.raw("trace.csv")
        )
        run.write_json(
            "load.json",
            {"trace": trace.name, "origin": trace.origin, "step_tokens": step_tokens, "think_s": THINK_S},
        )
        tables = _Tables(run)
        for servers in set_ups(params, cluster, run, step_tokens, say):
            say(f"{servers.setting}: {servers.num_ranks} ranks at {', '.join(servers.base_urls)}")
            settings = Settings(
                servers.model,
                stream=False,  # an answer is one token
                timeout_s=TIMEOUT_S,
                lateness_limit_ms=LAB_LATENESS_MS if on_lab else LATENESS_MS,
            )
            wanted = design(params, trace, servers.num_ranks, step_tokens, probed=servers.setting == TOGETHER)
            found = measurement.measure(
                wanted, servers.base_urls, settings, log_paths=servers.log_paths, progress=say,
                keep=partial(tables.put, servers),
            )  # fmt: skip
            if found.interrupted:
                raise KeyboardInterrupt
    return runs.read(run.folder.with_name(run.id))


class _Tables:
    """The tables of a run; written anew after every replay, so that a run that ends early keeps what it has."""

    def __init__(self, run: Recorder) -> None:
        self.run = run
        self.parts: dict[str, dict[Servers, pl.DataFrame]] = {}

    def put(self, servers: Servers, found: Measured) -> None:
        """Keep what a set-up gave so far."""
        for flag in found.flags:
            self.run.flag(f"{servers.setting}, {servers.num_ranks} ranks: {flag}")
        doubts = pl.DataFrame(
            {"replay": list(found.doubts), "doubt": list(found.doubts.values())},
            schema={"replay": pl.Int64, "doubt": pl.String},
        )
        replays = found.requests.select("replay", "pair", "schedule").unique(maintain_order=True)
        times = pl.col("^.*_s$").round(4)
        self._write(servers, "requests", found.requests.with_columns(times).drop("pair", "schedule"))
        self._write(servers, "replays", replays.join(doubts, on="replay", how="left", maintain_order="left"))
        self._write(servers, "steps", found.steps.drop("pair", "schedule", "num_decode_tokens", "dummy_step"))
        self._write(servers, "counted", found.counted.drop("pair", "schedule", strict=False))

    def _write(self, servers: Servers, name: str, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        setting = [pl.lit(servers.setting).alias("setting"), pl.lit(servers.num_ranks, pl.Int64).alias("dp_size")]
        parts = self.parts.setdefault(name, {})
        parts[servers] = frame.select(*setting, pl.all())
        pl.concat(parts.values()).write_csv(self.run.raw(f"{name}.csv"))


def read_trace(run: Run) -> tuple[Trace, dict[str, Any]]:
    """The requests of a run, and how they were made.

    Raises:
        DataError: the run lacks them.
    """
    import json

    facts = json.loads(run.raw("load.json").read_text("utf-8"))
    frame = run.points("trace").with_columns(pl.lit(1, pl.Int64).alias("output_tokens"))
    try:
        return Trace(facts["trace"], facts["origin"], frame.select(*traces.COLUMNS)), facts
    except (KeyError, pl.exceptions.ColumnNotFoundError) as problem:
        raise DataError(f"run {run.id}: its trace lacks {problem}") from None
