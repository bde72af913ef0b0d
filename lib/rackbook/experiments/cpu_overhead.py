"""Which CPU work gates a rack-scale decode step?

The four published causes with their fixes, each before and after on its own metrics. What the pair of a shorter
synchronisation and a shorter step says about overlap. How the synchronisation would grow with the ranks under three
laws. What one admission costs, and a simulation of bursts of admissions in a lockstep engine that shows the trade of
a cap: the tail of the step against the delay of an admission.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rackbook import published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.hostwork.admission import Arrivals, draw_arrivals, one_burst
from rackbook.hostwork.cap_sweep import NO_CAP, compare_caps
from rackbook.models.collective import growth_law, hop_ms, sync_ms
from rackbook.models.host_steps import ADMISSION, BURSTS, SYNC, before_and_after, dep_growth, sync_removal
from rackbook.models.step_account import Removal, StepGrowth
from rackbook.tables import column

CHECKS = Checks("cpu_overhead")

METRICS = (
    "total_tok_per_s_per_gpu", "interactivity_p90_tok_per_s", "dp_sync_ms", "step_ms", "admissions_per_step",
    "admission_cpu_ms",
)  # fmt: skip
"""What the source gives before and after a fix, in the order in which it is shown."""

ROUNDING_MS = {"dp_sync_ms": 0.05, "step_ms": 0.005}
"""Half a unit of the last printed digit."""


class Params(BaseModel):
    """Parameters of notebook 07."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_ranks: int = Field(default=64, ge=2, le=4096, description="the curves of the sync are drawn up to here")
    num_ranks: int = Field(default=32, ge=1, le=1024, description="ranks in lockstep; 1 frees a rank from the others")
    base_step_ms: float = Field(default=13.15, gt=0, description="step without admissions")
    hidden_ms: float = Field(default=0.0, ge=0, description="admission work per step that hides behind the GPU")
    requests_per_s: float = Field(default=180.0, gt=0, le=20_000, description="admissions per second over all ranks")
    prompt_tokens: int = Field(default=131_072, ge=1, description="prompt length under load")
    burst_share: float = Field(default=0.25, ge=0, le=1, description="share of the requests that come in bursts")
    burst_size: int = Field(default=140, ge=1, le=10_000, description="requests released together")
    ranks_per_burst: int = Field(default=1, ge=1, description="ranks that share a burst")
    caps: list[int] = Field(default=[1, 2, 4, 8, 16, 32], description="caps on admissions per step and rank to try")
    ns_per_token: float | None = Field(default=None, ge=0, description="your own admission cost, drawn beside")
    window_s: float = Field(default=30.0, gt=0, le=600, description="simulated time of one repeat")
    repeats: int = Field(default=5, ge=1, le=50, description="independent repeats")
    seed: int = Field(default=20261025, ge=0, description="seed of the arrivals")

    @field_validator("caps")
    @classmethod
    def _caps_admit(cls, caps: list[int]) -> list[int]:
        if any(cap < 1 for cap in caps) or len(set(caps)) < len(caps):
            raise ValueError(f"got {caps}, allowed: different whole numbers ≥ 1 (no cap is always simulated)")
        return caps

    @model_validator(mode="after")
    def _burst_fits(self) -> Params:
        if self.ranks_per_burst > self.num_ranks:
            raise ValueError(f"ranks_per_burst: got {self.ranks_per_burst}, allowed: 1 to num_ranks = {self.num_ranks}")
        return self


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        params: as given.
        points: table ``cpu_overhead``, published rows.
        gains: one row per cause and metric: cause, fix, pr, quantity, unit, before, after, after_to_before; "derived".
        sync: the published fall of the sync beside that of the step.
        dep_growth: the published growth of the un-optimised step with the ranks.
        sync_split: stage, sync_part, dp_sync_ms: where the sync of each stage must lie, "derived".
        sync_bounds: quantity, unit, low, high, formula, assumption: what the pair says, "derived".
        step_by_sync: reading, dp_sync_ms, step_ms: two ways in which the step may depend on the sync, "modelled".
        sync_growth: growth_law, num_ranks, num_hops, dp_sync_ms, hop_ms: curves through the published points.
        admission_costs: stage, reading, prompt_tokens, admission_cpu_ms, ns_per_token, "derived".
        stalls: stage, admissions_per_step, prompt_tokens, stall_ms: admission work of one step, "derived".
    """

    params: Params
    points: pl.DataFrame
    gains: pl.DataFrame
    sync: Removal
    dep_growth: StepGrowth
    sync_split: pl.DataFrame
    sync_bounds: pl.DataFrame
    step_by_sync: pl.DataFrame
    sync_growth: pl.DataFrame
    admission_costs: pl.DataFrame
    stalls: pl.DataFrame

    @cached_property
    def burst_trade(self) -> pl.DataFrame:
        """One published burst, "simulated": admission_cost, cap, step_max_ms, delay_p50_ms, delay_max_ms."""
        return burst_trade(self.points, self.params)

    @cached_property
    def sweep(self) -> pl.DataFrame:
        """Step and delay statistics under load by arrivals, admission_cost and cap, "simulated"."""
        return sweep(self.points, self.params)


def collect(params: Params) -> Evidence:
    """Gather the published points and the accounts; the simulations run when they are first looked at."""
    points = published.read("cpu_overhead")
    sync = sync_removal(points)
    return Evidence(
        params=params,
        points=points,
        gains=gains(points),
        sync=sync,
        dep_growth=dep_growth(published.read("engine_gap"), published.read("engine_gap_gpu")),
        sync_split=sync_split(sync, _source(points, SYNC)),
        sync_bounds=sync_bounds(sync, _source(points, SYNC)),
        step_by_sync=step_by_sync(sync, _source(points, SYNC)),
        sync_growth=sync_growth(points, params.max_ranks),
        admission_costs=admission_costs(points),
        stalls=stalls(points),
    )


def gains(points: pl.DataFrame) -> pl.DataFrame:
    """Every metric that the source gives before and after a fix, as one row.

    Args:
        points: table ``cpu_overhead``.

    Returns:
        cause, fix, pr, quantity, unit, before, after, after_to_before, origin "derived", source.
    """
    rows = []
    for (pr,), group in points.group_by("pr", maintain_order=True):
        cause, fix, source = group.select("cause", "fix", "source").row(0)
        for metric in METRICS:
            before, after = before_and_after(points, pr, metric)
            if before is not None and after is not None:
                described = column(metric)
                rows.append((cause, fix, pr, described.label, described.unit, before, after, after / before, source))
    names = ("cause", "fix", "pr", "quantity", "unit", "before", "after", "after_to_before", "source")
    return pl.DataFrame(rows, schema=names, orient="row", strict=False).with_columns(pl.lit("derived").alias("origin"))


def sync_split(sync: Removal, source: str) -> pl.DataFrame:
    """Where the sync lies before and after: waited for, hidden, or either.

    Returns:
        stage, sync_part, dp_sync_ms, origin "derived", source, formula.
    """
    rows = [
        ("before", "waited for", sync.exposed_before_ms[0], "step saved"),
        ("before", "either", sync.work_after_ms, "sync after"),
        ("before", "hidden", sync.hidden_saved_ms, "sync saved − step saved"),
        ("after", "either", sync.work_after_ms, "sync after"),
    ]
    return pl.DataFrame(rows, schema=["stage", "sync_part", "dp_sync_ms", "formula"], orient="row").with_columns(
        pl.lit("derived").alias("origin"), pl.lit(source).alias("source")
    )


def sync_bounds(sync: Removal, source: str) -> pl.DataFrame:
    """What the fall of the sync beside the fall of the step says, and under which assumption.

    The first three rows carry the rounding of the printed figures; the others take the figures as printed.

    Returns:
        quantity, unit, low, high, formula, assumption, origin "derived", source.
    """
    saved = [sync.work_saved_ms + sign * 2 * ROUNDING_MS["dp_sync_ms"] for sign in (-1, 1)]
    step = [sync.step_saved_ms + sign * 2 * ROUNDING_MS["step_ms"] for sign in (-1, 1)]
    rounded = "each figure is rounded to its last digit"
    alone = "nothing else in the step changed"
    serial = f"{alone}; the sync is serial with the step until something else binds"
    floor, slack = sync.floor_reached_at_ms, sync.hidden_saved_ms
    share = [100 * (1 - step[1] / saved[0]), 100 * (1 - step[0] / saved[1])]
    rows = [
        ("sync saved", "ms", *saved, "sync before − sync after", rounded),
        ("step saved", "ms", *step, "step before − step after", rounded),
        ("hidden share of the saved sync", "%", *share, "1 − step saved ÷ sync saved", f"{rounded}; {alone}"),
        ("sync waited for, before", "ms", *sync.exposed_before_ms, "step saved, to step saved + sync after", alone),
        ("sync hidden, before", "ms", *sync.hidden_before_ms, "sync before − the row above", alone),
        ("sync below which less buys nothing", "ms", floor, floor, "sync before − step saved", serial),
        ("slack of the host beside what binds, after", "ms", slack, slack, "sync saved − step saved", serial),
    ]
    names = ["quantity", "unit", "low", "high", "formula", "assumption"]
    return pl.DataFrame(rows, schema=names, orient="row").with_columns(
        pl.lit("derived").alias("origin"), pl.lit(source).alias("source")
    )


def step_by_sync(sync: Removal, source: str) -> pl.DataFrame:
    """The step over the sync in two readings that both pass through the published pair.

    Returns:
        reading, dp_sync_ms, step_ms, origin "modelled", source, formula: corner points, to be joined by lines.
    """
    before, floor = sync.work_before_ms, sync.floor_reached_at_ms
    serial, even = "serial until something else binds", "the same share of every ms is waited for"
    readings = {
        serial: (sync.step_with_floor_ms, (0.0, floor, before), "max(step after, step before − sync saved)"),
        even: (sync.step_with_even_share_ms, (0.0, before), "step before − share · sync saved"),
    }
    return pl.DataFrame(
        [
            {"reading": reading, "dp_sync_ms": at, "step_ms": step_at(at), "formula": formula}
            for reading, (step_at, corners, formula) in readings.items()
            for at in corners
        ]
    ).with_columns(pl.lit("modelled").alias("origin"), pl.lit(source).alias("source"))


def sync_growth(points: pl.DataFrame, max_ranks: int) -> pl.DataFrame:
    """The sync over the number of ranks: each law through the published point of its algorithm, at powers of two.

    Args:
        points: table ``cpu_overhead``.
        max_ranks: largest number of ranks; the curves reach the published point in any case.

    Returns:
        growth_law, num_ranks, num_hops (null for a law without hops), hop_ms, dp_sync_ms, origin "modelled", source,
        formula; and the two published points, with the stage instead of a law.
    """
    rows = points.filter(pl.col("pr") == SYNC)
    known_ranks, source = rows["ep_size"][0], rows["source"][0]
    before, after = before_and_after(points, SYNC, "dp_sync_ms")
    laws = (
        ("proportional to the ranks", before, "{ms:g} ms · N ÷ {n}"),
        ("ring", before, "{ms:g} ms · (N − 1) ÷ ({n} − 1)"),
        ("recursive doubling", after, "{ms:g} ms · log2 N ÷ log2 {n}"),
    )
    at = [1 << power for power in range(1, max(max_ranks, known_ranks).bit_length())]
    curves = [
        {
            "growth_law": law,
            "num_ranks": ranks,
            "num_hops": None if law == "proportional to the ranks" else growth_law(law)(ranks),
            "hop_ms": None if law == "proportional to the ranks" else hop_ms(law, known_ranks, known),
            "dp_sync_ms": sync_ms(law, ranks, known_ranks=known_ranks, known_ms=known),
            "origin": "modelled",
            "source": source,
            "formula": formula.format(ms=known, n=known_ranks),
        }
        for law, known, formula in laws
        for ranks in at
    ]
    printed = [
        {"stage": stage, "num_ranks": known_ranks, "dp_sync_ms": known, "origin": "published", "source": source}
        for stage, known in (("before", before), ("after", after))
    ]
    return pl.DataFrame([*curves, *printed], infer_schema_length=None)


def admission_costs(points: pl.DataFrame) -> pl.DataFrame:
    """CPU time of an admission per prompt token, before and after the fixes, in both readings of 855K.

    Returns:
        stage, reading, prompt_tokens, admission_cpu_ms, ns_per_token, origin "derived", source, formula. The first
        row of a stage is the project's reading, K = 1,024.
    """
    rows = []
    for row in points.filter(pl.col("pr") == ADMISSION).iter_rows(named=True):
        thousands = row["prompt_tokens"] // 1024
        for reading, tokens in (("K = 1,024", row["prompt_tokens"]), ("K = 1,000", thousands * 1000)):
            rows.append(
                {
                    "stage": row["stage"],
                    "reading": f"{thousands}K with {reading}",
                    "prompt_tokens": tokens,
                    "admission_cpu_ms": row["admission_cpu_ms"],
                    "ns_per_token": row["admission_cpu_ms"] * 1e6 / tokens,
                    "origin": "derived",
                    "source": row["source"],
                    "formula": f"{row['admission_cpu_ms']:g} ms ÷ {tokens:,}",
                }
            )
    return pl.DataFrame(rows)


def stalls(points: pl.DataFrame) -> pl.DataFrame:
    """Admission work of one step with the published burst and with the published cap, prompts of 855K.

    Returns:
        stage (of the admission cost), admissions_per_step, prompt_tokens, stall_ms, origin "derived", source, formula.
    """
    return pl.DataFrame(
        [
            {
                "stage": row["stage"],
                "admissions_per_step": admissions,
                "prompt_tokens": row["prompt_tokens"],
                "stall_ms": admissions * row["admission_cpu_ms"],
                "origin": "derived",
                "source": row["source"],
                "formula": f"{admissions} · {row['admission_cpu_ms']:g} ms",
            }
            for row in points.filter(pl.col("pr") == ADMISSION).iter_rows(named=True)
            for admissions in before_and_after(points, BURSTS, "admissions_per_step")
        ]
    )


def burst_trade(points: pl.DataFrame, params: Params) -> pl.DataFrame:
    """One burst of the published size and the published prompt length on one rank, admitted under each cap.

    Returns:
        admission_cost, ns_per_token, cap, num_steps, step_max_ms, delay_p50_ms, delay_max_ms, origin "simulated",
        source. Nothing is random here.
    """
    size, _ = before_and_after(points, BURSTS, "admissions_per_step")
    prompt = points.filter(pl.col("pr") == ADMISSION)["prompt_tokens"][0]
    burst = one_burst(size, num_ranks=params.num_ranks, prompt_tokens=prompt)
    return (
        _compare_caps([burst], points, params, whole_run=True)
        .select("admission_cost", "ns_per_token", "cap", "num_steps", "step_max_ms", "delay_p50_ms", "delay_max_ms")
        .with_columns(
            pl.lit("simulated").alias("origin"),
            pl.lit(f"one burst of {size} × {prompt:,} tokens, nothing random").alias("source"),
        )
    )


def sweep(points: pl.DataFrame, params: Params) -> pl.DataFrame:
    """Step and admission delay under load, for each kind of arrivals, admission cost and cap.

    Returns:
        arrivals, the columns of :func:`rackbook.hostwork.cap_sweep.compare_caps`, origin "simulated", source (the
        seed). Without bursts there is one kind of arrivals.
    """
    kinds = {"one by one": 0.0} | ({"partly in bursts": params.burst_share} if params.burst_share else {})
    cases = []
    for number, (kind, share) in enumerate(kinds.items()):
        streams = [
            draw_arrivals(
                np.random.default_rng([params.seed, number, repeat]),
                num_ranks=params.num_ranks,
                requests_per_s=params.requests_per_s,
                window_s=params.window_s,
                prompt_tokens=params.prompt_tokens,
                burst_share=share,
                burst_size=params.burst_size,
                ranks_per_burst=params.ranks_per_burst,
            )
            for repeat in range(params.repeats)
        ]
        case = _compare_caps(streams, points, params)
        cases.append(case.select(pl.lit(kind).alias("arrivals"), pl.all()))
    return pl.concat(cases).with_columns(
        pl.lit("simulated").alias("origin"),
        pl.lit(f"seed {params.seed}, {params.repeats} × {params.window_s:g} s").alias("source"),
    )


def simulated_caps(points: pl.DataFrame, params: Params) -> list[int | None]:
    """The caps that are simulated: the parameter's, the published one, and none."""
    return [*sorted({*params.caps, published_cap(points)}), None]


