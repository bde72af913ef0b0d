"""What does the engine add to the forward pass?

The engine gap is the step of the running engine minus the forward pass of the same batch. The source prints a hint of
it: two engine steps, and how much less one of them runs on the GPU. This module says what the hint bounds, which part
of it a growing synchronisation could explain, and does the same account for pairs that a user has measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from rackbook import published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import live
from rackbook.experiments.own_csv import OwnCsv
from rackbook.models.collective import sync_ms
from rackbook.models.host_steps import dep_growth, sync_removal
from rackbook.models.step_account import Pair, Removal, StepGrowth
from rackbook.runs import Run
from rackbook.tables import schema

CHECKS = Checks("engine_gap")
doubts = live.doubts

_TEXTS = ("setting", "hardware", "model")
_NUMBERS = ("forward_ms", "engine_ms", "cpu_ms")
_REQUIRED = ("setting", "forward_ms", "engine_ms")


class Params(BaseModel):
    """Parameters of notebook 08."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    baseline_gpu_ms: float | None = Field(default=None, gt=0, description="GPU time of the DEP16 step, if known")
    pairs_path: str = Field(default="", description="CSV of measured pairs; empty for none")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb300-nvl72", description=live.CLUSTER)
    measured_ep_sizes: list[int] = Field(default=[16, 32], min_length=1, description="expert-parallel sizes to measure")
    measured_requests_per_rank: int = Field(default=64, ge=1, description="requests per rank to measure with")
    measured_context_tokens: int = Field(default=131_072, ge=64, description="context to measure with")
    measured_draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step to measure with")
    measured_repeats: int = Field(default=3, ge=1, description="runs of the client")


