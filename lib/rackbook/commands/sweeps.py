"""``rackbook sweep``: many executions, resumed where they stopped, here or on Slurm.

Imported to build the parser, so everything that takes time to import is imported when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackbook.option_types import folder, names, whole_from_one

if TYPE_CHECKING:
    from rackbook.suite.notebooks import Notebook
    from rackbook.suite.store import Store
    from rackbook.suite.sweeps import Sweep

DONE, EXECUTION_FAILED, STOPPED = 0, 1, 3
EXECUTORS = ("local", "slurm")
_SLURM_OPTIONS = ("partition", "account", "nodes", "gpus_per_node", "time_min", "max_jobs", "per_job")

_EXAMPLE = """\
a SUITE.toml:
  name = "night"                                   # optional; the report is called by it
  timeout_s = 3600                                 # also memory_gib, gpus, retries, cluster; here or in a block
  [slurm]                                          # for --executor slurm
  partition = "batch"                              # also account, nodes, gpus_per_node, cpus_per_task, mem_gib,
  time_min = 120                                   #   time_min, max_jobs, per_job, local_dir, qos, constraint
  [[sweep]]
  notebooks = ["06_expert_balance"]
  set  = { draws = 200 }                           # the same in every execution
  grid = { ranks = [16, 32], top_k = [[6, 3], [8, 4]] }  # every combination; a value of a list parameter is a list
  zip  = { window_steps = [500, 1000], interval_steps = [1500, 3000] }  # these go together
  list = [ { confidence = 0.9 }, { confidence = 0.95, draws = 400 } ]  # single points
  repeats = 3                                      # distinct seeds; or seeds = [1, 2, 3]

An execution with source = "measure" on this machine starts servers on fixed ports and GPUs, and its times count:
nothing else runs here meanwhile. On servers (base_url) or a cluster elsewhere it is the only one there; a job of Slurm
has its nodes for itself, as many as its plan wants, with the GPUs that its cluster's file gives each. Its time limit is
at least twice what its plan says, and a week more where it waits in Slurm's queue itself, started outside a job.
"""


def add_parsers(commands: Any) -> None:
    """Add ``sweep``.

    Args:
        commands: the sub-parsers of the program.
    """
    summary = "execute notebooks over many parameter values, resuming what is there"
    parser = commands.add_parser(
        "sweep", help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(command=_sweep)
    parser.add_argument("suite", type=Path, metavar="SUITE.toml", help="which notebooks with which values")
    parser.add_argument(
        "--notebooks", type=Path, metavar="DIR", help="folder of the notebooks (default: those that come with rackbook)"
    )
    parser.add_argument(
        "--out", type=folder, default=Path("build"), metavar="DIR",
        help="folder for everything that is written (default: build)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=whole_from_one, metavar="N", help="executions at a time (default: one per core)")
    add_options(parser)
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="where to execute (default: local)")
    slurm = parser.add_argument_group("Slurm", "each also in the table [slurm] of the file")
    slurm.add_argument("--partition", metavar="NAME")
    slurm.add_argument("--account", metavar="NAME")
    slurm.add_argument(
        "--nodes", type=whole_from_one, metavar="N",
        help="nodes of a job that wants GPUs (gpus in the file) and has no plan; a measurement has those of its plan, "
        "a job without GPUs one",
    )  # fmt: skip
    slurm.add_argument(
        "--gpus-per-node", type=whole_from_one, metavar="N",
        help="GPUs of each of these nodes (default: as many as it takes)",
    )  # fmt: skip
    slurm.add_argument(
        "--time", dest="time_min", type=whole_from_one, metavar="MIN", help="time limit of each job, minutes"
    )
    slurm.add_argument(
        "--max-jobs", type=whole_from_one, metavar="N", help="jobs with the same needs that run at a time"
    )
    slurm.add_argument("--per-job", type=whole_from_one, metavar="N", help="executions of one job, one after the other")
    slurm.add_argument("--detach", action="store_true", help="submit and return; the same command collects later")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``run`` shares when its values make it a sweep."""
    parser.add_argument("--dry-run", action="store_true", help="print what a sweep would run, and what is done")
    parser.add_argument(
        "--gpus", type=names, metavar="LIST",
        help="GPUs that a sweep may hand out, e.g. 0,1 (default: all that are visible)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-failed", action="store_true", help="leave executions of a sweep that failed, do not run them again"
    )
    parser.add_argument(
        "--copy-to", metavar="URL",
        help="copy each executed notebook of a sweep there: a folder, or an address that papermill can write",
    )  # fmt: skip


def _sweep(arguments: argparse.Namespace) -> int:
    from rackbook.locations import NOTEBOOKS
    from rackbook.suite import sweeps
    from rackbook.suite.notebooks import discover

    _refuse_options_of_others(arguments)
    found = sweeps.read(arguments.suite, discover(arguments.notebooks or NOTEBOOKS))
    return execute(found, arguments)


def _refuse_options_of_others(arguments: argparse.Namespace) -> None:
    """Complain about an option that means nothing for the executor."""
    from rackbook.errors import ParameterError

    is_local = arguments.executor == "local"
    for name in (*_SLURM_OPTIONS, "detach") if is_local else ("jobs", "gpus"):
        if getattr(arguments, name) not in (None, False):
            option = "time" if name == "time_min" else name.replace("_", "-")
            owner = "slurm" if is_local else "local, on Slurm say --max-jobs or --gpus-per-node"
            raise ParameterError(f"--{option} belongs to --executor {owner}")


