"""Parameter values from the command line: parsed by the declared type, checked before anything runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackbook.errors import ParameterError, one_of
from rackbook.locations import DATA
from rackbook.suite.notebooks import Kind, Notebook, Parameter

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PATH_UNIT = "path"
"""Unit of a parameter that names a file or folder of the user."""

CLUSTER = "cluster"
"""The parameter of a live notebook that says where to measure: a name of the library's or a file of the user."""

_CLUSTERS = DATA / "clusters"
_SOURCE = "source"
"""The parameter of a live notebook whose text is a word, the id of a run or its folder."""


@dataclass(frozen=True)
class Assignment:
    """Which notebook gets which values.

    Attributes:
        values: by notebook name, the values that were given; an empty dictionary means all defaults.
        notices: what the user should know, e.g. which notebooks lack a parameter.
    """

    values: dict[str, dict[str, Any]]
    notices: tuple[str, ...]


def assign(
    pairs: Iterable[tuple[str, str]], notebooks: Sequence[Notebook], *, folder: Path | None = None
) -> Assignment:
    """Hand ``-p NAME VALUE`` to the selected notebooks that declare NAME.

    A name must be declared by at least one of them; those that lack it run without it, and a notice says so.

    Args:
        pairs: name and text, as typed.
        notebooks: the selected ones.
        folder: what a relative path is relative to; the working folder if None.

    Raises:
        ParameterError: a name that none declares, the same name twice, a value that is not of the declared type or
            that the experiment does not allow.
    """
    several, notices = assign_several(pairs, notebooks, folder=folder, split=False)
    values = {notebook: {name: only for name, (only,) in given.items()} for notebook, given in several.items()}
    for notebook in notebooks:
        if values[notebook.name]:
            check(notebook, values[notebook.name])
    return Assignment(values, notices)


def assign_several(
    pairs: Iterable[tuple[str, str]], notebooks: Sequence[Notebook], *, folder: Path | None = None, split: bool = True
) -> tuple[dict[str, dict[str, list[Any]]], tuple[str, ...]]:
    """As :func:`assign`, but ``16,32,64`` for a parameter that is one number or switch means several values.

    For a parameter that is a list it is one value, for a text too. The experiment's own check is left to the caller.

    Returns:
        By notebook and parameter the values, and the notices.
    """
    given: dict[str, str] = {}
    for name, text in pairs:
        if name in given:
            raise ParameterError(f"parameter {name} is given twice: {given[name]!r} and {text!r}")
        given[name] = text
    values: dict[str, dict[str, list[Any]]] = {n.name: {} for n in notebooks}
    notices = []
    for name, text in given.items():
        holders = [n for n in notebooks if any(p.name == name for p in n.parameters)]
        if not holders:
            where = notebooks[0].name if len(notebooks) == 1 else f"the {len(notebooks)} selected notebooks"
            known = {p.name for n in notebooks for p in n.parameters}
            raise ParameterError(one_of(name, known, f"parameter of {where}"))
        for notebook in holders:
            parameter = notebook.parameter(name)
            swept = split and not parameter.kind.is_list and parameter.kind.scalar != "str"
            try:
                found = [parse(part.strip(), parameter.kind) for part in text.split(",")] if swept else None
                found = found or [parse(text, parameter.kind)]
            except ValueError as problem:
                raise ParameterError(
                    f"{notebook.name}, parameter {name} [{parameter.unit}]: got {text!r}, allowed: {problem}"
                ) from None
            values[notebook.name][name] = [located(value, parameter, folder or Path.cwd()) for value in found]
        if lacking := [n.name for n in notebooks if n not in holders]:
            notices.append(f"{name} is no parameter of {', '.join(lacking)}: run without it")
    return values, tuple(notices)


def parse(text: str, kind: Kind) -> Any:
    """Read a typed value; nothing is guessed from how the text looks.

    Args:
        text: as typed. A list is ``32,64`` or JSON; None is ``none``.
        kind: the declared type.

    Raises:
        ValueError: not of this type; the message says what is allowed.
    """
    if kind.optional and text == "none":
        return None
    optional = ", or none" if kind.optional else ""
    if kind.is_list:
        return _list(text, kind, optional)
    if kind.scalar == "str":
        return text
    if kind.scalar == "bool":
        if text in ("true", "false"):
            return text == "true"
        raise ValueError(f"true or false{optional}")
    if kind.scalar == "int":
        if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
            return int(text)
        raise ValueError(f"a whole number like 1024{optional}")
    return _float(text, optional)


def _float(text: str, optional: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"a number like 0.95 or 1e-3{optional}") from None
    if not math.isfinite(value):
        raise ValueError(f"a finite number{optional}")
    return value


def _list(text: str, kind: Kind, optional: str) -> list[Any]:
    scalar = Kind(kind.scalar)
    if text.lstrip().startswith("["):
        allowed = f"a JSON list of {kind.scalar} values{optional}"
        try:
            items = json.loads(text, parse_constant=_refuse_constant)
        except ValueError:
            raise ValueError(allowed) from None
        if not all(scalar.holds(item) and (isinstance(item, str) or math.isfinite(item)) for item in items):
            raise ValueError(allowed)
        return [float(item) for item in items] if kind.scalar == "float" else items
    if not text.strip():
        return []
    try:
        return [parse(item.strip(), scalar) for item in text.split(",")]
    except ValueError as problem:
        raise ValueError(f"a list like 32,64 whose elements are each {problem}{optional}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def located(value: Any, parameter: Parameter, folder: Path) -> Any:
    """A value that does not depend on the working folder: a path that the user typed is relative to ``folder``."""
    if parameter.name in (_SOURCE, CLUSTER) and isinstance(value, str) and value:
        path = (folder / Path(value).expanduser()).absolute()
        is_name = "/" not in value and (parameter.name == _SOURCE or (_CLUSTERS / f"{value}.toml").is_file())
        return str(path) if not is_name and path.exists() else value
    if parameter.unit != PATH_UNIT or not value:
        return value
    if isinstance(value, list):
        return [str(folder / Path(item).expanduser()) for item in value]
    return str(folder / Path(value).expanduser())


def check(notebook: Notebook, values: dict[str, Any]) -> None:
    """Check values against the experiment's own ``Params``.

    Raises:
        ParameterError: a value out of range, or a combination that the experiment does not allow.
        DataError: the notebook has no experiment.
    """
    from pydantic import ValidationError

    from rackbook.experiments import load

    defaults = {p.name: p.default for p in notebook.parameters}
    try:
        load(notebook.topic).Params(**(defaults | values))
    except ValidationError as problem:
        raise ParameterError(_complaint(problem.errors(include_url=False)[0], notebook)) from None


def _complaint(error: ErrorDetails, notebook: Notebook) -> str:
    """What an experiment does not allow; one of its own rules has its own words."""
    where = notebook.name
    if error["loc"]:
        name = ".".join(str(part) for part in error["loc"])
        units = {p.name: f" [{p.unit}]" for p in notebook.parameters}
        where += f", parameter {name}{units.get(str(error['loc'][0]), '')}"
    if error["type"] == "value_error":
        return f"{where}: {error['ctx']['error']}"
    rule = error["msg"]
    allowed = rule.removeprefix("Input should be ")
    words = f"allowed: {allowed}" if allowed != rule else f"{rule[:1].lower()}{rule[1:]}"
    return f"{where}: got {error['input']!r}, {words}"