def published_cap(points: pl.DataFrame) -> int:
    """The published cap on admissions per step."""
    return before_and_after(points, BURSTS, "admissions_per_step")[1]


def simulated_costs(points: pl.DataFrame, params: Params) -> dict[str, float]:
    """Admission cost in ns per prompt token: the two published ones (855K = 855 · 1,024), and the parameter's."""
    first = admission_costs(points).group_by("stage", maintain_order=True).first()
    costs = dict(first.select("stage", "ns_per_token").iter_rows())
    return costs if params.ns_per_token is None else costs | {"given": params.ns_per_token}


def load_label(params: Params) -> str:
    """The simulated engine and load in a line, for a chart's subtitle."""
    where = "one rank" if params.ranks_per_burst == 1 else f"{params.ranks_per_burst} ranks"
    bursts = f"{params.burst_share:.0%} in bursts of {params.burst_size} on {where}"
    engine = f"{params.num_ranks} ranks in lockstep, base step {params.base_step_ms:g} ms"
    load = f"{params.requests_per_s:g} requests/s of {params.prompt_tokens:,} tokens, {bursts}"
    return f"{engine}; {load}; seed {params.seed}, {params.repeats} × {params.window_s:g} s"


def published_cap_against_none(evidence: Evidence) -> pl.DataFrame:
    """Under load, the published cap beside no cap.

    Returns:
        arrivals, admission_cost, cap, step_mean_ms, step_p50_ms, step_p99_ms, step_max_ms, delay_p50_ms, delay_p99_ms,
        delay_max_ms, num_waiting, origin, source: rows of ``sweep``, rounded to 0.1 ms.
    """
    statistics = (
        "step_mean_ms",
        "step_p50_ms",
        "step_p99_ms",
        "step_max_ms",
        "delay_p50_ms",
        "delay_p99_ms",
        "delay_max_ms",
    )
    caps = [str(published_cap(evidence.points)), NO_CAP]
    return evidence.sweep.filter(pl.col("cap").is_in(caps)).select(
        "arrivals", "admission_cost", "cap", pl.col(statistics).round(1), "num_waiting", "origin", "source"
    )


