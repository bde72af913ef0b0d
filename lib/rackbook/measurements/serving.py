"""Stages of a plan in which clients load a server: start the server, run the clients, read what both found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rackbook.engine import bench_runs, forward_run, lab_bench, launch, logs
from rackbook.engine.lab import Lab
from rackbook.engine.plan import RUN_FOLDER, Plan, Process, Stage, gpus
from rackbook.engine.readiness import free_port
from rackbook.engine.server import START_TIMEOUT_S, Server, serve
from rackbook.engine.starting import ROUTER
from rackbook.errors import DataError, RackbookError
from rackbook.measurements.recording import keep_server, say
from rackbook.runs import Recorder
from rackbook.tables import column

_ITERATIONS, _RANKS = "--enable-logging-iteration-details", "--data-parallel-size"
_NEWS_S = 1.0  # until the end of a process is heard of
_TIMES_THE_ESTIMATE = 3

STEP_COLUMNS = (
    "bench_stage", "repeat", "concurrency", "rank", "iteration", "num_prefill_requests", "num_prefill_tokens",
    "num_decode_requests", "num_decode_tokens", "step_ms", "dummy_step",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """What the stages gave.

    Attributes:
        runs: bench_stage and the columns of :data:`rackbook.engine.bench_runs.RUN_COLUMNS`, one row per client run.
        steps: columns :data:`STEP_COLUMNS`, one row per iteration during a client run; empty unless the servers log
            their iterations, which vLLM does only where it starts one API server.
    """

    runs: pl.DataFrame
    steps: pl.DataFrame


def ready(plan: Plan, run: Recorder, lab: Lab | None = None, model: Path | None = None) -> Plan:
    """A plan whose words that stand for something are replaced by it, and, on the lab, whose port is a free one.

    Args:
        plan: what is to run.
        run: whose folder takes what is written.
        lab: the CPU lab, where that is the cluster; the usual one if None.
        model: folder of the lab's model; its default shape if None.

    Raises:
        RackbookError: the hosts' addresses are not known.
    """
    words = {RUN_FOLDER: str(run.folder.absolute())} | forward_run.addresses(plan)
    if not plan.cluster.is_lab:
        return plan.replaced(words)
    lab, port = lab or Lab(), free_port()
    words |= {
        launch.LAB_PYTHON: str(lab.python),
        launch.LAB_BENCH: lab_bench.__file__,
        launch.LAB_MODEL: str(model or lab.model()),
        f"127.0.0.1:{launch.SERVER_PORT}": f"127.0.0.1:{port}",
    }
    replaced = plan.replaced(words)
    stages = tuple(
        dataclasses.replace(
            stage,
            services=tuple(_at_port(process, str(port)) for process in stage.services),
            steps=tuple(tuple(_at_port(process, str(port)) for process in step) for step in stage.steps),
        )
        for stage in replaced.stages
    )
    return dataclasses.replace(replaced, stages=stages)


def follow(plan: Plan, run: Recorder) -> Found:
    """Run every stage of a plan that has clients, one after the other.

    Args:
        plan: of :func:`ready`.
        run: where results, logs and doubts go.

    Raises:
        ServerError: a server does not start.
        RackbookError: a client failed, or the server under it; what was measured until then lies in the run's folder.
    """
    found = [_stage(stage, plan, run) for stage in plan.stages if stage.services and stage.steps]
    return Found(pl.concat([f.runs for f in found]), pl.concat([f.steps for f in found]))


def start(stage: Stage, plan: Plan, run: Recorder, log: Path) -> Server:
    """Start the servers of a stage, note them in the run, and wait until they answer.

    Args:
        stage: of ``plan``.
        plan: of :func:`ready`.
        run: takes the command lines.
        log: what the first server prints.

    Returns:
        The server, for a ``with`` block.

    Raises:
        ServerError: it does not start, or not within three times the recipe's estimate.
    """
    say(f"{plan.topic}: {stage.name}, {gpus(stage.num_gpus)}, about {stage.minutes:.0f} minutes")
    for process in stage.services:
        run.process(process.words, process.environment, role=f"{stage.name}, {process.role}")
    return serve(
        stage.services, base_url(stage), log, ready_urls=_behind_a_router(stage), timeout_s=start_limit_s(plan), say=say
    )


def start_limit_s(plan: Plan) -> float:
    """Longest wait for a server: three times what its recipe estimates, and never less than for a small model."""
    startup = plan.recipe.startup
    minutes = startup.real_minutes if plan.needs.checkpoint else startup.dummy_minutes
    return max(START_TIMEOUT_S, _TIMES_THE_ESTIMATE * 60 * minutes)


def _stage(stage: Stage, plan: Plan, run: Recorder) -> Found:
    log = run.raw(f"{stage.name}.server.full.log")
    clients = [process for step in stage.steps for process in step]
    with start(stage, plan, run, log) as server:
        read_to = {process.log: process.log.stat().st_size for process in server.processes}
        steps: list[pl.DataFrame] = []

        def seen(row: Mapping[str, Any]) -> None:
            for path, place in read_to.items():
                with path.open("rb") as file:
                    file.seek(place)
                    content = file.read()
                whole = content[: content.rfind(b"\n") + 1]
                read_to[path] = place + len(whole)
                steps.append(
                    logs.iterations(whole.decode("utf-8", "replace"), path.name).with_columns(
                        pl.lit(stage.name).alias("bench_stage"),
                        pl.lit(row["repeat"]).alias("repeat"),
                        pl.lit(row["concurrency"]).alias("concurrency"),
                    )
                )
            server.check()

        try:
            runs = bench_runs.follow(
                server.base_url, [process.command for process in clients], run, environment=clients[0].environment,
                progress=say, seen=seen, engine_urls=_behind_a_router(stage),
            )  # fmt: skip
        except RackbookError:
            time.sleep(_NEWS_S)
            server.check()  # a dead server says more than a client that misses it
            raise
    for process in server.processes:
        keep_server(run, process.log, f"{stage.name}.{process.name}.log")
    logged = pl.concat(steps).select(pl.col(name).cast(column(name).dtype) for name in STEP_COLUMNS)
    words = stage.services[0].arguments
    if _ITERATIONS in words and not logged.is_empty():  # none at all is what several API servers log
        num_ranks = int(words[words.index(_RANKS) + 1]) if _RANKS in words else 1
        for doubt in unlogged(logged, num_ranks):
            run.flag(f"{stage.name}: {doubt}")
    return Found(runs.select(pl.lit(stage.name).alias("bench_stage"), pl.all()), logged)


def unlogged(steps: pl.DataFrame, num_ranks: int) -> list[str]:
    """A doubt where fewer ranks than an engine has logged their iterations.

    Without hybrid load balancing the first host's API server logs those of all hosts: a headless one has none.

    Args:
        steps: rank, one row per iteration; null counts as rank 0.
        num_ranks: of the engine.
    """
    found = steps["rank"].fill_null(0).n_unique()
    return [f"only {found} of {num_ranks} ranks logged their iterations"] if found < num_ranks else []


def log_doubts(log: Path, num_ranks: int) -> list[str]:
    """Doubts about the iterations in the log of a server; a line of an unknown form is one, and no error."""
    try:
        return unlogged(logs.iterations(log.read_text("utf-8", errors="replace"), log.name), num_ranks)
    except DataError as problem:
        return [str(problem)]


def base_url(stage: Stage) -> str:
    """Where a stage takes requests: where its clients send theirs, else where its first server listens."""
    if not stage.steps:
        return _engine_urls(stage.services)[0]
    arguments = stage.steps[0][0].arguments
    return arguments[arguments.index("--base-url") + 1]


def _behind_a_router(stage: Stage) -> list[str]:
    """Where the engines of a stage answer that has a router; nothing for another one."""
    return _engine_urls(stage.services) if any(process.role == ROUTER for process in stage.services) else []


def _engine_urls(services: Sequence[Process]) -> list[str]:
    """Where the processes answer that listen, the router left out."""
    found = []
    for process in services:
        words = process.arguments
        if process.role != ROUTER and "--port" in words:
            host = words[words.index("--host") + 1] if "--host" in words else "127.0.0.1"
            found.append(f"http://{host}:{words[words.index('--port') + 1]}")
    return found


def _at_port(process: Process, port: str) -> Process:
    words = list(process.arguments)
    if "--port" in words:
        words[words.index("--port") + 1] = port
    return dataclasses.replace(process, arguments=tuple(words))
