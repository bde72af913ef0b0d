"""Sweeps: which executions a SUITE.toml, or one command line, asks for. Every value is checked before anything runs."""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rackbook.errors import DataError, ParameterError, one_of
from rackbook.locations import shown
from rackbook.suite import parameters
from rackbook.suite.executions import SEED, Execution, Limits
from rackbook.suite.notebooks import Kind, Notebook, select
from rackbook.suite.parameters import CLUSTER

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,59}")
"""Files are called by it."""

_LIMITS = {
    "timeout_s": (float, "a number above 0"),
    "memory_gib": (float, "a number above 0"),
    "gpus": (int, "a whole number from 0"),
    "retries": (int, "a whole number from 0"),
}
_BLOCK = ("notebooks", "set", "grid", "zip", "list", "repeats", "seeds", CLUSTER, *_LIMITS)
_SLURM = {
    "partition": str, "account": str, "qos": str, "constraint": str, "nodes": int, "gpus_per_node": int,
    "cpus_per_task": int, "mem_gib": float, "time_min": int, "max_jobs": int, "per_job": int,
    "local_dir": str,
}  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """Executions that belong together.

    Attributes:
        name: for the report and the jobs.
        executions: each once, in the order of the file.
        slurm: options of the table ``slurm``, checked.
        notices: what the user should know.
    """

    name: str
    executions: tuple[Execution, ...]
    slurm: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def read(path: Path, notebooks: Sequence[Notebook]) -> Sweep:
    """Read a SUITE.toml.

    Args:
        path: the file; a relative path among the parameters is relative to its folder.
        notebooks: those that it may name.

    Raises:
        DataError: not TOML, an unknown or ill-typed entry.
        ParameterError: a parameter that a notebook does not have, or a value that it does not allow.
    """
    where = shown(path)
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{where}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise DataError(f"{where}: not a TOML file ({problem})") from None
    defaults = [*_LIMITS, CLUSTER]
    _known(content, ["name", "sweep", "slurm", *defaults], where, "entry")
    name = content.get("name", path.stem)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DataError(f"{where}, name: got {name!r}, allowed: letters, digits, dots, dashes, at most 60")
    slurm = slurm_options(content.get("slurm", {}), f"{where}, slurm")
    blocks = content.get("sweep")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(b, dict) for b in blocks):
        raise DataError(f"{where}: got no [[sweep]], expected at least one")
    found: list[Execution] = []
    shared = {key: content[key] for key in defaults if key in content}
    for number, block in enumerate(blocks, 1):
        at = f"{where}, sweep {number}"
        _known(block, _BLOCK, at, "entry")
        found += _block(shared | block, notebooks, path.absolute().parent, at)
    executions, notices = _each_once(found)
    return Sweep(name, executions, slurm, notices)


def of_values(
    name: str, values: dict[str, dict[str, list[Any]]], notebooks: Sequence[Notebook], limits: Limits
) -> Sweep:
    """The sweep of a command line: every combination of the values that are given for each notebook.

    Args:
        name: of the sweep.
        values: by notebook and parameter, typed values; one with a single value is not swept.
        notebooks: the selected ones.
        limits: for each execution.
    """
    found = []
    for notebook in notebooks:
        given = values[notebook.name]
        swept = [p for p, several in given.items() if len(several) > 1]
        for combination in itertools.product(*given.values()):
            chosen = dict(zip(given, combination, strict=True))
            parameters.check(notebook, chosen)
            found.append(Execution(notebook, chosen, {p: chosen[p] for p in swept}, 1, limits))
    executions, notices = _each_once(found)
    return Sweep(name, executions, notices=notices)


def slurm_options(options: Any, where: str) -> dict[str, Any]:
    """Check options for Slurm.

    Raises:
        DataError: one that is unknown or of another type.
    """
    _typed(options, dict, where, "a table")
    _known(options, _SLURM, where, "option")
    for key, value in options.items():
        kind = _SLURM[key]
        if kind is str:
            _typed(value, str, f"{where}.{key}", "a text")
        else:
            _number(value, kind, f"{where}.{key}", "a number above 0")
    return dict(options)


def _block(block: dict[str, Any], notebooks: Sequence[Notebook], folder: Path, where: str) -> list[Execution]:
    names = block.get("notebooks")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise DataError(f"{where}, notebooks: got {names!r}, allowed: a list of names, e.g. ['06_expert_balance']")
    fixed = _typed(block.get("set", {}), dict, f"{where}, set", "a table of values")
    axes = _axes(block, where)
    repeats, seeds = _repeats(block, where)
    limits = _limits(block, where)
    found = []
    for notebook in select(names, list(notebooks)):
        at = f"{where}, {notebook.name}"
        cluster = {CLUSTER: block[CLUSTER]} if _has(notebook, CLUSTER) and CLUSTER in block else {}
        base = cluster | fixed
        for chosen in (
            dict(itertools.chain(*(point.items() for point in points))) for points in itertools.product(*axes)
        ):
            swept = _values(chosen, notebook, folder, at)
            values = _values(base, notebook, folder, at) | swept
            for repeat, seed in _seeded(notebook, values, repeats, seeds, at):
                several = repeats > 1 or len(seeds) > 1
                own = {} if seed is None else {SEED: seed}
                parameters.check(notebook, values | own)
                found.append(Execution(notebook, values | own, swept | (own if several else {}), repeat, limits))
    return found