def hops(evidence: Evidence) -> pl.DataFrame:
    """The hops of each all-reduce at the published number of ranks.

    Returns:
        growth_law, num_ranks, num_hops, dp_sync_ms, hop_ms, origin, source.
    """
    known = evidence.sync_growth.filter(pl.col("origin") == "published")["num_ranks"][0]
    at = evidence.sync_growth.filter((pl.col("num_ranks") == known) & pl.col("num_hops").is_not_null())
    return at.select("growth_law", "num_ranks", "num_hops", "dp_sync_ms", "hop_ms", "origin", "source")


def _compare_caps(
    streams: list[Arrivals], points: pl.DataFrame, params: Params, *, whole_run: bool = False
) -> pl.DataFrame:
    return compare_caps(
        streams,
        caps=simulated_caps(points, params),
        ns_per_token=simulated_costs(points, params),
        base_step_ms=params.base_step_ms,
        hidden_ms=params.hidden_ms,
        whole_run=whole_run,
    )


def _source(points: pl.DataFrame, pr: int) -> str:
    return points.filter(pl.col("pr") == pr)["source"][0]


# ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────────


@CHECKS(
    "kv_reads_before", "kv_reads_after", "kv_reads_p90_before", "kv_reads_p90_after", "sync_before_ms",
    "sync_after_ms", "step_before_ms", "step_after_ms", "burst_requests", "cap_before", "cap_after",
    "cap_p90_before", "cap_p90_after", "admission_before_ms", "admission_after_ms",
)  # fmt: skip
def _printed(evidence: Evidence) -> Finding:  # noqa: ARG001
    return OPEN


