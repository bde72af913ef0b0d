"""Which part of a step a GPU kernel belongs to, by its name: ordered patterns, the first that is found wins."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import polars as pl
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rackbook import records
from rackbook.errors import DataError
from rackbook.locations import DATA, shown
from rackbook.tables import require

UNASSIGNED = "unassigned"
"""The component, and the part, of a kernel whose name no pattern finds."""

PARTS = ("moe", "attention_indexer", "rest")
"""The parts of the published breakdown; the last is what the other two leave."""

STATISTICS = ("min", "median", "max")
"""How the times of one kernel on several ranks may become one."""

_ANONYMOUS = re.compile(r"(<unnamed>|\(anonymous namespace\))::")
_GENERIC = re.compile(r"(^|::)(device_kernel|[Kk]ernel[0-9]*|KernelWrapper)$")
_COPY = re.compile(r"(Memcpy|Memset)\b")
_BRACKETS = {"<": ">", "(": ")", "[": "]"}


def _own_name(name: str) -> str:
    if name == UNASSIGNED:
        raise ValueError(f"{UNASSIGNED!r} is the name of what no pattern finds")
    return name


def _regular_expression(pattern: str) -> str:
    try:
        compiled = re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"not a regular expression: {problem}") from None
    if compiled.search(""):
        raise ValueError("the pattern is found in every name, also in an empty one")
    return pattern


class Component(BaseModel):
    """One component and the names of its kernels.

    Attributes:
        name: the component.
        meaning: what its kernels do.
        part: the part of the published breakdown that it counts to.
        pattern: regular expression, searched in the short name of a kernel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1), AfterValidator(_own_name)]
    meaning: str
    part: Literal["moe", "attention_indexer", "rest"]
    pattern: Annotated[str, AfterValidator(_regular_expression)]


