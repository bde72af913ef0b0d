"""The command line; every command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rackbook import __version__
from rackbook.commands import parsers
from rackbook.errors import RackbookError
from rackbook.option_types import above_zero, folder, whole_from_one

DONE, NOTEBOOK_FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 a notebook failed, 2 bad input, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        sys.exit(arguments.command(arguments))
    except RackbookError as problem:
        print(f"rackbook: {problem}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        print("rackbook: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `rackbook list | head`
        sys.stderr.close()
        sys.exit(DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rackbook",
        description="Reproduce, audit and re-measure rack-scale LLM serving results, one notebook per question.",
    )
    parser.add_argument("--version", action="version", version=f"rackbook {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = parsers.command(commands, "list", _list, "the notebooks, what they ask, and their parameters")
    _add_names(command)

    command = parsers.command(commands, "run", _run, "execute notebooks in batch and write the report")
    _add_names(command)
    command.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="set a parameter of the selected notebooks that have it; a list is 32,64, nothing is none; repeatable; "
        "16,32 for a single number runs a sweep over its values",
    )  # fmt: skip
    command.add_argument(
        "--jobs", type=whole_from_one, metavar="N",
        help="notebooks at a time (default: one per core; one where something is measured)",
    )  # fmt: skip
    command.add_argument(
        "--timeout", type=above_zero, metavar="SECONDS",
        help="longest time of one notebook (default: 1800); a measurement has at least twice what its plan says",
    )  # fmt: skip
    _add_out(command)
    from rackbook.commands.sweeps import add_options

    add_options(command)

    command = parsers.command(commands, "claims", _claims, "the score board: every claim and its verdict")
    command.add_argument("--json", action="store_true", help="as a list of objects")

    command = parsers.command(commands, "report", _report, "write the report again from executed notebooks")
    _add_out(command)

    command = parsers.command(
        commands, "refresh", _refresh, "execute the committed notebooks in place, on their defaults"
    )
    _add_names(command)
    command.add_argument("--jobs", type=whole_from_one, metavar="N", help="notebooks at a time (default: one per core)")

    command = parsers.command(commands, "lab", _lab, "open JupyterLab on the notebooks, on this machine only")
    command.add_argument(
        "options", nargs="*", metavar="OPTION", help="for JupyterLab, after --, e.g. rackbook lab -- --no-browser"
    )

    from rackbook.commands.engine import add_parsers as add_engine_parsers
    from rackbook.commands.hostwork import add_parsers as add_hostwork_parsers
    from rackbook.commands.measurements import add_parsers as add_run_parsers
    from rackbook.commands.plans import add_parsers as add_plan_parsers
    from rackbook.commands.releases import add_parsers
    from rackbook.commands.sweeps import add_parsers as add_suite_parsers

    add_engine_parsers(commands)
    add_parsers(commands)
    add_hostwork_parsers(commands)
    add_plan_parsers(commands)
    add_run_parsers(commands)
    add_suite_parsers(commands)
    return parser


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="06, expert_balance or 06_expert_balance (default: every notebook)"
    )
    parser.add_argument(
        "--notebooks", type=Path, metavar="DIR", help="folder of the notebooks (default: those that come with rackbook)"
    )


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=folder, default=Path("build"), metavar="DIR",
        help="folder for everything that is written (default: build)",
    )  # fmt: skip


def _selected(arguments: argparse.Namespace) -> list:
    from rackbook.locations import NOTEBOOKS
    from rackbook.suite.notebooks import discover, select

    return select(arguments.names, discover(arguments.notebooks or NOTEBOOKS))


def _list(arguments: argparse.Namespace) -> int:
    from rackbook.suite.listing import listing

    print(listing(_selected(arguments)))
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    from rackbook.suite import batch, parameters
    from rackbook.suite.listing import summary

    notebooks = _selected(arguments)
    from rackbook.commands.sweeps import sweep_of_run

    if (sweep := sweep_of_run(notebooks, arguments)) is not None:
        return sweep()
    assignment = parameters.assign(arguments.parameters, notebooks)
    for notice in assignment.notices:
        print(f"note: {notice}", file=sys.stderr)
    folders = batch.Folders(arguments.out)
    limit = arguments.timeout or batch.TIMEOUT_S
    outcomes = batch.execute(
        notebooks, assignment.values, folders, jobs=arguments.jobs, timeout_s=limit, meanwhile=_prepare_report
    )
    from rackbook.suite import report

    report.write(folders)
    print(summary(outcomes, folders))
    return DONE if all(outcome.succeeded for outcome in outcomes) else NOTEBOOK_FAILED


def _prepare_report() -> None:
    from rackbook.suite import report

    report.prepare()


def _claims(arguments: argparse.Namespace) -> int:
    from rackbook.suite import board

    print(board.as_json() if arguments.json else board.as_text())
    return DONE


def _report(arguments: argparse.Namespace) -> int:
    from rackbook.suite import batch, report

    folders = batch.Folders(arguments.out)
    problems = report.write(folders)
    for problem in problems:
        print(f"note: not in the report: {problem}", file=sys.stderr)
    print(folders.report)
    return DONE


def _refresh(arguments: argparse.Namespace) -> int:
    from rackbook.suite import refresh

    return DONE if refresh.refresh(_selected(arguments), jobs=arguments.jobs) else NOTEBOOK_FAILED


def _lab(arguments: argparse.Namespace) -> int:
    from rackbook.suite import lab

    return lab.start(arguments.options)