@CHECKS("gloo_grows_linearly")
def _gloo_grows_linearly(evidence: Evidence) -> Finding:  # noqa: ARG001
    return Finding(None, note="the source gives one number of ranks; growth needs several, measured")


@CHECKS("admission_grows_with_prompt")
def _admission_grows_with_prompt(evidence: Evidence) -> Finding:  # noqa: ARG001
    return Finding(None, note="the source gives one prompt length; growth needs several, measured")


@CHECKS("sync_saved_ms")
def _sync_saved(evidence: Evidence) -> Finding:
    return Finding(evidence.sync.work_saved_ms, "derived", "sync before − sync after")


@CHECKS("step_saved_ms")
def _step_saved(evidence: Evidence) -> Finding:
    return Finding(evidence.sync.step_saved_ms, "derived", "step before − step after")


@CHECKS("sync_mostly_hidden")
def _sync_mostly_hidden(evidence: Evidence) -> Finding:
    share = evidence.sync.hidden_saved_share
    return Finding(share > 0.5, "derived", f"{100 * share:.1f} % of the saved sync was hidden, if nothing else changed")


@CHECKS("linear_sync_16_ranks_ms")
def _linear_sync(evidence: Evidence) -> Finding:
    known = evidence.sync.work_before_ms
    at_16 = sync_ms("proportional to the ranks", 16, known_ranks=32, known_ms=known)
    ring = known - sync_ms("ring", 16, known_ranks=32, known_ms=known)
    return Finding(
        at_16, "derived", f"adds {known - at_16:.2f} ms from 16 to 32; by hops of a ring it would add {ring:.2f} ms"
    )


