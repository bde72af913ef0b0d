"""Imports that would be slow for nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_iri_grammar() -> Iterator[None]:
    """Import jsonschema inside this block without its check of internationalised web addresses.

    That check builds an Earley grammar at import, 2.6 s of each process that imports nbformat or Altair. Neither uses
    it. The package itself stays importable afterwards.
    """
    name = "rfc3987_syntax"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # makes the optional import fail at once
    try:
        yield
    finally:
        del sys.modules[name]
