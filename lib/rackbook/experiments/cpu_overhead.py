"""Which CPU work gates a rack-scale decode step?

The four published causes with their fixes, each before and after on its own metrics. What the pair of a shorter
synchronisation and a shorter step says about overlap, and where the time of a step goes. How the synchronisation grows
with the ranks: three laws through the published points, and all-reduces measured on real processes. What one admission
costs: the published figures, and copies of a prompt measured. A simulation of bursts of admissions in a lockstep
engine that shows the trade of a cap. Rows of KV cache sent one by one or packed, measured as a proxy.

The measurements come from a recorded run, or from one that is made now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rackbook import published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import cpu_overhead_load as load
from rackbook.experiments import live
from rackbook.hostwork import growth_verdicts, measured
from rackbook.hostwork.rank_group import MAX_RANKS
from rackbook.locations import shown
from rackbook.models.collective import growth_law, hop_ms, sync_ms
from rackbook.models.host_accounts import (
    account_of_growth,
    account_of_pair,
    account_of_removal,
    admission_costs,
    gains,
    source_of,
    stalls,
    step_by_sync,
    sync_bounds,
    sync_growth,
    sync_split,
)
from rackbook.models.host_steps import SYNC, dep_growth, sync_removal
from rackbook.models.step_account import Pair, Removal, StepGrowth
from rackbook.runs import Run

TOPIC = "cpu_overhead"

CHECKS = Checks(TOPIC)

DRAWN_RANKS = 64
"""The curves through the published synchronisation are drawn up to here."""

BLOCK_TOKENS = 64
"""Tokens of a KV block in the measured block tables; an assumption, the source does not print it."""


class Params(BaseModel):
    """Parameters of notebook 07."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    ranks_with: str | None = Field(
        default=None, description="Python of the ranks, or a .json that launched ranks wrote"
    )
    rank_counts: list[int] = Field(default=[2, 3, 4, 8, 16, 32], description="numbers of ranks to measure")
    measure_s: float = Field(default=40.0, gt=0, le=3600, description="time to measure, about")
    num_ranks: int = Field(default=32, ge=1, le=1024, description="ranks in lockstep; 1 frees a rank from the others")
    base_step_ms: float = Field(default=13.15, gt=0, description="step without admissions")
    requests_per_s: float = Field(default=180.0, gt=0, le=20_000, description="admissions per second over all ranks")
    prompt_tokens: int = Field(default=131_072, ge=1, description="prompt length under load")
    bursts: list[float] = Field(
        default=[0.25, 140, 1], description="share of the requests in bursts, requests of a burst, ranks that share it"
    )
    caps: list[int] = Field(default=[1, 2, 4, 8, 16, 32], description="caps on admissions per step and rank to try")
    ns_per_token: float | None = Field(default=None, ge=0, description="your own admission cost, drawn beside")
    slo_step_ms: float = Field(default=50.0, gt=0, description="longest step that is allowed, to choose a cap by")
    trace_path: str | None = Field(default=None, description="file of arrivals, simulated beside the drawn ones")
    own_step: list[str] = Field(
        default=[], description="your forward pass in ms, your engine step in ms or its log, its host work in ms"
    )
    seed: int = Field(default=20261025, ge=0, description="seed of the arrivals, token ids and places of rows")

    @field_validator("caps")
    @classmethod
    def _caps_admit(cls, caps: list[int]) -> list[int]:
        if any(cap < 1 for cap in caps) or len(set(caps)) < len(caps):
            raise ValueError(f"got {caps}, allowed: different whole numbers ≥ 1 (no cap is always simulated)")
        return caps

    @field_validator("rank_counts")
    @classmethod
    def _ranks_can_run(cls, counts: list[int]) -> list[int]:
        if not counts or any(not 2 <= count <= MAX_RANKS for count in counts) or len(set(counts)) < len(counts):
            raise ValueError(f"got {counts}, allowed: different whole numbers from 2 to {MAX_RANKS}")
        return counts

    @field_validator("own_step")
    @classmethod
    def _own_step_is_whole(cls, parts: list[str]) -> list[str]:
        numbers = [_positive(part) for part in parts]
        if parts and (len(parts) not in (2, 3) or None in (numbers[0], *numbers[2:])):
            raise ValueError(
                f"got {parts}, allowed: nothing, or the forward pass in ms, the engine step in ms or a log of the "
                "engine, and, where it is known, the host work in ms"
            )
        return parts

    @model_validator(mode="after")
    def _bursts_fit(self) -> Params:
        share, size, ranks = (*self.bursts, *[math.nan] * 3)[:3]
        whole = len(self.bursts) == 3 and size == int(size) and ranks == int(ranks)
        if not (whole and 0 <= share <= 1 and 1 <= size <= 10_000 and 1 <= ranks <= self.num_ranks):
            raise ValueError(
                f"bursts: got {self.bursts}, allowed: a share from 0 to 1, whole requests of a burst from 1 to 10,000, "
                f"and ranks that share it from 1 to num_ranks = {self.num_ranks}"
            )
        return self


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        params: as given.
        run: the run whose measurements are shown; None where none was recorded.
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
        accounts: account, account_part, from_ms, to_ms, change_ms: where the time of a step goes.
    """

    params: Params
    run: Run | None
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
    accounts: pl.DataFrame

    @property
    def shown_run(self) -> Run:
        """The run whose measurements are shown.

        Raises:
            DataError: none was recorded.
        """
        if self.run is None:
            raise DataError(f"no run of {TOPIC} comes with this installation: measure one with source = measure")
        return self.run

    @cached_property
    def all_reduces(self) -> pl.DataFrame:
        """The all-reduces of the run, "measured": see :func:`rackbook.hostwork.measured.all_reduces`."""
        return measured.all_reduces(self.shown_run)

    @cached_property
    def growth_fits(self) -> pl.DataFrame:
        """Laws of growth on them, "modelled": see :func:`rackbook.hostwork.measured.growth_fits`."""
        return measured.growth_fits(self.all_reduces)

    @cached_property
    def named_laws(self) -> pl.DataFrame:
        """What the fits come to: see :func:`rackbook.hostwork.measured.named_laws`."""
        return measured.named_laws(self.shown_run, self.growth_fits)

    @cached_property
    def run_facts(self) -> pl.DataFrame:
        """What the run was measured on: see :func:`rackbook.hostwork.measured.facts`."""
        return measured.facts(self.shown_run)

    @cached_property
    def fitted_segments(self) -> pl.DataFrame:
        """The law of the TCP segments, where the points name one, "modelled"."""
        return measured.fitted_growth(self.all_reduces, "segments_per_rank")

    @cached_property
    def copies(self) -> pl.DataFrame:
        """The copies of a prompt, "measured"."""
        return measured.copies(self.shown_run)

    @cached_property
    def copy_costs(self) -> pl.DataFrame:
        """What they cost per token, "modelled": see :func:`rackbook.hostwork.measured.copy_costs`."""
        return measured.copy_costs(self.copies)

    @cached_property
    def tables(self) -> pl.DataFrame:
        """Filling a block table, "measured"."""
        return self.shown_run.points("tables")

    @cached_property
    def rows(self) -> pl.DataFrame:
        """Sending rows of KV cache, "measured"."""
        return self.shown_run.points("rows")

    @cached_property
    def burst_waste(self) -> pl.DataFrame:
        """What the published burst costs the other ranks, "simulated"."""
        return load.burst_waste(self.points, self.params)

    @cached_property
    def slo_sweep(self) -> pl.DataFrame:
        """The sweep with the published and with the measured costs of an admission, "simulated"."""
        costs = load.measured_costs(self.copy_costs)
        return pl.concat([self.sweep, load.sweep(self.points, self.params, costs)], how="vertical")

    @cached_property
    def best_caps(self) -> pl.DataFrame:
        """The best cap under the limit on the step, "simulated"."""
        return load.best_caps(self.slo_sweep, self.params)

    @cached_property
    def burst_trade(self) -> pl.DataFrame:
        """One published burst, "simulated": admission_cost, cap, step_max_ms, delay_p50_ms, delay_max_ms."""
        return load.burst_trade(self.points, self.params)

    @cached_property
    def sweep(self) -> pl.DataFrame:
        """Step and delay statistics under load by arrivals, admission_cost and cap, "simulated"."""
        return load.sweep(self.points, self.params)


def collect(params: Params) -> Evidence:
    """Gather the published points, the accounts and the run; the simulations run when they are first looked at.

    Raises:
        ParameterError: a source that is no run of this topic, or a file that cannot be read.
    """
    points = published.read("cpu_overhead")
    sync = sync_removal(points)
    run = live.run_of(TOPIC, params.source, lambda: measure(params)) or live.recorded(TOPIC)
    return Evidence(
        params=params,
        run=run,
        points=points,
        gains=gains(points),
        sync=sync,
        dep_growth=dep_growth(published.read("engine_gap"), published.read("engine_gap_gpu")),
        sync_split=sync_split(sync, source_of(points, SYNC)),
        sync_bounds=sync_bounds(sync, source_of(points, SYNC)),
        step_by_sync=step_by_sync(sync, source_of(points, SYNC)),
        sync_growth=sync_growth(points, DRAWN_RANKS),
        admission_costs=admission_costs(points),
        stalls=stalls(points),
        accounts=accounts(points, params),
    )


def measure(params: Params, root: Path | None = None) -> Run:
    """Measure on this machine and keep the run.

    Args:
        params: what to measure, and for how long.
        root: the folder of runs; the usual one if None.

    Raises:
        ParameterError: a parameter that is not allowed here.
        RankError: a rank failed.
    """
    from rackbook.hostwork import recording

    is_file = params.ranks_with is not None and params.ranks_with.endswith(".json")
    return recording.record(
        params.model_dump(include={"ranks_with", "rank_counts", "measure_s", "seed"}),
        rank_counts=params.rank_counts,
        interpreter=(None if is_file else params.ranks_with) or recording.default_interpreter(),
        ranks_file=params.ranks_with if is_file else None,
        block_tokens=BLOCK_TOKENS,
        budget_s=params.measure_s,
        seed=params.seed,
        root=root,
    )


def accounts(points: pl.DataFrame, params: Params) -> pl.DataFrame:
    """Where the time of a step goes: from DEP16 to DEP32, before and after the shorter sync, and your own pair.

    Returns:
        account (which), account_part, from_ms, to_ms, change_ms, origin, source, formula.

    Raises:
        ParameterError: the log of the engine cannot be read.
    """
    steps, gpu = published.read("engine_gap"), published.read("engine_gap_gpu")
    sync_row = points.filter(pl.col("pr") == SYNC)
    sizes = gpu.select("baseline_ep_size", "ep_size").row(0)
    found = {
        f"un-optimised, DEP{sizes[0]} to DEP{sizes[1]}": account_of_growth(
            dep_growth(steps, gpu), *sizes, steps["source"][0]
        ),
        "a shorter synchronisation": account_of_removal(
            sync_removal(points), sync_row["ep_size"][0], sync_row["source"][0]
        ),
    }
    if params.own_step:
        engine_ms, source = own_engine_step(params.own_step[1])
        cpu_ms = float(params.own_step[2]) if len(params.own_step) == 3 else None
        try:
            pair = Pair(float(params.own_step[0]), engine_ms, cpu_ms)
        except DataError as problem:
            raise ParameterError(str(problem)) from None
        found["your engine"] = account_of_pair(pair, source)
    return pl.concat([frame.select(pl.lit(name).alias("account"), pl.all()) for name, frame in found.items()])


def own_engine_step(given: str) -> tuple[float, str]:
    """An engine step in ms and where it is from: a number, or the median decode step of a log with iteration details.

    Raises:
        ParameterError: no such log, or no decode step in it.
    """
    if (number := _positive(given)) is not None:
        return number, "parameters"
    from rackbook.engine import logs

    path = Path(given)
    try:
        steps = logs.iterations(path.read_text("utf-8", errors="replace"), shown(path))
    except OSError as problem:
        raise ParameterError(
            f"own_step: {shown(path)}: {problem.strerror}; allowed: a number > 0, or the log of an engine"
        ) from None
    except DataError as problem:
        raise ParameterError(f"own_step: {problem}") from None
    decoding = steps.filter(
        (pl.col("num_decode_requests") > 0) & (pl.col("num_prefill_tokens") == 0) & ~pl.col("dummy_step")
    )
    if decoding.is_empty():
        raise ParameterError(f"own_step: {shown(path)} has {steps.height} steps, none that only decodes")
    return float(decoding["step_ms"].median()), f"median of {decoding.height} decode steps in {path.name}"


def run_label(evidence: Evidence) -> str:
    """The run in a line, for a chart's subtitle: machine, day, doubts."""
    return live.description(evidence.run)


