"""Running the stages of a plan that are ``vllm bench forward``, and keeping what they write."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from rackbook import catalog
from rackbook.clusters import Cluster
from rackbook.engine import forward_results, tasks
from rackbook.engine.cases import Case
from rackbook.engine.fit import UnfitError
from rackbook.engine.plan import RUN_FOLDER, Plan, Stage, gpus
from rackbook.engine.tasks import Say
from rackbook.errors import RackbookError
from rackbook.runs import Recorder

KERNELS = ".kernels.json"
_WORK = "work"
_TIMES_THE_ESTIMATE, _LEAST_LIMIT_S = 10, 3600.0
QUEUE_S = 7 * 24 * 3600.0
"""How long Slurm may let a step wait for its hosts, outside of the time that the step may take."""


def measure(plan: Plan, run: Recorder, say: Say = lambda _: None) -> pl.DataFrame:
    """Run every stage of a plan, one after the other, and read what it found.

    The run keeps each stage's result file, its logs, and the kernel times of every rank as
    ``<stage>.<case>.rank<r>.kernels.json``. What is doubtful about a time is flagged; the time stays as it is.

    Args:
        plan: stages that are all ``vllm bench forward``.
        run: where everything goes.
        say: takes a line now and then.

    Returns:
        One row per stage and batch: hardware, model, and the columns of
        :func:`rackbook.engine.forward_results.points`.

    Raises:
        TaskError: a stage failed; the stages before it lie in the run's folder.
        DataError: a stage wrote something else than its result.
    """
    work = (run.folder / _WORK).absolute()
    work.mkdir()
    ready = plan.replaced({RUN_FOLDER: str(work)} | addresses(plan))
    frames = []
    for stage in ready.stages:
        say(f"{plan.topic}: {stage.name}, {gpus(stage.num_gpus)}, about {stage.minutes:.0f} minutes")
        frames.append(_stage(stage, run, work, say, QUEUE_S if queues(plan) else 0.0))
    shutil.rmtree(work)
    cluster = plan.cluster
    hardware = catalog.hardware(cluster.hardware).name if cluster.hardware else cluster.name
    return pl.concat(frames).select(
        pl.lit(hardware).alias("hardware"), pl.lit(plan.recipe.model_name).alias("model"), pl.all()
    )


def cases_of(stage: Stage) -> tuple[list[Case], int]:
    """The batches that a stage times, and on how many ranks, read from its own command line."""
    arguments = stage.processes[0].arguments
    cases = [Case.parse(arguments[place + 1]) for place, word in enumerate(arguments) if word == "--case"]
    return cases, int(arguments[arguments.index("--data-parallel-size") + 1])


def addresses(plan: Plan) -> dict[str, str]:
    """What the words ``HOST_<number>`` of a plan stand for; nothing where it has none.

    Servers on Slurm need an allocation around this process, with this machine in it, since the first one starts here.

    Raises:
        RackbookError: the hosts are not known: no addresses in the cluster's file, no Slurm allocation.
        UnfitError: the allocation has too few hosts, or this machine is none of them.
    """
    cluster = plan.cluster
    if cluster.launcher.kind == "slurm":
        if chooses_hosts(plan):
            return {}
        needed = 1 + max(process.host_index for process in plan.processes)
        hosts = allocated_hosts(cluster)
        if len(hosts) < needed:
            raise UnfitError(
                f"{len(hosts)} {'host' if len(hosts) == 1 else 'hosts'} in the Slurm allocation",
                f"{needed} for {plan.topic} on {cluster.key}",
                f"Ask salloc or sbatch for --nodes={needed}, or lower the parameter that sets the number of ranks",
            )
        return {f"HOST_{number}": host for number, host in enumerate(hosts[:needed])}
    if any("HOST_" in word for process in plan.processes for word in process.command):
        raise RackbookError(
            f"{plan.topic} needs {cluster.num_hosts} hosts, and {cluster.file} has no launcher.addresses: give one per "
            "host, this machine's first"
        )
    return {}


def chooses_hosts(plan: Plan) -> bool:
    """Whether Slurm chooses the hosts when a plan runs, so that this machine need not be one of them."""
    return plan.cluster.launcher.kind == "slurm" and not any(stage.services for stage in plan.stages)


def queues(plan: Plan) -> bool:
    """Whether a plan's steps wait in Slurm's queue: Slurm chooses their hosts, and none are allocated yet."""
    return chooses_hosts(plan) and not os.environ.get("SLURM_JOB_NODELIST")


def allocated_hosts(cluster: Cluster) -> list[str]:
    """The hosts of the Slurm allocation around this process, this machine's first.

    Raises:
        RackbookError: there is none, or Slurm does not say.
        UnfitError: this machine is none of them.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise RackbookError(
            f"servers on {cluster.key} need a Slurm allocation around this process: start it within salloc or sbatch"
        )
    try:
        done = subprocess.run(  # noqa: S603
            ["scontrol", "show", "hostnames", nodes],  # noqa: S607 - where it lies differs by system
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as problem:
        raise RackbookError(f"scontrol does not say which hosts {nodes} are: {type(problem).__name__}") from None
    hosts = done.stdout.split()
    name = socket.gethostname()
    names = (os.environ.get("SLURMD_NODENAME"), name, name.partition(".")[0])  # Slurm's name of a host may be its own
    here = next((host for each in names for host in hosts if host == each), None)
    if here is None:
        raise UnfitError(
            f"this process on a machine outside its Slurm allocation ({nodes})",
            "one on a host of it, where the first server starts",
            "Start it by sbatch, or by srun --overlap --pty within salloc",
        )
    return [here, *(host for host in hosts if host != here)]


def _stage(stage: Stage, run: Recorder, work: Path, say: Say, queue_s: float) -> pl.DataFrame:
    (step,) = stage.steps
    logs = [run.raw(f"{stage.name}.host{process.host_index}.log") for process in step]
    for process in step:
        run.process(process.words, process.environment, role=f"{stage.name}, {process.role}, host {process.host_index}")
    limit_s = max(_LEAST_LIMIT_S, _TIMES_THE_ESTIMATE * 60 * stage.minutes) + queue_s
    tasks.run(step, logs, timeout_s=limit_s, say=say, what=stage.name)
    result = work / f"{stage.name}.json"
    cases, num_ranks = cases_of(stage)
    timed = forward_results.read(result, cases, num_ranks)
    shutil.copyfile(result, run.raw(result.name))
    for each in timed:
        for doubt in each.doubts:
            run.flag(f"{stage.name}, {each.case.name}: {doubt}")
        if each.routing == "real" and "--load-format" not in step[0].arguments:
            run.flag(f"{stage.name}, {each.case.name}: random weights were routed as they fell, not evenly")
    if any(word == "--profile-dir" for word in step[0].arguments):
        _keep_kernels(stage, cases, num_ranks, run, work / f"{stage.name}.profile")
    return forward_results.points(stage.name, timed)


def _keep_kernels(stage: Stage, cases: Sequence[Case], num_ranks: int, run: Recorder, folder: Path) -> None:
    for case in cases:
        found = sorted(folder.glob(f"{case.name}.rank*{KERNELS}"))
        for file in found:
            shutil.copyfile(file, run.raw(f"{stage.name}.{file.name}"))
        if len(found) < num_ranks:
            run.flag(
                f"{stage.name}, {case.name}: kernel times of {len(found)} of {num_ranks} ranks; a host writes its own, "
                "so the folder of runs must be one that all hosts share"
            )
