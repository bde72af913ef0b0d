"""The JSON that ``vllm bench forward`` writes: checked, and turned into points with their quality."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rackbook.engine.cases import Case
from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.tables import column

UNSTEADY_PERCENT = 0.5
"""Spread of the samples' medians above which vLLM itself warns that the timing is unstable."""

GRAPH_RMS = 0.01
"""Relative difference between graph and eager pass above which the graph may not do the same work; our own limit."""

WRITTEN_BY = "0.33.0"
_LAST_DIGITS = 1e-9  # hosts may add up the same numbers in another order
_ROUNDED_US = 0.011
"""Samples are written with two decimals, the median in full."""

Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Latency(_Part):
    timer: str
    median: Microseconds
    sample_spread_pct: float = Field(ge=0, allow_inf_nan=False)
    mean: Microseconds
    std: float = Field(ge=0, allow_inf_nan=False)
    min: Microseconds
    p90: Microseconds
    count: int = Field(ge=1)
    samples_us: list[Microseconds] = Field(min_length=1)


class _Comparison(_Part):
    max_abs: float
    relative_rms: float


class _Drafter(_Part):
    method: str
    num_draft_tokens: int = Field(ge=0)
    graph_matches_eager: bool
    valid_token_ids: bool


class _Rank(_Part):
    num_tokens: int = Field(ge=1)
    num_local_tokens: int = Field(ge=1)
    num_tokens_after_padding: int = Field(ge=1)
    routing: str
    timing_scope: str
    graph_vs_eager: _Comparison
    graph_deterministic: bool
    finite: bool
    drafter: _Drafter | None = None
    latency_us: _Latency


class _Request(_Part):
    query_len: int = Field(ge=1)
    kv_len: int = Field(ge=1)
    num_draft_tokens: int = Field(ge=0)
    chunked: bool


class _Entry(_Part):
    case: str
    requests: list[_Request] = Field(min_length=1)
    median_us: Microseconds
    ranks: list[_Rank] = Field(min_length=1)


@dataclass(frozen=True)
class Timed:
    """One batch, timed.

    Attributes:
        case: the batch that was asked for.
        num_ranks: ranks that took part.
        forward_ms: median over all replays; a replay lasts as long as its slowest rank.
        forward_min_ms: shortest replay.
        forward_p90_ms: 90th percentile of the replays.
        num_replays: replays timed.
        spread_percent: spread of the samples' medians, of the median.
        graph_rms: largest difference of a rank's graph from its eager pass; None where it is not a number.
        deterministic: whether two replays agreed on every rank.
        finite: whether the output was finite on every rank.
        drafts_agree: whether every rank's drafts were valid and as in the eager pass; None without a drafter.
        scope: "target_only" or "target_and_drafter".
        routing: how experts were chosen.
    """

    case: Case
    num_ranks: int
    forward_ms: float
    forward_min_ms: float
    forward_p90_ms: float
    num_replays: int
    spread_percent: float
    graph_rms: float | None
    deterministic: bool
    finite: bool
    drafts_agree: bool | None
    scope: str
    routing: str

    @property
    def doubts(self) -> list[str]:
        """Why the time is not to be used; empty if nothing speaks against it."""
        found = []
        if self.spread_percent > UNSTEADY_PERCENT:
            found.append(
                f"unsteady: sample medians spread by {self.spread_percent:.2f} %, more than {UNSTEADY_PERCENT:g} %"
            )
        if not self.finite:
            found.append("the output is not finite")
        if not self.deterministic:
            found.append("two replays of the same graph differ")
        if self.graph_rms is None:
            found.append("the graph's difference from the eager pass is not a number")
        elif self.graph_rms > GRAPH_RMS:
            found.append(f"graph and eager pass differ by {self.graph_rms:.2g} (relative RMS), more than {GRAPH_RMS:g}")
        if self.drafts_agree is False:
            found.append("the drafts are invalid, or other ones than in the eager pass")
        return found


def read(path: Path, cases: Sequence[Case], num_ranks: int) -> list[Timed]:
    """Read one output file.

    Args:
        path: of ``--output-json``.
        cases: what was asked for.
        num_ranks: ranks that were started.

    Returns:
        One entry per case, in their order.

    Raises:
        DataError: no such file, a truncated one, one of another version of vLLM, a latency that is no number above
            zero, other cases or ranks than were asked for, or ranks that differ in what they share.
    """
    where = shown(path)
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{where}: no such file; vllm bench forward writes it at its very end") from None
    except (ValueError, UnicodeDecodeError) as problem:
        raise DataError(f"{where}: not readable JSON ({problem}); truncated, or still being written?") from None
    if not isinstance(content, list):
        raise DataError(
            f"{where}: got {type(content).__name__}, expected a list with one entry per case; is it the output of "
            "vllm bench forward?"
        )
    found = {entry.case: entry for entry in (_entry(item, where, place) for place, item in enumerate(content, start=1))}
    if len(found) < len(content):
        raise DataError(f"{where}: a case stands twice among {', '.join(item['case'] for item in content)}")
    if missing := [case.name for case in cases if case.name not in found]:
        raise DataError(f"{where}: no result for {', '.join(missing)}; got {', '.join(found) or 'none'}")
    if others := sorted(found.keys() - {case.name for case in cases}):
        raise DataError(
            f"{where}: got a result for {', '.join(others)}, which was not asked for; is it another run's file?"
        )
    return [_timed(found[case.name], case, num_ranks, f"{where}, case {case.name}") for case in cases]