@CHECKS("host_growth_share_percent")
def _host_growth_share(evidence: Evidence) -> Finding:
    known = evidence.sync.work_before_ms
    added = known - sync_ms("proportional to the ranks", 16, known_ranks=32, known_ms=known)
    apart = evidence.dep_growth.to_step_ms - evidence.sync.step_before_ms
    return Finding(
        100 * evidence.dep_growth.gap_growth_ms / added,
        "derived",
        "a linear sync adds more than the host grew by, so it can explain all of it; "
        f"the DEP32 steps of the two pairs lie {apart:.2f} ms apart, so they are not one build at one setting",
    )


@CHECKS("ring_hops")
def _ring_hops(evidence: Evidence) -> Finding:  # noqa: ARG001
    return Finding(growth_law("ring")(32), "derived", "2 (N − 1)")


@CHECKS("doubling_hops")
def _doubling_hops(evidence: Evidence) -> Finding:  # noqa: ARG001
    return Finding(growth_law("recursive doubling")(32), "derived", "log2 N")


@CHECKS("ring_hop_ms")
def _ring_hop_ms(evidence: Evidence) -> Finding:
    return Finding(hop_ms("ring", 32, evidence.sync.work_before_ms), "derived", "if the sync is hops of a ring only")


@CHECKS("doubling_hop_ms")
def _doubling_hop_ms(evidence: Evidence) -> Finding:
    return Finding(hop_ms("recursive doubling", 32, evidence.sync.work_after_ms), "derived", "if the sync is hops only")


