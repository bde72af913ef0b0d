"""The experiments: one question, one notebook, one module of the same name.

Each module has ``Params`` (the validated parameters of its notebook), ``collect(params)`` (the evidence),
and ``CHECKS`` (one function per claim).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rackbook.errors import DataError, one_of
from rackbook.locations import NOTEBOOKS

if TYPE_CHECKING:
    from types import ModuleType


def notebook_names() -> dict[str, str]:
    """Notebook name by topic, in notebook order, e.g. ``{"context_sweep": "01_context_sweep"}``."""
    return {path.stem.partition("_")[2]: path.stem for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}


def load(topic: str) -> ModuleType:
    """Import the experiment of a topic.

    Raises:
        DataError: there is no such experiment.
    """
    name = f"{__name__}.{topic}"
    if not topic.isidentifier() or find_spec(name) is None:
        raise DataError(one_of(topic, notebook_names(), "experiment"))
    return import_module(name)