def hops(evidence: Evidence) -> pl.DataFrame:
    """The hops of each all-reduce at the published number of ranks.

    Returns:
        growth_law, num_ranks, num_hops, dp_sync_ms, hop_ms, origin, source.
    """
    known = evidence.sync_growth.filter(pl.col("origin") == "published")["num_ranks"][0]
    at = evidence.sync_growth.filter((pl.col("num_ranks") == known) & pl.col("num_hops").is_not_null())
    return at.select("growth_law", "num_ranks", "num_hops", "dp_sync_ms", "hop_ms", "origin", "source")


# ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────────


@CHECKS(
    "kv_reads_before", "kv_reads_after", "kv_reads_p90_before", "kv_reads_p90_after", "sync_before_ms",
    "sync_after_ms", "step_before_ms", "step_after_ms", "burst_requests", "cap_before", "cap_after",
    "cap_p90_before", "cap_p90_after", "admission_before_ms", "admission_after_ms",
)  # fmt: skip
def _printed(evidence: Evidence) -> Finding:  # noqa: ARG001
    return OPEN


@CHECKS("gloo_grows_linearly")
def _gloo_grows_linearly(evidence: Evidence) -> Finding:
    if evidence.run is None:
        return Finding(None, note="the source gives one number of ranks; growth needs several, measured")
    return growth_verdicts.linear_growth(evidence.run, "Gloo all-reduce")


@CHECKS("admission_grows_with_prompt")
def _admission_grows_with_prompt(evidence: Evidence) -> Finding:
    if evidence.run is None:
        return Finding(None, note="the source gives one prompt length; growth needs several, measured on an engine")
    before = evidence.admission_costs.filter(pl.col("stage") == "before")["ns_per_token"][0]
    return growth_verdicts.admission_growth(evidence.run, before)


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
