"""``rackbook record``: measure on the lab and put the run where the notebooks find it. ``rackbook runs``: list runs.

Imported to build the parser, so everything that takes time to import is imported when the command runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackbook.commands import parsers

if TYPE_CHECKING:
    from rackbook.runs import Run

LARGEST_KB = 500
"""Largest run that is committed."""


def add_parsers(commands: Any) -> None:
    """Add ``record`` and ``runs``.

    Args:
        commands: the sub-parsers of the program; each command sets ``command``, a function of the parsed arguments that
            returns the exit status.
    """
    summary = "measure on the CPU lab and keep the run in data/runs, in place of the one that lies there"
    parser = parsers.command(commands, "record", _record, summary)
    parser.add_argument("names", nargs="+", metavar="NAME", help="notebooks that measure: 01, context_sweep …")
    parser.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="set a parameter otherwise than for the lab; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--flagged", action="store_true", help="keep the run even with doubts about its quality; else it stays apart"
    )
    summary = "the runs there are, newest first, and what was left unfinished"
    parser = parsers.command(commands, "runs", _runs, summary)
    parser.add_argument("name", nargs="?", metavar="NAME", help="only those of this notebook: 01, context_sweep …")


def record(name: str, pairs: Sequence[tuple[str, str]] = (), *, flagged: bool = False) -> Path:
    """Measure with the parameters of the CPU lab and keep the run in ``data/runs``.

    Args:
        name: of the notebook, its topic or its number.
        pairs: parameters as typed, which win over those for the lab.
        flagged: whether a run with doubts about its quality may replace the one that is there.

    Returns:
        The run's new folder.

    Raises:
        DataError: the notebook measures nothing, or the run is too large to be committed.
        ParameterError: a parameter that it does not have.
        RackbookError: the measurement failed, or has doubts and ``flagged`` is not set: it then stays where it is.
    """
    from rackbook import experiments
    from rackbook.errors import DataError
    from rackbook.locations import NOTEBOOKS
    from rackbook.suite import parameters
    from rackbook.suite.notebooks import discover, select

    (notebook,) = select([name], discover(NOTEBOOKS))
    experiment = experiments.load(notebook.topic)
    if "source" not in experiment.Params.model_fields:
        able = [n.name for n in discover(NOTEBOOKS) if any(p.name == "source" for p in n.parameters)]
        raise DataError(f"{notebook.name} measures nothing; those that do: {', '.join(able)}")
    given = parameters.assign(list(pairs), [notebook]).values[notebook.name]
    params = experiment.Params(**({"source": "measure", "cluster": "cpu-lab"} | getattr(experiment, "LAB", {}) | given))
    return keep(experiment.collect(params).run, flagged=flagged)


def keep(run: Run, *, flagged: bool = False) -> Path:
    """Move a copy of a run into ``data/runs``, in place of older ones of its experiment.

    Raises:
        DataError: it is too large.
        RackbookError: it has doubts, and ``flagged`` is not set.
    """
    from rackbook import runs
    from rackbook.errors import DataError, RackbookError
    from rackbook.locations import shown

    kilobytes = sum(entry["bytes"] for entry in run.files.values()) / 1e3
    if kilobytes > LARGEST_KB:
        raise DataError(f"{shown(run.path)}: {kilobytes:.0f} kB, allowed: {LARGEST_KB}; measure less")
    if run.flags and not flagged:
        doubts = "\n".join(f"  {flag}" for flag in run.flags)
        raise RackbookError(
            f"{shown(run.path)} has doubts and stays there; measure on a quiet machine, or give --flagged:\n{doubts}"
        )
    older = runs.committed(run.experiment)
    target = runs.COMMITTED / run.id
    runs.COMMITTED.mkdir(exist_ok=True)
    partial = target.with_name(f".{run.id}.copy")
    shutil.copytree(run.path, partial)
    partial.rename(target)
    for other in older:
        shutil.rmtree(other.path)
    return target


def _record(arguments: argparse.Namespace) -> int:
    from rackbook.locations import shown

    for name in arguments.names:
        path = record(name, [tuple(pair) for pair in arguments.parameters], flagged=arguments.flagged)
        print(shown(path))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from rackbook import runs
    from rackbook.experiments.live import description
    from rackbook.locations import NOTEBOOKS, shown
    from rackbook.suite.notebooks import discover, select

    chosen = select([arguments.name], discover(NOTEBOOKS)) if arguments.name else []
    for run in runs.stored(chosen[0].topic if chosen else None):
        print(f"{run.id}  {description(run)}  {shown(run.path.parent)}")
    for left in runs.unfinished():
        print(f"{left.id}  not a run: {textwrap.shorten(left.reason, 300)}", file=sys.stderr)
    return 0