@CHECKS("hops_explain_gain")
def _hops_explain_gain(evidence: Evidence) -> Finding:
    ring = hop_ms("ring", 32, evidence.sync.work_before_ms)
    doubling = hop_ms("recursive doubling", 32, evidence.sync.work_after_ms)
    ratio = max(ring, doubling) / min(ring, doubling)
    return Finding(ratio < 10, "derived", f"the times per hop are {ratio:.2f}-fold apart, the hops 62 ÷ 5 = 12.4-fold")


def _ns_per_token(evidence: Evidence, stage: str) -> Finding:
    rows = evidence.admission_costs.filter((pl.col("stage") == stage) & pl.col("reading").str.contains("K = 1,000"))
    other = evidence.admission_costs.filter((pl.col("stage") == stage) & pl.col("reading").str.contains("K = 1,024"))
    return Finding(
        rows["ns_per_token"].item(),
        "derived",
        f"{other['ns_per_token'].item():.1f} ns if 855K is 855 · 1,024 tokens",
    )


@CHECKS("admission_before_ns_per_token")
def _admission_before_ns(evidence: Evidence) -> Finding:
    return _ns_per_token(evidence, "before")


@CHECKS("admission_after_ns_per_token")
def _admission_after_ns(evidence: Evidence) -> Finding:
    return _ns_per_token(evidence, "after")


def _stall(evidence: Evidence, stage: str, admissions: int, per_unit: float) -> Finding:
    row = evidence.stalls.filter((pl.col("stage") == stage) & (pl.col("admissions_per_step") == admissions)).row(
        0, named=True
    )
    return Finding(row["stall_ms"] / per_unit, "derived", f"{row['formula']}, if none of it hides behind the GPU")


@CHECKS("burst_before_s")
def _burst_before(evidence: Evidence) -> Finding:
    return _stall(evidence, "before", 140, 1e3)


@CHECKS("burst_after_s")
def _burst_after(evidence: Evidence) -> Finding:
    return _stall(evidence, "after", 140, 1e3)


@CHECKS("capped_before_ms")
def _capped_before(evidence: Evidence) -> Finding:
    return _stall(evidence, "before", 4, 1)


@CHECKS("capped_after_ms")
def _capped_after(evidence: Evidence) -> Finding:
    return _stall(evidence, "after", 4, 1)
