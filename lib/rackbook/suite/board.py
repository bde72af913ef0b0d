"""The score board on the command line."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Any

from rackbook.claims import Verdicts, shown_value
from rackbook.experiments import notebook_names
from rackbook.experiments.overview import board
from rackbook.suite.verdicts import ORDER


def records(verdicts: Verdicts | None = None) -> list[dict[str, Any]]:
    """Every claim with its verdict and the notebook that judges it, as plain values.

    Args:
        verdicts: what to list; every claim, judged now on the experiments' defaults, if None.
    """
    names = notebook_names()
    found = board() if verdicts is None else verdicts
    return [record | {"notebook": names.get(record["topic"])} for record in found.records()]


def as_json(verdicts: Verdicts | None = None) -> str:
    """The board as a JSON list of objects."""
    return json.dumps(records(verdicts), indent=2, ensure_ascii=False, allow_nan=False)


def as_text(verdicts: Verdicts | None = None, width: int | None = None) -> str:
    """The board as a table that fits the terminal, what contradicts a source first.

    Args:
        verdicts: as for :func:`records`.
        width: columns; those of the terminal if None.
    """
    width = max(72, min(width or shutil.get_terminal_size().columns, 160))
    rows = sorted(records(verdicts), key=lambda r: ORDER.index(r["verdict"]))
    heads = ("verdict", "published", "here", "unit", "nb")
    short = [
        (r["verdict"], shown_value(r["value"]), shown_value(r["found"]), r["unit"], (r["notebook"] or "–")[:2])
        for r in rows
    ]
    sizes = [max(len(row[i]) for row in (heads, *short)) for i in range(5)]
    sizes[3] = min(sizes[3], 18)
    room = width - sum(sizes) - 2 * 5
    below = room < 30  # too narrow for a column of its own

    def line(values: tuple[str, ...]) -> str:
        verdict, published, here, unit, notebook = values
        return "  ".join(
            (f"{verdict:<{sizes[0]}}", f"{notebook:<{sizes[4]}}", f"{published:>{sizes[1]}}", f"{here:>{sizes[2]}}",
             f"{unit[: sizes[3]]:<{sizes[3]}}")
        )  # fmt: skip

    lines = [line(heads) + ("" if below else "  claim")]
    for values, row in zip(short, rows, strict=True):
        text = textwrap.wrap(row["statement"], width - 4 if below else room)
        first = line(values)
        if below:
            lines += [first.rstrip(), *("    " + part for part in text)]
        else:
            indent = " " * (len(first) + 2)
            lines += [f"{first}  {text[0]}", *(indent + part for part in text[1:])]
    counts = ", ".join(f"{sum(r['verdict'] == word for r in rows)} {word}" for word in ORDER)
    return "\n".join([*lines, "", f"{len(rows)} claims: {counts}"])
