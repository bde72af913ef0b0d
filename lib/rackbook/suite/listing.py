"""What the command line prints about notebooks and runs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from rackbook.suite.batch import Folders
from rackbook.suite.notebooks import Notebook
from rackbook.suite.outcomes import Outcome
from rackbook.suite.progress import first_line


def listing(notebooks: Sequence[Notebook]) -> str:
    """Notebooks with their question and their parameters: name, type, default, unit, meaning."""
    width = max(60, min(shutil.get_terminal_size().columns, 130))
    lines = []
    for notebook in notebooks:
        lines.append(notebook.name)
        lines += textwrap.wrap(notebook.question or notebook.title, width, initial_indent="  ", subsequent_indent="  ")
        for p in notebook.parameters:
            unit = "" if p.unit == "-" else f" [{p.unit}]"
            head = f"    {p.name}: {p.kind} = {_literal(p.default)}{unit}  "
            lines += textwrap.wrap(p.meaning, width, initial_indent=head, subsequent_indent=8 * " ")
        lines.append("")
    return "\n".join(lines).rstrip()


def _literal(value: object) -> str:
    """A default as it is typed after ``-p``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(_literal(item) for item in value) or '""'
    return str(value) or '""'


def summary(outcomes: Sequence[Outcome], folders: Folders) -> str:
    """What a run leaves: how many notebooks succeeded, why the others failed, and where everything is."""
    failed = [outcome for outcome in outcomes if not outcome.succeeded]
    lines = [f"{len(outcomes) - len(failed)} of {len(outcomes)} notebooks done, {len(failed)} failed"]
    for outcome in failed:
        where = f" (code cell {outcome.failed_cell})" if outcome.failed_cell else ""
        lines.append(f"  {outcome.notebook}{where}: {first_line(outcome.reason)}")
    lines += [
        f"report     {folders.report}",
        f"notebooks  {folders.notebooks}/",
        f"charts     {folders.charts}/<notebook>/<chart>.svg, .png, .vl.json",
    ]
    return "\n".join(lines)
