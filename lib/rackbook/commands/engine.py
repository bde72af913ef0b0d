"""``rackbook engine``: the CPU lab's server that stays.

Imported to build the parser, so everything that takes time to import is imported when a command runs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rackbook.commands import parsers
from rackbook.option_types import whole_from_one


def add_parsers(commands: Any) -> None:
    """Add ``engine`` and its commands.

    Args:
        commands: the sub-parsers of the program; each command sets ``command``, a function of the parsed arguments
            that returns the exit status.
    """
    summary = "the CPU lab: a real vLLM with a tiny model on this machine's cores"
    inner = parsers.group(commands, "engine", summary)

    command = parsers.command(inner, "up", _up, "install the lab if needed and start its server, on 127.0.0.1 only")
    command.add_argument(
        "--ranks", type=whole_from_one, default=1, metavar="N", help="data-parallel ranks (default: 1)"
    )  # fmt: skip
    command.add_argument("--port", type=_port, metavar="P", help="where it listens (default: a free one)")
    parsers.command(inner, "status", _status, "what runs, since when, and where it answers")
    parsers.command(inner, "down", _down, "end the server")


def _up(arguments: argparse.Namespace) -> int:
    from rackbook.engine import resident
    from rackbook.engine.lab import Lab

    server, started = resident.up(Lab(), arguments.ranks, arguments.port, _say)
    print(f"{'started' if started else 'runs already'}: {server.text()}")
    return 0


def _status(_arguments: argparse.Namespace) -> int:
    from rackbook.engine import resident
    from rackbook.engine.lab import Lab

    lab, server = Lab(), resident.read()
    print(f"lab {'installed' if lab.is_installed else 'not installed'} in {lab.folder}")
    print(server.text() if server is not None else "no server runs")
    return 0


def _down(_arguments: argparse.Namespace) -> int:
    from rackbook.engine import resident

    server = resident.down(_say)
    print("no server ran" if server is None else f"ended the server at {server.base_url}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _port(text: str) -> int:
    if not text.isdigit() or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: 1024 to 65535")
    return int(text)
