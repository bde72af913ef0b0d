"""The servers of the measured replays of notebook 05: those of the user, or those that are started for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from rackbook.clusters import Cluster
    from rackbook.experiments.dp_imbalance import Params
    from rackbook.runs import Recorder

TOGETHER, ALONE = "one engine", "separate servers"
"""What is measured: ranks that step together, and ranks that do not."""


@dataclass(frozen=True)
class Servers:
    """Where one set-up is measured.

    Attributes:
        setting: :data:`TOGETHER` or :data:`ALONE`.
        num_ranks: on all of them together.
        base_urls: of the servers.
        model: that they serve.
        log_paths: of those that were started here.
    """

    setting: str
    num_ranks: int
    base_urls: tuple[str, ...]
    model: str
    log_paths: tuple[Path, ...] = ()


def set_ups(
    params: Params, cluster: Cluster, run: Recorder, step_tokens: int, say: Callable[[str], None]
) -> Iterator[Servers]:
    """The servers to measure, one set-up after the other; those that are started here end when the next is asked for.

    Args:
        params: the notebook's.
        cluster: where servers are started, unless the parameters name some.
        run: takes the logs, and what is to be known of the servers.
        step_tokens: most tokens that a rank computes in a step of the lab.
        say: told what is going on.

    Raises:
        ParameterError: addresses that cannot be measured.
        UnfitError: the cluster cannot do it.
        RackbookError: a server does not start.
    """
    if params.base_url:
        engine, _, control = params.base_url.partition(";")
        servers = _running(TOGETHER, engine)
        run.describe(cluster=None, cluster_missing_reason="servers of the user", **_version(servers.base_urls[0]))
        yield servers
        if control.strip():
            yield _running(ALONE, control)
        else:
            run.describe(no_control="base_url named no servers for a control on ranks that do not step together")
    elif cluster.is_lab:
        yield from _on_lab(run, step_tokens, say)
    else:
        yield from _on_cluster(params, cluster, run)


def _running(setting: str, addresses: str) -> Servers:
    from rackbook.engine import metrics, readiness

    urls = tuple(url.strip().rstrip("/") for url in addresses.split(",") if url.strip())
    names = [readiness.answers(url) for url in urls]
    if not urls or None in names or len(set(names)) != 1:
        raise ParameterError(
            f"base_url, {setting}: {', '.join(urls) or 'no address'} serve the models {names}; expected servers that "
            "answer and serve the same one"
        )
    engines = [len(metrics.fetch(url).by_label("vllm:prompt_tokens_total", "engine")) or 1 for url in urls]
    if len(set(engines)) != 1 or sum(engines) < 2:
        raise ParameterError(
            f"base_url, {setting}: {', '.join(urls)} have {engines} ranks; expected two ranks or more in all, and "
            "equally many on each server"
        )
    return Servers(setting, sum(engines), urls, str(names[0]))


def _version(base_url: str) -> dict[str, str | None]:
    import requests

    try:
        return {"vllm": str(requests.get(f"{base_url}/version", timeout=10).json()["version"])}
    except (requests.RequestException, ValueError, KeyError, TypeError) as problem:
        return {"vllm": None, "vllm_missing_reason": f"the server does not tell: {type(problem).__name__}"}


def _on_lab(run: Recorder, step_tokens: int, say: Callable[[str], None]) -> Iterator[Servers]:
    from rackbook.engine import lab_model
    from rackbook.engine.lab import Lab

    lab, num_ranks = Lab(), 2
    model = lab.model(**lab_model.COMPUTE_DOMINATED)
    arguments = (
        "--max-num-batched-tokens", str(step_tokens), "--enable-logging-iteration-details",
        "--no-enable-prefix-caching",
    )  # fmt: skip
    run.describe(
        model=f"random MoE of the CPU lab, {lab_model.COMPUTE_DOMINATED}", server_arguments=list(arguments)
    )  # fmt: skip
    log = run.folder / "together.log"
    with lab.server(num_ranks, model, extra_arguments=arguments, log=log, progress=say) as server:
        yield Servers(TOGETHER, num_ranks, (server.base_url,), server.model, (log,))
    log.unlink()  # its iterations are kept as a table
    with contextlib.ExitStack() as stack:
        logs, urls, name = [], [], ""
        for rank, core in enumerate(_cores(num_ranks)):
            logs.append(run.folder / f"alone-{rank}.log")
            one = lab.server(
                1, model, extra_arguments=arguments, environment={"VLLM_CPU_OMP_THREADS_BIND": core}, log=logs[-1],
                progress=say,
            )  # fmt: skip
            stack.enter_context(one)
            urls.append(one.base_url)
            name = one.model
        yield Servers(ALONE, num_ranks, tuple(urls), name, tuple(logs))
    for log in logs:
        log.unlink()


def _cores(num_ranks: int) -> list[str]:
    from rackbook.cores import core_ids
    from rackbook.engine.lab_settings import cores_by_rank

    return cores_by_rank(core_ids(), num_ranks).split("|")


def _on_cluster(params: Params, cluster: Cluster, run: Recorder) -> Iterator[Servers]:
    from rackbook import plans
    from rackbook.engine import checks
    from rackbook.measurements import serving
    from rackbook.measurements.recording import keep_server

    plan = plans.plan("dp_imbalance", params, cluster)
    found = checks.check(plan)
    run.describe(vllm=found["version"], left_out=list(plan.notes))
    run.write_text("plan.txt", plan.text() + "\n")
    run.write_json("effective.json", plan.effective)
    ready = serving.ready(plan, run)
    for stage in ready.stages:
        log = run.raw(f"{stage.name}.server.full.log")
        with serving.start(stage, ready, run, log) as server:
            ranks = int(stage.name.removeprefix("dep"))
            yield Servers(TOGETHER, ranks, (server.base_url,), server.model, (log,))
        for doubt in serving.log_doubts(log, ranks):
            run.flag(f"{stage.name}: {doubt}")
        for process in server.processes:  # the iterations are kept as a table
            keep_server(run, process.log, f"{stage.name}.{process.name}.log")
    run.describe(no_control="no server per rank is started on a cluster: name some in base_url, after a semicolon")