def _axes(block: dict[str, Any], where: str) -> list[list[dict[str, Any]]]:
    """The axes whose product the block asks for, each a list of points."""
    axes: list[list[dict[str, Any]]] = []
    taken: dict[str, str] = dict.fromkeys(block.get("set", {}), "set")

    def take(names: Iterable[str], kind: str) -> None:
        for name in names:
            if name in taken:
                raise DataError(f"{where}: parameter {name} stands in {taken[name]} and in {kind}; it can be in one")
            taken[name] = kind

    grid = _typed(block.get("grid", {}), dict, f"{where}, grid", "a table of lists")
    paired = _typed(block.get("zip", {}), dict, f"{where}, zip", "a table of lists")
    for kind, table in (("grid", grid), ("zip", paired)):
        take(table, kind)
        for name, several in table.items():
            if not isinstance(several, list) or not several:
                raise DataError(f"{where}, {kind}.{name}: got {several!r}, allowed: a list of values")
    axes += [[{name: value} for value in several] for name, several in grid.items()]
    if paired:
        lengths = {name: len(several) for name, several in paired.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{where}, zip: got lists of different lengths {lengths}, allowed: all of one length")
        axes.append([dict(zip(paired, point, strict=True)) for point in zip(*paired.values(), strict=True)])
    points = _typed(block.get("list", []), list, f"{where}, list", "a list of tables")
    if points:
        if not all(isinstance(point, dict) and point for point in points):
            raise DataError(f"{where}, list: each entry must be a table of values, e.g. {{ ranks = 16 }}")
        take({name for point in points for name in point}, "list")
        axes.append(points)
    return axes


def _repeats(block: dict[str, Any], where: str) -> tuple[int, list[int]]:
    repeats = int(_number(block.get("repeats", 1), int, f"{where}, repeats", "a whole number from 1"))
    seeds = block.get("seeds", [])
    if not isinstance(seeds, list) or not all(Kind("int").holds(seed) for seed in seeds):
        raise DataError(f"{where}, seeds: got {seeds!r}, allowed: a list of whole numbers")
    if len(set(seeds)) < len(seeds):
        raise DataError(f"{where}, seeds: got {seeds!r}, in which one stands twice")
    if seeds and "repeats" in block:
        raise DataError(f"{where}: got both repeats and seeds, allowed: one of them")
    return repeats, seeds


def _seeded(
    notebook: Notebook, values: dict[str, Any], repeats: int, seeds: list[int], where: str
) -> list[tuple[int, int | None]]:
    """Number and seed of each repeat; the seeds of plain repeats count up from the one the notebook would take."""
    if not _has(notebook, SEED):
        if seeds:
            raise ParameterError(f"{where}: got seeds, but the notebook has no parameter {SEED}; use repeats")
        return [(number, None) for number in range(1, repeats + 1)]
    if (repeats > 1 or seeds) and SEED in values:
        raise DataError(f"{where}: {SEED} is set, and repeats or seeds would set it too; use one of them")
    if seeds:
        return list(enumerate(seeds, 1))
    if repeats == 1:
        return [(1, None)]
    first = notebook.parameter(SEED).default
    return [(number, first + number - 1) for number in range(1, repeats + 1)]


def _limits(block: dict[str, Any], where: str) -> Limits:
    given = {}
    for name, (kind, allowed) in _LIMITS.items():
        if name in block:
            given[name] = _number(block[name], kind, f"{where}, {name}", allowed)
    return replace(Limits(), **given)


def _values(given: dict[str, Any], notebook: Notebook, folder: Path, where: str) -> dict[str, Any]:
    """Values from a file, of the declared types; a path is relative to the file's folder."""
    found = {}
    for name, value in given.items():
        if not _has(notebook, name):
            raise ParameterError(f"{where}: {one_of(name, [p.name for p in notebook.parameters], 'parameter')}")
        parameter = notebook.parameter(name)
        if parameter.kind.optional and value == "none":
            value = None
        if not parameter.kind.holds(value) or (isinstance(value, float) and not math.isfinite(value)):
            hint = (
                f"; in grid and zip each value of a list is itself a list, like [[{value}]]"
                if (parameter.kind.is_list and not isinstance(value, list))
                else ""
            )
            raise ParameterError(f"{where}, {name} [{parameter.unit}]: got {value!r}, allowed: {parameter.kind}{hint}")
        if parameter.kind.scalar == "float" and value is not None:
            value = [float(v) for v in value] if parameter.kind.is_list else float(value)
        found[name] = parameters.located(value, parameter, folder)
    return found


def _each_once(executions: list[Execution]) -> tuple[tuple[Execution, ...], tuple[str, ...]]:
    found: dict[str, Execution] = {}
    for execution in executions:
        found.setdefault(execution.request, execution)
    twice = len(executions) - len(found)
    notices = (f"{twice} of {len(executions)} executions are asked for twice; each runs once",) if twice else ()
    return tuple(found.values()), notices


def _has(notebook: Notebook, name: str) -> bool:
    return any(p.name == name for p in notebook.parameters)


def _known(table: dict[str, Any], allowed: Iterable[str], where: str, what: str) -> None:
    for key in table:
        if key not in allowed:
            raise DataError(f"{where}: {one_of(key, allowed, what)}")


def _typed(value: Any, kind: type, where: str, allowed: str) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"{where}: got {value!r}, allowed: {allowed}")
    return value


def _number(value: Any, kind: type, where: str, allowed: str) -> float:
    least = 0 if allowed.endswith("from 0") else 1 if allowed.endswith("from 1") else math.ulp(0.0)
    if not Kind(kind.__name__).holds(value) or not least <= value < math.inf:
        raise DataError(f"{where}: got {value!r}, allowed: {allowed}")
    return kind(value)