LAB = {"cluster": "cpu-lab"}
"""Parameters with which the CPU lab measures; the plan has a batch of its own for two cores."""


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        steps: table ``engine_gap``, published rows.
        gpu: table ``engine_gap_gpu``, published row.
        growth: the two steps and the GPU saving as one account.
        parts: ep_size, step_part, part_ms, bound: the two steps split into GPU time and gap, "derived".
        regimes: baseline_bound_by, bound_by, quantity, low, high, unit: what grew, by what each step waits for.
        candidates: quantity, growth_ms, assumption: the growth of the gap beside what a sync could add.
        pairs: table ``engine_pairs``: the user's pairs; empty without ``pairs_path``.
        gaps: the account of each pair, "derived"; empty without ``pairs_path``.
        run: the run that ``source`` names; else the recorded run of the CPU lab; None where there is neither.
        measured: table ``engine_pairs``: the pairs of that run; empty without one.
        measured_gaps: the account of each of them, "derived".
    """

    steps: pl.DataFrame
    gpu: pl.DataFrame
    growth: StepGrowth
    parts: pl.DataFrame
    regimes: pl.DataFrame
    candidates: pl.DataFrame
    pairs: pl.DataFrame
    gaps: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame
    measured_gaps: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published hint, its account, the user's pairs, and a run; measures one if ``source`` says so.

    Raises:
        DataError: the user's file is not what it should be.
        ParameterError: ``baseline_gpu_ms`` contradicts the published steps, or ``source`` is none that is allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = live.run_of(CHECKS.topic, params.source, lambda: measure(params)) or live.recorded(CHECKS.topic)
    measured = live.points_of(run, "engine_pairs")
    steps, gpu = published.read("engine_gap").sort("ep_size"), published.read("engine_gap_gpu")
    growth, sync = dep_growth(steps, gpu), sync_removal(published.read("cpu_overhead"))
    pairs = read_pairs(params.pairs_path) if params.pairs_path else schema("engine_pairs").frame([])
    return Evidence(
        steps=steps,
        gpu=gpu,
        growth=growth,
        parts=parts(growth, gpu, params.baseline_gpu_ms),
        regimes=regimes(growth, gpu),
        candidates=candidates(growth, sync, gpu),
        pairs=pairs,
        gaps=gaps(pairs),
        run=run,
        measured=measured,
        measured_gaps=gaps(measured),
    )


def measure(params: Params) -> Run:
    """Measure pairs on ``cluster`` and keep them as a run.

    Raises:
        RackbookError: the cluster cannot do it, or it failed on the way.
    """
    from rackbook.measurements import engine_gap  # what talks to vLLM is imported when it is needed

    return engine_gap.measure(params)


def measured_subtitle(evidence: Evidence) -> str:
    """Hardware, model and sample of the measured pairs, for their chart."""
    row = evidence.measured.row(0, named=True)
    how = f"{row['locator']}; label: the gap in ms"
    return f"{row['hardware']} ({live.description(evidence.run)}), {row['model']}; {how}"


def parts(growth: StepGrowth, gpu: pl.DataFrame, baseline_gpu_ms: float | None = None) -> pl.DataFrame:
    """Each published step as GPU time and gap: bounds, or values if the first GPU time is known.

    Args:
        growth: the two steps.
        gpu: table ``engine_gap_gpu``, for the sizes.
        baseline_gpu_ms: GPU time of the first step; None if unknown.

    Returns:
        ep_size, step_part, part_ms, bound, origin "derived", source, formula. Where only bounds are known: the most
        that the GPU can take and the least that is left for the gap, which add up to the step.

    Raises:
        ParameterError: a GPU time that leaves one of the two gaps or GPU times negative.
    """
    lowest, highest = growth.from_gap_ms
    if baseline_gpu_ms is not None:
        least, most = growth.from_step_ms - highest, growth.from_step_ms - lowest
        if not least <= baseline_gpu_ms <= most:
            raise ParameterError(
                f"baseline_gpu_ms: got {baseline_gpu_ms:g}, allowed: {least:.2f} to {most:.2f} ms; outside, a gap or a "
                "GPU time of the published steps would be negative"
            )
    known = baseline_gpu_ms is not None
    from_gap = growth.from_step_ms - baseline_gpu_ms if known else lowest
    row = gpu.row(0, named=True)
    rows = []
    first = "step − baseline_gpu_ms" if known else "no gap is negative"
    for size, step, gap, how in (
        (row["baseline_ep_size"], growth.from_step_ms, from_gap, first),
        (
            row["ep_size"],
            growth.to_step_ms,
            from_gap + growth.gap_growth_ms,
            "gap of the narrower engine + its growth",
        ),
    ):
        for part, value, bound in (("GPU", step - gap, "at most"), ("gap", gap, "at least")):
            rows.append(
                {
                    "ep_size": size,
                    "step_part": part,
                    "part_ms": value,
                    "bound": "exactly" if known else bound,
                    "formula": "step − gap" if part == "GPU" else how,
                }
            )
    source = f"{row['source']} and baseline_gpu_ms" if known else row["source"]
    return pl.DataFrame(rows).with_columns(pl.lit("derived").alias("origin"), pl.lit(source).alias("source"))


def regimes(growth: StepGrowth, gpu: pl.DataFrame) -> pl.DataFrame:
    """What must have grown between the two steps, for each of the four ways in which they can be bound.

    With step = max(GPU, CPU) + unhidden, a step waits for the GPU or for the host. Only where both steps are bound in
    the same way does the pair fix a growth; otherwise it gives its least value, and the step itself as the most.

    Returns:
        baseline_bound_by, bound_by, quantity, low, high, unit, origin "derived", source, formula.
    """
    step, gap, most = growth.step_growth_ms, growth.gap_growth_ms, growth.to_step_ms
    unhidden, host = "unhidden work", "host work, CPU + unhidden"
    rows = [
        ("GPU", "GPU", unhidden, gap, gap, "step growth + GPU saving"),
        ("host", "host", host, step, step, "step growth"),
        ("GPU", "host", host, step, most, "at least the step growth"),
        ("host", "GPU", unhidden, gap, most, "at least step growth + GPU saving"),
    ]
    names = ["baseline_bound_by", "bound_by", "quantity", "low", "high", "formula"]
    return pl.DataFrame(rows, schema=names, orient="row").with_columns(
        pl.lit("ms").alias("unit"), pl.lit("derived").alias("origin"), pl.lit(gpu["source"][0]).alias("source")
    )


def candidates(growth: StepGrowth, sync: Removal, gpu: pl.DataFrame) -> pl.DataFrame:
    """How much a growing DP sync could add to the step, beside what the gap grew by.

    The sync is known at one number of ranks only, from another pair of steps of the same source.

    Args:
        growth: the two steps.
        sync: the sync of the wider engine, before and after its fix.
        gpu: table ``engine_gap_gpu``, for the sizes.

    Returns:
        quantity, growth_ms, assumption, origin ("derived" for the gap, "modelled" for the sync), source, formula.
    """
    row = gpu.row(0, named=True)
    narrow, wide = row["baseline_ep_size"], row["ep_size"]

    def added(law: str, known_ms: float) -> float:
        return known_ms - sync_ms(law, narrow, known_ranks=wide, known_ms=known_ms)

    linear = added("proportional to the ranks", sync.work_before_ms)
    exposed = 1 - sync.hidden_saved_share
    rows = [
        (
            "gap, step minus GPU time",
            growth.gap_growth_ms,
            "GPU saving and steps are of one build",
            "derived",
            "step growth + GPU saving",
        ),
        (
            "sync proportional to the ranks, all of it waited for",
            linear,
            "the added sync is serial with the step",
            "modelled",
            f"{sync.work_before_ms:g} ms · (1 − {narrow} ÷ {wide})",
        ),
        (
            "sync by a ring, all of it waited for",
            added("ring", sync.work_before_ms),
            "the added sync is serial with the step",
            "modelled",
            f"{sync.work_before_ms:g} ms · (1 − {narrow - 1} ÷ {wide - 1})",
        ),
        (
            "sync proportional to the ranks, waited for in part",
            linear * exposed,
            f"{100 * exposed:.1f} % of every ms is waited for, as the sync's own fix showed on average",
            "modelled",
            f"{linear:g} ms · step saved ÷ sync saved",
        ),
        (
            "sync by recursive doubling, all of it waited for",
            added("recursive doubling", sync.work_after_ms),
            "the added sync is serial with the step",
            "modelled",
            f"{sync.work_after_ms:g} ms · (1 − log2 {narrow} ÷ log2 {wide})",
        ),
    ]
    names = ["quantity", "growth_ms", "assumption", "origin", "formula"]
    return pl.DataFrame(rows, schema=names, orient="row").with_columns(pl.lit(row["source"]).alias("source"))


def read_pairs(path: str | Path) -> pl.DataFrame:
    """Read measured pairs from a CSV file.

    The file has the columns ``setting``, ``forward_ms`` and ``engine_ms``, and may have ``hardware``, ``model`` and
    ``cpu_ms`` (all host work of the step, hidden or not), in any order, one row per setting.

    Args:
        path: the file.

    Returns:
        Table ``engine_pairs``, in file order, origin "measured".

    Raises:
        DataError: no such file, other columns, or a cell that is not what it should be; names row and column.
    """
    optional = [name for name in (*_TEXTS, *_NUMBERS) if name not in _REQUIRED]
    file = OwnCsv(path, parameter="pairs_path", columns=_REQUIRED, optional=optional)
    rows, seen = [], {}
    for number, cells in file.rows():
        row = _pair_row(file, number, cells)
        key = tuple(row.get(column) for column in _TEXTS)
        if key in seen:
            raise DataError(
                f"{file.row(number)}, column setting: got {row['setting']!r} again, it stands in row {seen[key]} "
                "already"
            )
        seen[key] = number
        rows.append(row | {"origin": "measured", "source": Path(path).name, "locator": f"row {number}"})
    return schema("engine_pairs").frame(rows, where=file.name)


def gaps(pairs: pl.DataFrame) -> pl.DataFrame:
    """The account of measured pairs: the gap, its share, and what it bounds.

    Args:
        pairs: table ``engine_pairs``, from :func:`read_pairs` or from a measurement.

    Returns:
        setting, hardware, model, forward_ms, engine_ms, cpu_ms, gap_ms, gap_share_percent, total_cpu_low_ms,
        total_cpu_high_ms, hidden_cpu_low_ms, hidden_cpu_high_ms, not_cpu_ms, origin "derived", source, formula,
        missing_reason. Bounds are null where the gap is negative, not_cpu_ms also where cpu_ms is.
    """
    numbers = (
        "forward_ms", "engine_ms", "cpu_ms", "gap_ms", "gap_share_percent", "total_cpu_low_ms", "total_cpu_high_ms",
        "hidden_cpu_low_ms", "hidden_cpu_high_ms", "not_cpu_ms",
    )  # fmt: skip
    texts = ("origin", "source", "formula", "missing_reason")
    rows = []
    for row in pairs.iter_rows(named=True):
        pair = Pair(row["forward_ms"], row["engine_ms"], row["cpu_ms"])
        total, hidden = pair.total_cpu_ms or (None, None), pair.hidden_cpu_ms or (None, None)
        if pair.gap_ms < 0:
            reason = (
                "the engine step is shorter than the forward pass: the two are not of one batch, nothing is bounded"
            )
        else:
            reason = row["missing_reason"]
        rows.append(
            (
                *(row[name] for name in (*_TEXTS, *_NUMBERS)), pair.gap_ms, 100 * pair.gap_share, *total, *hidden,
                pair.not_cpu_ms, "derived", row["source"], "engine step − forward pass", reason,
            )
        )  # fmt: skip
    types = dict.fromkeys(_TEXTS, pl.String) | dict.fromkeys(numbers, pl.Float64) | dict.fromkeys(texts, pl.String)
    return pl.DataFrame(rows, schema=types, orient="row")


def _pair_row(file: OwnCsv, number: int, cells: dict[str, str]) -> dict[str, object]:
    where = file.row(number)
    row: dict[str, object] = {column: cells.get(column) or None for column in _TEXTS}
    if row["setting"] is None:
        raise DataError(f"{where}, column setting: got nothing, allowed: text that tells the pairs apart, e.g. DEP32")
    for column in _NUMBERS:
        row[column] = file.positive(number, column, cells.get(column, ""), optional=column == "cpu_ms")
    if row["cpu_ms"] is None:
        row["missing_reason"] = "host work not measured"
    try:
        Pair(row["forward_ms"], row["engine_ms"], row["cpu_ms"])
    except DataError as problem:
        raise DataError(f"{where}, column {problem}") from None
    return row


# ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────────


@CHECKS("gpu_saving_ms", "step_dep32_ms", "step_dep16_ms")
def _printed(evidence: Evidence) -> Finding:  # noqa: ARG001
    return OPEN


@CHECKS("dep32_slower")
def _dep32_slower(evidence: Evidence) -> Finding:
    growth = evidence.growth
    return Finding(
        growth.step_growth_ms > 0 and growth.gpu_saving_ms > 0,
        "derived",
        f"from the three printed figures: the step grows by {growth.step_growth_ms:.2f} ms, the GPU part shrinks by "
        f"{growth.gpu_saving_ms:g} ms",
    )


@CHECKS("step_growth_ms")
def _step_growth(evidence: Evidence) -> Finding:
    return Finding(evidence.growth.step_growth_ms, "derived", "step at DEP32 − step at DEP16")


@CHECKS("host_growth_ms")
def _host_growth(evidence: Evidence) -> Finding:
    return Finding(
        evidence.growth.gap_growth_ms,
        "derived",
        "growth of what is not GPU time; it is the host's work itself only if both steps wait for the GPU",
    )
