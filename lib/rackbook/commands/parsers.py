"""How every command is added to the parser; imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: the sub-parsers that it belongs to.
        name: as it is typed.
        function: what it does; takes the parsed arguments and returns the exit status.
        summary: what it does, in the words of the help.
    """
    parser = _parser(commands, name, summary)
    parser.set_defaults(command=function)
    return parser


def group(commands: Any, name: str, summary: str) -> Any:
    """Add a command that has commands of its own; returns their sub-parsers. Arguments as for :func:`command`."""
    return _parser(commands, name, summary).add_subparsers(title="commands", metavar="COMMAND", required=True)


def _parser(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
