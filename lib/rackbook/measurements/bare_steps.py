"""02, 03, 04 and 10 measured: batches timed by ``vllm bench forward``, as the plan of the experiment has them."""

from __future__ import annotations

from pydantic import BaseModel

from rackbook import clusters, plans, runs
from rackbook.engine import checks, forward_run
from rackbook.measurements.recording import interpreter, recorded, say
from rackbook.runs import Run


def measure(topic: str, params: BaseModel) -> Run:
    """Time the batches of an experiment's plan and keep them as a run.

    Args:
        topic: the experiment.
        params: parameters of its notebook.

    Returns:
        The run, with the table points, as :func:`rackbook.engine.forward_run.measure` gives it, and the kernel times
        of every rank where the plan profiles.

    Raises:
        UnfitError: the cluster cannot do it.
        RackbookError: a process failed, or wrote something else than its result; what was measured until then stays
            in an unfinished run.
    """
    cluster = clusters.cluster(params.cluster)
    plan = plans.plan(topic, params, cluster)
    found = checks.check(plan)
    with recorded(topic, params, params.cluster, interpreter(cluster), found["elsewhere"]) as run:
        run.describe(vllm=found["version"], left_out=list(plan.notes))
        run.write_text("plan.txt", plan.text() + "\n")
        run.write_points(forward_run.measure(plan, run, say))
    return runs.read(run.folder.with_name(run.id))
