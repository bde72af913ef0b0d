"""Kernel profiles: the time of each GPU kernel, from ``vllm bench forward --profile-dir`` or from Nsight Systems.

Two formats, told apart by their content: the ``<case>.rank<r>.kernels.json`` that ``bench forward`` writes for each
rank, and the ``cuda_gpu_kern_sum`` report of ``nsys stats`` as CSV.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from rackbook import records
from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.tables import schema

SUFFIX = ".kernels.json"
_RANK_FILE = re.compile(r"(?P<case>.+)\.rank(?P<rank>\d+)\.kernels\.json")
NO_FORWARDS = "the forward passes of this Nsight recording are not given, so only its shares are known"
"""Why times per forward pass are missing."""

_NAME, _TOTAL, _CALLS = "Name", "Total Time (ns)", "Instances"

Microseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class KernelProfiles:
    """What one run recorded, on as many ranks as it has files.

    Attributes:
        files: table ``kernel_profiles``: one row per file.
        kernels: table ``kernel_times``: one row per kernel and rank, longest first within a rank.
    """

    files: pl.DataFrame
    kernels: pl.DataFrame


class _Kernel(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str = Field(min_length=1)
    us: Microseconds
    calls: int = Field(ge=0)


class _Summary(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    replays: int = Field(ge=1)
    span_us: float = Field(gt=0, allow_inf_nan=False)
    busy_us: Microseconds
    pre_forward_us: Microseconds
    kernels: list[_Kernel] = Field(min_length=1)


def read_kernel_profiles(
    path: str | Path, *, stage: str | None, hardware: str, model: str, nsight_forwards: int | None
) -> KernelProfiles:
    """Read the profile of one run.

    Args:
        path: a file of either format; a folder that holds the ``kernels.json`` files of one case; or such a folder and
            the name of a case, ``folder/case``, for all its ranks.
        stage: "before" or "after" if this is one of two runs to compare, None if it stands alone.
        hardware: what was profiled, as far as it is known.
        model: the model that ran.
        nsight_forwards: forward passes in an Nsight recording, whose times and calls are totals; None if it is not
            known, then only the shares of the kernels are. ``kernels.json`` gives both per forward pass already.

    Returns:
        Times per forward pass, null with a missing_reason where they are not known, and shares; origin "measured".

    Raises:
        DataError: no such file or case, several cases in a folder, or a file of another format or with a bad field;
            names file, and field or row.
    """
    files, kernels = [], []
    setting = {"hardware": hardware, "model": model, "stage": stage}
    for file in _files(Path(path)):
        summary, rows = _read(file, nsight_forwards)
        found = _RANK_FILE.fullmatch(file.name)
        common = setting | {"rank": int(found["rank"]) if found else None, "origin": "measured", "source": file.name}
        # one name may stand in several rows of a report
        merged: dict[str, list[float]] = {}
        for name, microseconds, calls in rows:
            total = merged.setdefault(name, [0.0, 0.0])
            total[0] += microseconds
            total[1] += calls
        total_us = sum(microseconds for microseconds, _ in merged.values())
        if total_us == 0:
            raise DataError(f"{shown(file)}: all kernels take no time at all, got {len(merged)} kernels of 0 µs")
        known = summary["num_forwards"] is not None
        files.append(common | summary | {"kernel_sum_us": total_us if known else None, "num_kernels": len(merged)})
        kernels += [
            common
            | {
                "kernel": name,
                "kernel_us": microseconds if known else None,
                "calls_per_forward": calls if known else None,
                "recording_share_percent": min(100.0, 100 * microseconds / total_us),
                "missing_reason": None if known else NO_FORWARDS,
            }
            for name, (microseconds, calls) in sorted(merged.items(), key=lambda item: (-item[1][0], item[0]))
        ]
    where = shown(Path(path))
    return KernelProfiles(
        schema("kernel_profiles").frame(files, where=where), schema("kernel_times").frame(kernels, where=where)
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    folder, case = (path, None) if path.is_dir() else (path.parent, path.name)
    found: dict[str, list[tuple[int, Path]]] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        if match := _RANK_FILE.fullmatch(file.name):
            found.setdefault(match["case"], []).append((int(match["rank"]), file))
    if case is None and len(found) > 1:
        raise DataError(
            f"{shown(path)}: the folder holds several cases: {', '.join(found)}; name one, e.g. "
            f"{shown(path / min(found))}"
        )
    ranks = next(iter(found.values()), []) if case is None else found.get(case, [])
    if not ranks:
        cases = f", the folder holds the cases {', '.join(found)}" if found else ""
        raise DataError(
            f"{shown(path)}: no such profile{cases}; expected a file, a folder with <case>.rank<r>{SUFFIX} files, "
            "or that folder and the name of a case"
        )
    return [file for _, file in sorted(ranks)]


def _read(file: Path, nsight_forwards: int | None) -> tuple[dict[str, object], list[tuple[str, float, float]]]:
    """The file's own row, and (name, µs, calls) of each kernel: per forward pass, or in all if that is not known."""
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{shown(file)}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    if text.lstrip()[:1] in ("{", "["):
        return _read_bench_forward(text, shown(file))
    return _read_nsight(text, shown(file), nsight_forwards)