def execute(sweep: Sweep, arguments: argparse.Namespace) -> int:
    """Plan a sweep, and unless that is all, run it, write the index and the report.

    Returns:
        The exit status: 0 all complete, 1 an execution failed, 3 stopped early or not everything has run yet.
    """
    from rackbook.locations import shown
    from rackbook.suite import index, sweep_plan
    from rackbook.suite.store import GOES_ON, OF_THE_DISK, Store

    results = Store(arguments.out)
    complete = results.complete(sweep.executions)
    in_job = getattr(arguments, "executor", "local") == "slurm"
    steps = sweep_plan.steps(sweep.executions, complete, in_job=in_job)
    if arguments.dry_run:
        print(sweep_plan.text(steps, sweep.notices))
        print(sweep_plan.details(steps))
        return DONE
    print(sweep_plan.text(steps, sweep.notices), file=sys.stderr)
    results.prepare()
    left = [step.execution for step in steps if not step.done]
    failed = index.failed(results, sweep.executions, complete) if arguments.keep_failed else set()
    left = [execution for execution in left if execution.request not in failed]
    stopped = ""
    try:
        stopped = _executor(sweep, arguments)(left, results, arguments) if left else ""
    except BaseException as problem:
        if not (isinstance(problem, OSError) and problem.errno in OF_THE_DISK):
            with contextlib.suppress(OSError):
                index.write(results, sweep.executions)
            raise
        stopped = f"{problem}; {GOES_ON}"
    results.digests.forget()  # what counted at the start may have changed meanwhile
    try:
        return _conclude(sweep, results, results.complete(sweep.executions) if left else complete, arguments, stopped)
    except OSError as problem:
        print(f"rackbook: {stopped or f'{shown(arguments.out)}: {problem}'}", file=sys.stderr)
        return STOPPED


def _conclude(
    sweep: Sweep, results: Store, complete: dict[str, Path], arguments: argparse.Namespace, stopped: str
) -> int:
    """Write the index, the copies and the report, and say where they are."""
    from rackbook.suite import index

    frame = index.write(results, sweep.executions, complete)
    if arguments.copy_to:
        from rackbook.suite import copies

        for problem in copies.send(complete, results, arguments.copy_to):
            print(f"note: {problem}", file=sys.stderr)
            stopped = stopped or "not every notebook could be copied; the same command tries again"
    from rackbook.suite import sweep_report

    page = sweep_report.write(sweep, results, complete, frame)
    missing = len(sweep.executions) - len(complete)
    for line in _outdated(sweep, results, frame):
        print(f"note: {line}", file=sys.stderr)
    print(f"{len(complete)} of {len(sweep.executions)} executions complete" + (f", {missing} not" if missing else ""))
    print(f"report     {page}\nindex      {arguments.out / index.FILE}\nresults    {arguments.out / 'executions'}/")
    if stopped:
        print(f"rackbook: {stopped}", file=sys.stderr)
        return STOPPED
    return EXECUTION_FAILED if missing else DONE


def _outdated(sweep: Sweep, results: Store, frame: Any, most: int = 5) -> list[str]:
    """Which executions have a result that does not count any more, and what has changed since."""
    outdated, *settled = (set(frame.filter(frame["status"] == s)["request"]) for s in ("outdated", "failed", "done"))
    outdated = outdated.difference(*settled)
    found = [e for e in sweep.executions if e.request in outdated]
    lines = [f"{e.label}: its result is out of date, {results.outdated(e)} has changed" for e in found[:most]]
    return [*lines, *([f"and so are {len(found) - most} more"] if len(found) > most else [])]


def sweep_of_run(notebooks: Sequence[Notebook], arguments: argparse.Namespace) -> Callable[[], int] | None:
    """The sweep that ``rackbook run`` is asked for; None if no parameter has several values.

    Raises:
        ParameterError: a wrong parameter, or an option of a sweep without one.
    """
    from rackbook.errors import ParameterError
    from rackbook.suite import parameters, sweeps
    from rackbook.suite.executions import Limits

    values, notices = parameters.assign_several(arguments.parameters, notebooks)
    if not arguments.dry_run and all(len(several) == 1 for given in values.values() for several in given.values()):
        options = {"--gpus": arguments.gpus, "--keep-failed": arguments.keep_failed, "--copy-to": arguments.copy_to}
        if given := [option for option, value in options.items() if value]:
            raise ParameterError(f"{given[0]} belongs to a sweep; give a number several values, like -p ranks 16,32")
        return None
    limits = Limits() if arguments.timeout is None else Limits(timeout_s=arguments.timeout)
    found = sweeps.of_values("run", values, notebooks, limits)
    return lambda: execute(replace(found, notices=(*notices, *found.notices)), arguments)


def _executor(sweep: Sweep, arguments: argparse.Namespace) -> Callable[..., str]:
    if getattr(arguments, "executor", "local") == "local":
        return _local

    def slurm(left: list, results: Any, arguments: argparse.Namespace) -> str:
        from rackbook.suite import slurm

        given = {name: getattr(arguments, name) for name in _SLURM_OPTIONS if getattr(arguments, name) is not None}
        return slurm.run(left, results, sweep.slurm | given, name=sweep.name, detach=arguments.detach)

    return slurm


def _local(left: list, results: Any, arguments: argparse.Namespace) -> str:
    from rackbook.cores import whole_cores
    from rackbook.suite import leases, local

    gpus = leases.visible() if arguments.gpus is None else leases.chosen(arguments.gpus)
    tally = local.run(left, results, jobs=arguments.jobs or whole_cores(), gpus=gpus)
    return tally.stopped
