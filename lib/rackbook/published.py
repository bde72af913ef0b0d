"""The published points: ``data/published/*.csv`` and the register of sources they cite."""

from __future__ import annotations

import datetime
from functools import cache
from typing import Literal

import polars as pl
from pydantic import BaseModel, ConfigDict

from rackbook import records
from rackbook.errors import DataError, one_of
from rackbook.locations import DATA, shown
from rackbook.tables import PUBLISHED, schema


class Source(BaseModel):
    """One document or data set that numbers come from.

    Attributes:
        title: what it is called.
        role: "primary" for the two reports under audit, "outside" for facts from elsewhere.
        date: of publication, or of the copy that was read; None where neither is known, and the note says so.
        licence: of the document, "not stated" where it states none.
        where: how to find it.
        note: what it is, in a sentence.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    role: Literal["primary", "outside"]
    date: datetime.date | None = None
    licence: str
    where: str
    note: str


@cache
def sources() -> dict[str, Source]:
    """All sources by id.

    Raises:
        DataError: ``data/sources.toml`` is malformed.
    """
    path = DATA / "sources.toml"
    entries = records.load(path)
    return {key: records.checked(entry, Source, f"{shown(path)}: {key}") for key, entry in entries.items()}


def source(key: str) -> Source:
    """Look a source up by id.

    Raises:
        DataError: no such source.
    """
    if key not in sources():
        raise DataError(one_of(key, sources(), "source"))
    return sources()[key]


def read(table: str) -> pl.DataFrame:
    """Published points of one table.

    Args:
        table: name of a schema in :mod:`rackbook.tables`, also the file name in ``data/published``.

    Returns:
        One row per point, as the schema says; origin is "published" and the source is registered.

    Raises:
        DataError: unknown table, or a row that breaks the schema.
    """
    if table not in PUBLISHED:
        raise DataError(one_of(table, PUBLISHED, "published table"))
    path = DATA / "published" / f"{table}.csv"
    frame = schema(table).read_csv(path)
    for number, row in enumerate(frame.iter_rows(named=True), start=2):
        where = f"{shown(path)}, row {number}"
        if row["origin"] != "published":
            raise DataError(f"{where}, column origin: got {row['origin']!r}, allowed: published")
        if row["source"] not in sources():
            raise DataError(f"{where}, column source: {one_of(row['source'], sources(), 'source')}")
    return frame
