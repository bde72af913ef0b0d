"""``rackbook plan``: what a live notebook would run on a cluster, printed and not run.

Imported to build the parser, so everything that takes time to import is imported when the command runs.
"""

from __future__ import annotations

import argparse
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackbook.commands import parsers

if TYPE_CHECKING:
    from rackbook.engine.plan import Plan
    from rackbook.suite.notebooks import Kind, Notebook


def add_parsers(commands: Any) -> None:
    """Add ``plan``.

    Args:
        commands: the sub-parsers of the program; the command sets ``command``, a function of the parsed arguments that
            returns the exit status.
    """
    summary = "what a live notebook would run on a cluster: every process, without running it"
    parser = parsers.command(commands, "plan", _plan, summary)
    parser.add_argument("name", metavar="NAME", help="01, context_sweep or 01_context_sweep")
    parser.add_argument(
        "--cluster", metavar="CLUSTER", help="a name in data/clusters or a TOML file (default: the notebook's)"
    )
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="a name in data/recipes or a TOML file (default: the cluster's)"
    )
    parser.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="set a parameter of the notebook or of the measurement; a list is 32,64, nothing is none; repeatable",
    )  # fmt: skip


def plan(
    name: str, pairs: list[tuple[str, str]], cluster: str | None, recipe: str | None, folder: Path | None = None
) -> Plan:
    """What a notebook would run.

    Args:
        name: of the notebook, its topic or its number.
        pairs: parameters as typed.
        cluster: name or file; the notebook's parameter if None.
        recipe: name or file; the cluster's if None.
        folder: of the notebooks; those of the project if None.

    Raises:
        DataError: an unknown notebook, or one that measures nothing; an unknown or malformed cluster or recipe.
        ParameterError: an unknown parameter, or a value that is not allowed.
        UnfitError: the cluster cannot do it.
    """
    from rackbook import plans
    from rackbook.errors import ParameterError, one_of
    from rackbook.locations import NOTEBOOKS
    from rackbook.suite import parameters
    from rackbook.suite.notebooks import discover, select

    (notebook,) = select([name], discover(folder or NOTEBOOKS))
    settings = plans.load(notebook.topic).Settings
    kinds = {key: _kind(field.annotation) for key, field in settings.model_fields.items()}
    declared = [parameter.name for parameter in notebook.parameters]
    own = [(key, text) for key, text in pairs if key in declared]
    given = parameters.assign(own, [notebook]).values[notebook.name]
    for key, text in pairs:
        if key in declared:
            continue
        if key not in kinds:
            raise ParameterError(one_of(key, {*declared, *kinds}, f"parameter of {notebook.name}"))
        if key in given:
            raise ParameterError(f"parameter {key} is given twice")
        try:
            given[key] = parameters.parse(text, kinds[key])
        except ValueError as problem:
            raise ParameterError(f"{notebook.name}, {key}: got {text!r}, allowed: {problem}") from None
    values = {parameter.name: parameter.default for parameter in notebook.parameters} | given
    where = cluster or values.get("cluster") or _missing_cluster(notebook)
    return plans.plan(notebook.topic, {key: values[key] for key in kinds if key in values}, where, recipe)


def _missing_cluster(notebook: Notebook) -> str:
    from rackbook import clusters
    from rackbook.errors import ParameterError

    raise ParameterError(
        f"{notebook.name} names no cluster: give --cluster, one of {', '.join(clusters.names())}, or a TOML file"
    )


def _kind(annotation: Any) -> Kind:
    """The declared type of a setting, as parameters of notebooks have it."""
    from rackbook.suite.notebooks import Kind

    parts = [annotation]
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        optional = len(parts) < len(typing.get_args(annotation))
    (found,) = parts
    if typing.get_origin(found) is list:
        (inner,) = typing.get_args(found)
        if typing.get_origin(inner) is typing.Annotated:
            inner = typing.get_args(inner)[0]
        return Kind(inner.__name__, is_list=True, optional=optional)
    return Kind(found.__name__, optional=optional)


def _plan(arguments: argparse.Namespace) -> int:
    found = plan(arguments.name, arguments.parameters, arguments.cluster, arguments.recipe)
    print(found.text(whole=True))
    return 0
