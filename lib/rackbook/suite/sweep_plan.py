"""The plan of a sweep: what would run, on how many GPUs and for about how long, and what is there already."""

from __future__ import annotations

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


def steps(executions: Sequence[Execution], complete: dict[str, Any]) -> list[Step]:
    """Say of each execution what it needs.

    Args:
        executions: the sweep.
        complete: what is complete, by request.

    Raises:
        RackbookError: a live execution whose recipe does not fit its cluster.
    """
    return [_step(execution, execution.request in complete) for execution in executions]


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


def _step(execution: Execution, done: bool) -> Step:
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
    cluster = execution.parameters[CLUSTER]
    limits = replace(
        execution.limits,
        gpus=max(plan.num_gpus, execution.limits.gpus),
        timeout_s=max(_MARGIN * plan.minutes * 60, execution.limits.timeout_s),
        exclusive=MACHINE if plan.cluster.launcher.kind == "local" else f"{ELSEWHERE}{cluster}",
    )
    note = f"on {cluster}, ended after {limits.timeout_s / 60:.0f} min"
    return Step(replace(execution, limits=limits), done, plan.gpu_minutes, note)


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
