"""What a notebook's ``source`` and ``cluster`` mean: the published points alone, a run now, or a stored run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import polars as pl

from rackbook import runs
from rackbook.claims import Finding
from rackbook.errors import DataError, ParameterError
from rackbook.runs import Run
from rackbook.tables import schema

PUBLISHED, MEASURE = "published", "measure"

SOURCE = "published; measure: run now; or the id or folder of a stored run"
"""Description of the parameter ``source``."""

CLUSTER = "where to measure: a name in data/clusters, or a path to a TOML file"
"""Description of the parameter ``cluster``."""


_DOUBTS = {"run": pl.String, "doubt": pl.String}


class Evidence(Protocol):
    """What a notebook shows, where a run may be among it."""

    @property
    def run(self) -> Run | None:
        """The run; None if there is none."""


def run_of(topic: str, source: str, measure: Callable[[], Run]) -> Run | None:
    """The run that a notebook shows beside the published points.

    Args:
        topic: the experiment.
        source: the parameter.
        measure: records a run and reads it back; called for "measure" only.

    Returns:
        The run; None for "published".

    Raises:
        ParameterError: another word, or a stored run of another experiment.
        DataError: a stored run that was never finished, or is damaged.
    """
    if source == PUBLISHED:
        return None
    if source == MEASURE:
        return measure()
    try:
        run = runs.read(source)
    except DataError as problem:
        raise ParameterError(f"source: {problem}. Allowed: {SOURCE}") from None
    if run.experiment != topic:
        raise ParameterError(f"source: run {run.id} is one of {run.experiment}, this notebook shows {topic}")
    return run


def recorded(topic: str) -> Run | None:
    """The newest run of an experiment that came with the project; None if there is none."""
    return next(iter(runs.committed(topic)), None)


def points_of(run: Run | None, table: str, file: str = "points") -> pl.DataFrame:
    """The points of a run as a table of the schemas; empty without a run.

    Args:
        run: the run; None if there is none.
        table: the schema's name.
        file: which of the run's tables of points.

    Raises:
        DataError: the run has no such table, or it does not keep to the schema.
    """
    return schema(table).frame([] if run is None else run.points(file))


def finding(run: Run | None, points: pl.DataFrame, value: str, conditions: dict[str, Any]) -> Finding | None:
    """What a run says about a claim, under the claim's own conditions and no others.

    Args:
        run: the run; None if there is none.
        points: its points.
        value: column that holds what is claimed.
        conditions: by column, what the claim was stated for; text is compared without regard to case.

    Returns:
        A measured finding; one that found nothing, with the reason, if the run has the point but also doubts about its
        quality, or has several such points; None if the run does not bear on the claim.
    """
    if run is None or any(name not in points.columns for name in (value, *conditions)):
        return None
    here = points.filter(_matches(name, wanted) for name, wanted in conditions.items()).drop_nulls(value)
    if here.is_empty():
        return None
    if run.flags:
        return Finding(None, note=f"run {run.id} measured it, but: {'; '.join(run.flags)}")
    if here.height > 1:
        return Finding(
            None, note=f"run {run.id} has {here.height} points under these conditions, the claim is about one"
        )
    return Finding(here[value][0], "measured", f"run {run.id}")


def _matches(name: str, wanted: Any) -> pl.Expr:
    if isinstance(wanted, str):
        return pl.col(name).str.to_lowercase() == wanted.lower()
    return pl.col(name) == wanted


def description(run: Run | None) -> str:
    """A run in a line, for a subtitle: machine, software, day and doubts."""
    if run is None:
        return "no run"
    machine = run.provenance.get("machine", {})
    gpus = machine.get("gpus")
    what = (
        " and ".join(f"{g['count']}× {g['name']}" for g in gpus) if gpus else machine.get("cpu") or "CPU not recorded"
    )
    version = run.provenance.get("vllm")
    doubts = f"; {len(run.flags)} doubt{'s' if len(run.flags) > 1 else ''}" if run.flags else ""
    return f"{what}, {f'vLLM {version}, ' if version else ''}{run.provenance['started_utc'][:10]}{doubts}"


def doubts(evidence: Evidence) -> pl.DataFrame:
    """What speaks against using the run, one row each; empty without a run or a doubt.

    Returns:
        run, doubt.
    """
    run = evidence.run
    flags = [] if run is None else list(run.flags)
    return pl.DataFrame({"run": [run.id for _ in flags] if run else [], "doubt": flags}, schema=_DOUBTS)
