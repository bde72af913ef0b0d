"""Frames whose columns have the types of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from rackbook.tables import column


def frame(names: Sequence[str], rows: Iterable[Mapping[str, Any]] = ()) -> pl.DataFrame:
    """Rows with these columns of the vocabulary, in this order; empty without rows.

    Args:
        names: the columns.
        rows: each has a value for every column; what else it has is left out.
    """
    return pl.DataFrame(
        [{name: row[name] for name in names} for row in rows], schema={name: column(name).dtype for name in names}
    )