def _read_bench_forward(text: str, name: str) -> tuple[dict[str, object], list[tuple[str, float, float]]]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise DataError(f"{name}: not valid JSON: {problem}") from None
    if not isinstance(content, dict) or "kernels" not in content:
        got = f"keys {', '.join(content)}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise DataError(
            f"{name}: got {got}, expected an object with span_us, busy_us and kernels; such a file lies in the folder "
            f"of --profile-dir and ends in {SUFFIX}"
        )
    found = records.checked(content, _Summary, name)
    summary = {
        "profile_format": "bench forward",
        "num_forwards": found.replays,
        "span_us": found.span_us,
        "busy_us": found.busy_us,
        "pre_forward_us": found.pre_forward_us,
    }
    return summary, [(kernel.name, kernel.us, float(kernel.calls)) for kernel in found.kernels]


def _read_nsight(
    text: str, name: str, forwards: int | None
) -> tuple[dict[str, object], list[tuple[str, float, float]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    rows: list[tuple[str, float, float]] = []
    try:
        for cells in reader:
            if header is None:
                # the report may follow lines in which the tool says what it does
                if {_NAME, _CALLS} <= set(cells):
                    header = cells
                    if _TOTAL not in header:
                        raise DataError(
                            f"{name}, row {reader.line_num}: column {_TOTAL!r} is missing, got {', '.join(header)}; "
                            "export the times in nanoseconds, the tool's default"
                        )
                continue
            if cells:
                rows.append(_nsight_row(cells, header, f"{name}, row {reader.line_num}", forwards or 1))
    except csv.Error as problem:
        raise DataError(f"{name}, row {reader.line_num}: not a readable CSV: {problem}") from None
    if header is None:
        raise DataError(
            f"{name}: neither a {SUFFIX} file of bench forward nor a cuda_gpu_kern_sum CSV of Nsight Systems: no row "
            f"with the columns {_TOTAL}, {_CALLS}, {_NAME}"
        )
    if not rows:
        raise DataError(f"{name}: the report has a header but no kernels")
    summary = {
        "profile_format": "Nsight",
        "num_forwards": forwards,
        "missing_reason": "an Nsight kernel summary has no time line, so neither span nor what ran before the forward"
        + ("" if forwards else f"; {NO_FORWARDS}"),
    }
    return summary, rows


def _nsight_row(cells: list[str], header: list[str], where: str, forwards: int) -> tuple[str, float, float]:
    if len(cells) != len(header):
        raise DataError(f"{where}: got {len(cells)} cells, expected {len(header)}, one per column")
    row = dict(zip(header, cells, strict=True))
    if not row[_NAME].strip():
        raise DataError(f"{where}, column {_NAME}: got nothing, expected the name of a kernel")
    numbers = []
    for column in (_TOTAL, _CALLS):
        try:
            value = float(row[column].replace("_", "?"))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise DataError(f"{where}, column {column}: got {row[column]!r}, expected a number ≥ 0")
        numbers.append(value)
    return row[_NAME], numbers[0] / 1e3 / forwards, numbers[1] / forwards
