"""The plan of a sweep: what would run, on how many GPUs and for about how long, and what is there already."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rackbook.errors import RackbookError
from rackbook.suite.executions import ELSEWHERE, MACHINE, Execution
from rackbook.suite.sweeps import CLUSTER

LIVE = ("source", "measure")
"""Name and value of the parameter by which a notebook measures instead of showing what was published."""

RECIPE = "recipe"
"""The parameter of a live notebook that says which recipe; without it the cluster's own counts."""

SERVERS = "base_url"
"""The parameter of a live notebook that names servers which run already; they are measured instead of the cluster."""

_THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]")

_MARGIN = 2.0
"""A measurement is ended when it takes so many times what its plan says: the minutes of a plan are estimates."""


@dataclass(frozen=True)
class Step:
    """One execution in the plan.

    Attributes:
        execution: with the GPUs, the time and the exclusive use that its plan wants, where that is known.
        done: whether it is complete.
        gpu_minutes: estimate of the GPU time; None where there is nothing to estimate it from.
        note: where the estimate comes from.
    """

    execution: Execution
    done: bool
    gpu_minutes: float | None
    note: str


def steps(executions: Sequence[Execution], complete: dict[str, Any], *, in_job: bool = False) -> list[Step]:
    """Say of each execution what it needs.

    Args:
        executions: the sweep.
        complete: what is complete, by request.
        in_job: whether each will run in a job of Slurm's that has what its plan needs.

    Raises:
        RackbookError: a live execution whose recipe does not fit its cluster, or that has to run in an allocation of
            Slurm's where there is none.
    """
    in_job = in_job or "SLURM_JOB_NODELIST" in os.environ
    return [_step(execution, execution.request in complete, in_job=in_job) for execution in executions]


def text(found: Sequence[Step], notices: Sequence[str] = ()) -> str:
    """The plan as a table: one line per notebook and need, then the executions that would run."""
    lines = [f"note: {notice}" for notice in notices]
    groups: dict[tuple[str, int, float | None, str], list[Step]] = {}
    for step in found:
        key = (step.execution.notebook.name, step.execution.limits.gpus, step.gpu_minutes, step.note)
        groups.setdefault(key, []).append(step)
    lines.append(f"{'notebook':<24} {'executions':>10} {'done':>6} {'to run':>6} {'GPUs':>5} {'GPU min':>8}")
    for (name, gpus, minutes, note), group in groups.items():
        done = sum(step.done for step in group)
        shown = "?" if minutes is None else f"{minutes:.0f}"
        lines.append(
            f"{name:<24} {len(group):>10} {done:>6} {len(group) - done:>6} {gpus:>5} {shown:>8}"
            + (f"  {note}" if note else "")
        )
    left = [step for step in found if not step.done]
    total = sum(step.gpu_minutes or 0.0 for step in left)
    unknown = sum(step.gpu_minutes is None for step in left)
    lines.append(
        f"{len(found)} executions, {len(found) - len(left)} done, {len(left)} to run; about {total:.0f} GPU minutes"
        + (f", and {unknown} executions of unknown length" if unknown else "")
    )
    return "\n".join(lines)


def details(found: Sequence[Step], most: int = 200) -> str:
    """Each execution in a line: done or to run, and what it is."""
    lines = [f"{'done  ' if s.done else 'to run'}  {s.execution.request}  {s.execution.label}" for s in found[:most]]
    if len(found) > most:
        lines.append(f"… and {len(found) - most} more")
    return "\n".join(lines)


def _step(execution: Execution, done: bool, *, in_job: bool) -> Step:
    name, measure = LIVE
    if execution.parameters.get(name) != measure:
        if not execution.limits.gpus:
            return Step(execution, done, 0.0, "")
        most = execution.limits.gpus * execution.limits.timeout_s / 60
        return Step(execution, done, most, "at most: GPUs × time limit")
    if servers := execution.parameters.get(SERVERS):
        is_here = any(name in servers for name in _THIS_MACHINE)
        limits = replace(execution.limits, exclusive=MACHINE if is_here else f"{ELSEWHERE}{servers}")
        return Step(replace(execution, limits=limits), done, None, f"live, at {servers}")
    plan = _plan(execution)
    if plan is None:
        limits = replace(execution.limits, exclusive=MACHINE)
        minutes = None if limits.gpus else 0.0
        return Step(replace(execution, limits=limits), done, minutes, "live, no plan for this notebook")
    from rackbook.engine import forward_run  # the plan has loaded it

    cluster = execution.parameters[CLUSTER]
    queues = plan.cluster.launcher.kind == "slurm" and not in_job
    if queues and not done and any(stage.services for stage in plan.stages):
        raise RackbookError(
            f"{execution.label}: its servers on {cluster} need an allocation of Slurm's around this process: start it "
            "within salloc or sbatch, or use `rackbook sweep --executor slurm`"
        )
    gpus, per_host = max(plan.num_gpus, execution.limits.gpus), plan.cluster.num_gpus_per_host
    limits = replace(
        execution.limits,
        gpus=gpus,
        timeout_s=max(_MARGIN * plan.minutes * 60, execution.limits.timeout_s)
        + (forward_run.QUEUE_S if queues else 0.0),
        exclusive=MACHINE if plan.cluster.launcher.kind == "local" else f"{ELSEWHERE}{cluster}",
        hosts=max(1 + max(process.host_index for process in plan.processes), math.ceil(gpus / max(per_host, 1))),
        gpus_per_host=per_host,
    )
    ended = f"{limits.timeout_s / 3600:.0f} h, Slurm's queue included" if queues else f"{limits.timeout_s / 60:.0f} min"
    hosts = f", {limits.hosts} hosts" if limits.hosts > 1 else ""
    return Step(replace(execution, limits=limits), done, plan.gpu_minutes, f"on {cluster}{hosts}, ended after {ended}")


def _plan(execution: Execution) -> Any:
    """What a live notebook would start, see :mod:`rackbook.plans`; None if nothing plans it."""
    from rackbook import plans
    from rackbook.experiments import load

    topic, cluster = execution.notebook.topic, execution.parameters.get(CLUSTER)
    if topic not in plans.TOPICS or cluster is None:
        return None
    try:
        return plans.plan(topic, load(topic).Params(**execution.parameters), cluster, execution.parameters.get(RECIPE))
    except RackbookError as problem:
        raise RackbookError(f"{execution.label}: {problem}") from None