def points(stage: str, timed: Sequence[Timed]) -> pl.DataFrame:
    """Results as rows: the coordinates of a batch of equal requests, its time, and its quality.

    Returns:
        bench_stage, bench_case, num_ranks, ep_size, requests_per_rank, query_tokens, context_tokens, draft_tokens,
        timing_scope, bench_routing, forward_ms, forward_min_ms, forward_p90_ms, num_replays, sample_spread_percent,
        graph_vs_eager_rms, graph_deterministic, finite, drafts_agree, stable, doubt.
    """
    rows = []
    for each in timed:
        first = each.case.requests[0]
        rows.append(
            {
                "bench_stage": stage,
                "bench_case": str(each.case),
                "num_ranks": each.num_ranks,
                "ep_size": each.num_ranks,
                "requests_per_rank": each.case.num_requests,
                "query_tokens": first.query_tokens,
                "context_tokens": each.case.context_tokens,
                "draft_tokens": first.draft_tokens,
                "timing_scope": each.scope,
                "bench_routing": each.routing,
                "forward_ms": each.forward_ms,
                "forward_min_ms": each.forward_min_ms,
                "forward_p90_ms": each.forward_p90_ms,
                "num_replays": each.num_replays,
                "sample_spread_percent": each.spread_percent,
                "graph_vs_eager_rms": each.graph_rms,
                "graph_deterministic": each.deterministic,
                "finite": each.finite,
                "drafts_agree": each.drafts_agree,
                "stable": not each.doubts,
                "doubt": "; ".join(each.doubts) or None,
            }
        )
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in rows[0]}, orient="row")


def _entry(item: Any, where: str, place: int) -> _Entry:
    name = item.get("case", "without name") if isinstance(item, dict) else type(item).__name__
    try:
        return _Entry.model_validate(item)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise DataError(
                f"{where}: entry {place} ({name}): {field} is missing; vLLM {WRITTEN_BY} writes it, so another version "
                "wrote this file"
            ) from None
        raise DataError(
            f"{where}: entry {place} ({name}): {field}: got {first['input']!r}, allowed: "
            f"{first['msg'].removeprefix('Input should be ')}"
        ) from None


def _timed(entry: _Entry, case: Case, num_ranks: int, where: str) -> Timed:
    got = [(r.query_len, r.kv_len, r.num_draft_tokens, r.chunked) for r in entry.requests]
    wanted = [
        (r.query_tokens, r.context_tokens, r.draft_tokens, r.chunked) for r in case.requests for _ in range(r.count)
    ]
    if got != wanted:
        place = next(
            (i for i, (g, w) in enumerate(zip(got, wanted, strict=False)) if g != w), min(len(got), len(wanted))
        )
        raise DataError(
            f"{where}: got {len(got)} requests, other ones than the {len(wanted)} of {case} (from request {place + 1} "
            "on); was it run with --kv-len-jitter 0?"
        )
    if len(entry.ranks) != num_ranks:
        raise DataError(f"{where}: got {len(entry.ranks)} ranks, {num_ranks} were started")
    latency = entry.ranks[0].latency_us
    if len(latency.samples_us) != latency.count:
        raise DataError(f"{where}: got {len(latency.samples_us)} samples, expected count, {latency.count}")
    if abs(statistics.median(latency.samples_us) - latency.median) > _ROUNDED_US or entry.median_us != latency.median:
        raise DataError(
            f"{where}: the median of the samples is {statistics.median(latency.samples_us):g} µs, the file says "
            f"{latency.median:g} and {entry.median_us:g} µs; was it edited?"
        )
    if (num_ranks > 1) != latency.timer.endswith("rank_max"):
        raise DataError(
            f"{where}: got the timer {latency.timer!r} with {num_ranks} ranks; a replay lasts as its slowest"
        )
    for number, rank in enumerate(entry.ranks[1:], start=1):
        other = rank.latency_us
        if other.samples_us != latency.samples_us or not math.isclose(
            other.sample_spread_pct, latency.sample_spread_pct, rel_tol=_LAST_DIGITS, abs_tol=_LAST_DIGITS
        ):
            raise DataError(
                f"{where}: ranks 0 and {number} differ in latency_us (medians {latency.median:g} and "
                f"{other.median:g} µs, spreads {latency.sample_spread_pct:g} and {other.sample_spread_pct:g} %); vLLM "
                f"{WRITTEN_BY} gives every rank the replays of the slowest, so another version wrote this file"
            )
    differences = [rank.graph_vs_eager.relative_rms for rank in entry.ranks]
    drafters = [rank.drafter for rank in entry.ranks if rank.drafter is not None]
    if 0 < len(drafters) < num_ranks:
        raise DataError(f"{where}: {len(drafters)} of {num_ranks} ranks have a drafter; all have it, or none")
    return Timed(
        case=case,
        num_ranks=num_ranks,
        forward_ms=latency.median / 1e3,
        forward_min_ms=latency.min / 1e3,
        forward_p90_ms=latency.p90 / 1e3,
        num_replays=latency.count,
        spread_percent=latency.sample_spread_pct,
        graph_rms=max(differences) if all(map(math.isfinite, differences)) else None,
        deterministic=all(rank.graph_deterministic for rank in entry.ranks),
        finite=all(rank.finite for rank in entry.ranks),
        drafts_agree=all(d.graph_matches_eager and d.valid_token_ids for d in drafters) if drafters else None,
        scope=_same(entry, "timing_scope", where),
        routing=_same(entry, "routing", where),
    )


def _same(entry: _Entry, name: str, where: str) -> str:
    values = sorted({getattr(rank, name) for rank in entry.ranks})
    if len(values) > 1:
        raise DataError(f"{where}: the ranks differ in {name}: {', '.join(values)}")
    return values[0]