class Patterns(BaseModel):
    """The components in the order in which they are tried.

    Attributes:
        component: the components; the file's ``[[component]]`` tables.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    component: Annotated[tuple[Component, ...], Field(strict=False, min_length=1)]

    @property
    def names(self) -> list[str]:
        """The components, in order, without ``unassigned``."""
        return [component.name for component in self.component]

    def part(self, component: str) -> str:
        """The published part of a component; ``unassigned`` is a part of its own."""
        return self._parts.get(component, UNASSIGNED)

    def of(self, kernel: str) -> str:
        """The component of a kernel, by its full or its short name."""
        name = short_name(kernel)
        return next((component for component, pattern in self._compiled if pattern.search(name)), UNASSIGNED)

    @cached_property
    def _compiled(self) -> list[tuple[str, re.Pattern[str]]]:
        return [(component.name, re.compile(component.pattern)) for component in self.component]

    @cached_property
    def _parts(self) -> dict[str, str]:
        return {component.name: component.part for component in self.component}


def read_patterns(path: str | Path = "") -> Patterns:
    """Read the patterns.

    Args:
        path: a TOML file like ``data/kernel_patterns.toml``; empty for that one.

    Raises:
        DataError: no such file, or an entry is malformed or stands twice; names the entry.
    """
    file = Path(path) if path else DATA / "kernel_patterns.toml"
    content = records.load(file)
    entries = content.get("component")
    if isinstance(entries, list):
        for number, entry in enumerate(entries, start=1):
            label = entry.get("name") if isinstance(entry, dict) else None
            records.checked(entry, Component, f"{shown(file)}: component {number} ({label or 'without name'})")
    patterns = records.checked(content, Patterns, shown(file))
    for number, name in enumerate(patterns.names, start=1):
        if (first := patterns.names.index(name) + 1) < number:
            raise DataError(f"{shown(file)}: component {number} ({name}): the name stands at component {first} already")
    return patterns


def short_name(kernel: str) -> str:
    """A kernel's name without return type, arguments and template arguments.

    The first template argument stays where the name alone says nothing: ``cutlass::device_kernel<Op>``. A short name
    is its own short name; so are the name of a copy or a fill, and one whose brackets do not match.
    """
    if _COPY.match(kernel):
        return kernel
    text = _ANONYMOUS.sub("", kernel.strip())
    outside, template, closing = "", "", ""
    for previous, character in zip(f" {text}", text, strict=False):
        if closing and character == closing[-1] and (previous, character) != ("-", ">"):
            closing = closing[:-1]
            template += character if closing else ""
        elif character in _BRACKETS:
            if not closing and character == "(":
                break
            template += character if closing else ""
            closing += _BRACKETS[character]
        elif closing:
            template += character
        else:
            outside, template = outside + character, ""
    words = outside.split()
    if closing or not words:
        return kernel
    first = re.split(r"[<>(,]", template, maxsplit=1)[0].removeprefix("void ").strip()
    return f"{words[-1]}<{first}>" if first and _GENERIC.search(words[-1]) else words[-1]


def over_ranks(kernels: pl.DataFrame, statistic: str) -> pl.DataFrame:
    """One time per kernel out of those of several ranks; kernels of one short name are added up first.

    A rank that did not run a kernel counts with no time. The least time of a kernel that waits for other ranks is the
    one nearest to its own work.

    Args:
        kernels: table ``kernel_times`` of one run.
        statistic: "min", "median" or "max" over the ranks.

    Returns:
        kernel (short name), kernel_us, calls_per_forward (median over the ranks), step_share_percent (of the time of
        all kernels), longest first. Times and calls are null where the run's are: then shares are all that is known.

    Raises:
        DataError: columns are missing, or the statistic is unknown.
    """
    counted = ("kernel_us", "calls_per_forward", "recording_share_percent")
    require(kernels, ("kernel", "rank", *counted), "over_ranks")
    if statistic not in STATISTICS:
        raise DataError(f"statistic over ranks: got {statistic!r}, allowed: {', '.join(STATISTICS)}")
    names = {name: short_name(name) for name in kernels["kernel"].unique().sort()}
    # a report without ranks is one rank; null would not join with null
    per_rank = (
        kernels.with_columns(
            pl.col("kernel").replace_strict(names, return_dtype=pl.String), pl.col("rank").fill_null(0)
        )
        .group_by("kernel", "rank")
        .agg(pl.col(counted).sum())
    )
    every = per_rank.select(pl.col("kernel").unique()).join(per_rank.select(pl.col("rank").unique()), how="cross")
    known = _known(kernels)
    time = pl.col("kernel_us" if known else "recording_share_percent")
    return (
        every.join(per_rank, on=["kernel", "rank"], how="left")
        .with_columns(pl.col(counted).fill_null(0.0))
        .sort("kernel", "rank")
        .group_by("kernel", maintain_order=True)
        .agg(
            {"min": time.min(), "median": time.median(), "max": time.max()}[statistic].alias("time"),
            pl.col("calls_per_forward").median(),
        )
        .sort("time", "kernel", descending=[True, False])
        .select(
            "kernel",
            _if(known, pl.col("time")).alias("kernel_us"),
            _if(known, pl.col("calls_per_forward")).alias("calls_per_forward"),
            (100 * pl.col("time") / pl.col("time").sum()).alias("step_share_percent"),
        )
    )


def by_component(kernels: pl.DataFrame, patterns: Patterns) -> pl.DataFrame:
    """The time of each component, and its share of the time of all kernels.

    Kernels on parallel streams overlap, so the shares are of the summed kernel time, not of the span of the step.

    Args:
        kernels: from :func:`over_ranks`.
        patterns: the components.

    Returns:
        component, part_of_step, kernel_us (null if the kernels' are), step_share_percent, num_kernels; one row per
        component of ``patterns`` in their order, also where it has no kernel, then ``unassigned``.
    """
    times = ("kernel_us", "step_share_percent")
    assigned = kernels.with_columns(_component(kernels, patterns))
    found = assigned.group_by("component").agg(pl.col(times).sum(), pl.len().cast(pl.Int64).alias("num_kernels"))
    components = [*patterns.names, UNASSIGNED]
    return (
        pl.DataFrame({"component": components, "part_of_step": [patterns.part(name) for name in components]})
        .join(found, on="component", how="left", maintain_order="left")
        .with_columns(pl.col(times).fill_null(0.0), pl.col("num_kernels").fill_null(0))
        .with_columns(_if(_known(kernels), pl.col("kernel_us")).alias("kernel_us"))
        .select("component", "part_of_step", "kernel_us", "step_share_percent", "num_kernels")
    )


def unassigned(kernels: pl.DataFrame, patterns: Patterns) -> pl.DataFrame:
    """The kernels that no pattern finds, longest first.

    Args:
        kernels: from :func:`over_ranks`.
        patterns: the components.

    Returns:
        kernel, kernel_us, step_share_percent (of the time of all kernels), calls_per_forward.
    """
    return (
        kernels.with_columns(_component(kernels, patterns))
        .filter(pl.col("component") == UNASSIGNED)
        .select("kernel", "kernel_us", "step_share_percent", "calls_per_forward")
    )


def _component(kernels: pl.DataFrame, patterns: Patterns) -> pl.Series:
    return pl.Series("component", [patterns.of(kernel) for kernel in kernels["kernel"]], dtype=pl.String)


def _known(kernels: pl.DataFrame) -> bool:
    """Whether times per forward pass are; they are of all kernels of a run or of none."""
    return kernels["kernel_us"].null_count() == 0


def _if(known: bool, amount: pl.Expr) -> pl.Expr:
    return amount if known else pl.lit(None, pl.Float64)
