"""Tidy tables: the vocabulary of columns, the schemas of the published tables, and their checks."""

from rackbook.tables.columns import COLUMNS, ORIGINS, Column, column, require, title
from rackbook.tables.schema import Schema
from rackbook.tables.schemas import PUBLISHED, SCHEMAS, schema

__all__ = [
    "COLUMNS",
    "ORIGINS",
    "PUBLISHED",
    "SCHEMAS",
    "Column",
    "Schema",
    "column",
    "require",
    "schema",
    "title",
]
