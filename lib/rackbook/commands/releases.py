"""``rackbook releases``: probe one release, keep the map up to date, check any list of pull requests.

Imported to build the parser, so everything that takes time to import is imported when a command runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackbook.commands import parsers
from rackbook.locations import shown
from rackbook.releases import MAP, PRS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rackbook.releases.probes import ChangeList, Judgement
    from rackbook.releases.targets import Shelf, Target

_WORDS = {True: "yes", False: "no", None: "?"}
_NEWEST = 5


def add_parsers(commands: Any) -> None:
    """Add ``releases`` and its commands.

    Args:
        commands: the sub-parsers of the program; each command sets ``command``, a function of the parsed arguments
            that returns the exit status.
    """
    summary = "which release of a package has which change, by what its wheel holds"
    inner = parsers.group(commands, "releases", summary)

    command = parsers.command(inner, "probe", _probe, "look into one release, wheel, checkout or installation")
    command.add_argument(
        "target", nargs="?", default="latest", metavar="TARGET",
        help="PACKAGE==VERSION, VERSION, latest, installed, a wheel file or a folder (default: latest)",
    )  # fmt: skip
    _add_prs(command)
    command.add_argument("--json", action="store_true", help="as an object")
    _add_cache(command)

    command = parsers.command(inner, "update", _update, "bring the release map up to date with the package index")
    command.add_argument(
        "versions", nargs="*", metavar="VERSION",
        help="releases to add (default: every one that is newer than the map)",
    )  # fmt: skip
    _add_prs(command)
    command.add_argument(
        "--map", type=Path, default=MAP, metavar="FILE",
        help="the map to write (default: the one that comes with rackbook)",
    )  # fmt: skip
    _add_cache(command)

    command = parsers.command(inner, "check", _check, "which release has which change, for any project's list")
    command.add_argument("prs", type=Path, metavar="PRS", help="list of pull requests, a TOML file")
    command.add_argument(
        "targets", nargs="*", metavar="TARGET",
        help=f"as for probe, any number (default: the {_NEWEST} newest releases)",
    )  # fmt: skip
    command.add_argument(
        "--package", metavar="NAME", help="on the package index (default: the one that the list names)"
    )
    command.add_argument(
        "--platform", metavar="TAG", help="of the wheels, e.g. manylinux*_aarch64 (default: the list's)"
    )
    command.add_argument("--json", action="store_true", help="as an object")
    _add_cache(command)


def _add_prs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prs", type=Path, default=PRS, metavar="FILE",
        help="list of pull requests (default: the one that comes with rackbook)",
    )  # fmt: skip


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-cache", action="store_true", help="read again what was read before")


def _shelf(changes: ChangeList, arguments: argparse.Namespace) -> Shelf:
    from rackbook import cache
    from rackbook.releases.targets import Shelf

    kept = None if arguments.no_cache else cache.folder("wheels")
    return Shelf(changes.package, changes.platform, cache=kept, say=_say)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _say_amount(target: Target) -> None:
    if target.file is not None:
        _say(f"{target.label}: {target.reading}")


def _probe(arguments: argparse.Namespace) -> int:
    from rackbook.releases import probes, release_map

    changes = probes.read(arguments.prs)
    target = _shelf(changes, arguments).open(arguments.target)
    judged, commit = release_map.look(changes, target)
    _say_amount(target)
    if arguments.json:
        print(json.dumps(_as_object(changes, target, judged, commit), indent=1, ensure_ascii=False))
        return 0
    print(f"{changes.package} {target.label}" + (f", commit {commit}" if commit else ""))
    rows = [
        (f"#{change.number}", _WORDS[judged[change.number].contained], change.title, _seen(judged[change.number]))
        for change in changes.changes
    ]
    print(_table(("change", "in", "title", "seen"), rows))
    return 0


def _update(arguments: argparse.Namespace) -> int:
    from rackbook.releases import probes, release_map

    changes = probes.read(arguments.prs)
    old = release_map.read(arguments.map) if arguments.map.is_file() else None
    new = release_map.update(
        changes, _shelf(changes, arguments), old,
        versions=arguments.versions, today=datetime.datetime.now(datetime.UTC).date(), say=_say,
    )  # fmt: skip
    changed = release_map.write(new, arguments.map)
    print(
        _matrix([(change.pr, change.title, list(change.releases.values())) for change in new.prs], list(new.releases))
    )
    print(f"{shown(arguments.map)}: {'written' if changed else 'up to date'}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from rackbook.releases import probes, release_map

    changes = probes.read(arguments.prs)
    given = {"package": arguments.package, "platform": arguments.platform}
    changes = changes.model_copy(update={name: value for name, value in given.items() if value is not None})
    shelf = _shelf(changes, arguments)
    targets = [shelf.open(name) for name in arguments.targets or shelf.page.stable[-_NEWEST:]]
    found = []
    for target in targets:
        found.append((target, *release_map.look(changes, target)))
        _say_amount(target)
    if arguments.json:
        objects = [_as_object(changes, target, judged, commit) for target, judged, commit in found]
        print(json.dumps(objects, indent=1, ensure_ascii=False))
        return 0
    print(f"{changes.package}: yes, no, or ? where that cannot be told")
    rows = [
        (change.number, change.title, [judged[change.number].contained for _, judged, _ in found])
        for change in changes.changes
    ]
    print(_matrix(rows, [target.label for target in targets]))
    return 0


def _seen(judgement: Judgement) -> str:
    places = [sighting.at for sighting in judgement.sightings if sighting.at and sighting.says is not None]
    return judgement.note or ", ".join(places) or "nothing of it"


def _as_object(
    changes: ChangeList, target: Target, judged: dict[int, Judgement], commit: str | None
) -> dict[str, object]:
    return {
        "package": changes.package,
        "release": target.label,
        "commit": commit,
        "prs": [
            {
                "pr": change.number,
                "title": change.title,
                "contained": judged[change.number].contained,
                "note": judged[change.number].note,
                "probes": [
                    probe.model_dump(include={"kind", "path", "pattern", "confidence"}) | sighting.model_dump()
                    for probe, sighting in zip(change.probes, judged[change.number].sightings, strict=True)
                ],
            }
            for change in changes.changes
        ],
    }


def _matrix(rows: Sequence[tuple[int, str, Sequence[bool | None]]], labels: Sequence[str]) -> str:
    return _table(
        ("change", *labels, "title"),
        [(f"#{number}", *(_WORDS[contained] for contained in found), title) for number, title, found in rows],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
