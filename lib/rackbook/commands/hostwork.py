"""``rackbook hostwork``: measure the host's work on this machine and keep it as a run.

Imported to build the parser, so everything that takes time to import is imported when a command runs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rackbook.commands import parsers

RECORDED_RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RECORDED_S = 240.0
"""What the run that comes with the project was recorded with; the notebook itself measures less."""


def add_parsers(commands: Any) -> None:
    """Add ``hostwork`` and its commands.

    Args:
        commands: the sub-parsers of the program; each command sets ``command``, a function of the parsed arguments
            that returns the exit status.
    """
    summary = "measure what the host does between two steps: all-reduces, admissions, rows of KV cache"
    inner = parsers.group(commands, "hostwork", summary)
    summary = "measure on this machine, which nothing else should use meanwhile, and keep the run"
    command = parsers.command(inner, "record", _record, summary)
    command.add_argument(
        "--into", type=Path, metavar="DIR", help="folder of runs (default: $RACKBOOK_RUNS, else build/runs)"
    )
    command.add_argument(
        "--ranks", type=_counts, default=list(RECORDED_RANKS), metavar="N,N,…", help="numbers of ranks to measure"
    )
    command.add_argument(
        "--seconds", type=float, default=RECORDED_S, metavar="S", help=f"time, about (default: {RECORDED_S:g})"
    )
    command.add_argument(
        "--path", type=Path, metavar="DIR",
        help="folder before the packages of the ranks' Python, e.g. with the Python files of a newer vLLM",
    )  # fmt: skip
    command.add_argument("--interpreter", metavar="PYTHON", help="Python of the ranks (default: one with torch)")


def _record(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from rackbook.errors import ParameterError
    from rackbook.experiments import cpu_overhead
    from rackbook.locations import shown

    given = {"rank_counts": arguments.ranks, "measure_s": arguments.seconds, "ranks_with": arguments.interpreter}
    try:
        params = cpu_overhead.Params(source="measure", **given)
    except ValidationError as problem:
        raise ParameterError("; ".join(error["msg"] for error in problem.errors())) from None
    if arguments.path is not None:
        os.environ["PYTHONPATH"] = str(arguments.path.resolve())  # for the processes that this one starts
    run = cpu_overhead.measure(params, root=arguments.into)
    print(shown(run.path))
    for doubt in run.flags:
        print(f"doubt: {doubt}")
    for name, why in run.provenance["absent"].items():
        print(f"not measured: {name}: {why}")
    return 0


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: whole numbers with commas, e.g. 2,4,8") from None
