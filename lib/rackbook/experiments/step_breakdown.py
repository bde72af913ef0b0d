"""Where does a decode step go?

Two published shares of the target's decode step, what they leave, what a faster part would buy, and whether the MoE
share fits the times that the same source prints elsewhere. A kernel profile of the user's own, or of a measured run,
is sorted into the same parts by the names of its kernels, one run by itself or two beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from rackbook import claims, published
from rackbook.claims import Checks, Finding
from rackbook.errors import ParameterError
from rackbook.experiments import forward_runs, live, step_breakdown_measured, vocabulary
from rackbook.importers.kernel_profiles import KernelProfiles, read_kernel_profiles
from rackbook.models import wide_ep
from rackbook.models.amdahl import greatest_speedup, whole_speedup
from rackbook.models.ep_scaling import EpScaling
from rackbook.models.kernel_components import (
    PARTS,
    UNASSIGNED,
    by_component,
    over_ranks,
    read_patterns,
    unassigned,
)
from rackbook.runs import Run
from rackbook.tables import schema

CHECKS = Checks("step_breakdown")
doubts = live.doubts

PUBLISHED_RUN = "S1, published"
_STAGES = ("before", "after")
_COMPONENTS = (
    "run", "component", "part_of_step", "kernel_us", "step_share_percent", "num_kernels", "origin", "source",
    "missing_reason",
)  # fmt: skip
_KERNELS = (
    "run", "kernel", "kernel_us", "step_share_percent", "calls_per_forward", "origin", "source", "missing_reason",
)  # fmt: skip
_COMPARISON = (
    "component", "before_us", "after_us", "difference_us", "before_share_percent", "after_share_percent", "origin",
    "source", "missing_reason",
)  # fmt: skip


class Params(BaseModel):
    """Parameters of notebook 02."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    part_speedup: float = Field(default=2.0, ge=1, le=1000, description="how much faster one part of the step becomes")
    profile_path: str = Field(default="", description="kernels.json, Nsight CSV, folder or folder/case; empty for none")
    profile_after_path: str = Field(default="", description="the same for a run to compare with; empty for none")
    profile_hardware: str = Field(default="not recorded", description="what the profiled runs ran on")
    profile_model: str = Field(default="not recorded", description="the model of those runs")
    rank_statistic: Literal["min", "median", "max"] = Field(
        default="median", description="time of a kernel over the ranks: min, median or max"
    )
    nsight_forwards: list[Annotated[int, Field(ge=1)]] = Field(
        default=[], description="forward passes of each profile, if it is an Nsight recording; empty if not known"
    )
    patterns_path: str = Field(default="", description="TOML of name patterns; empty for data/kernel_patterns.toml")
    num_unassigned: int = Field(default=10, ge=1, description="how many of the largest unassigned kernels are listed")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb300-nvl72", description=live.CLUSTER)
    measured_context_tokens: int = Field(default=131_072, ge=2, description="context to measure at")
    measured_requests_per_rank: int = Field(default=64, ge=1, description="requests per rank to measure with")
    measured_ranks: int | None = Field(default=None, ge=1, description="ranks to measure with; 32 or all if none")
    measured_draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step to measure with")

    @field_validator("nsight_forwards")
    @classmethod
    def _one_per_profile(cls, value: list[int], info: ValidationInfo) -> list[int]:
        profiles = sum(bool(info.data.get(name)) for name in ("profile_path", "profile_after_path"))
        if value and len(value) != profiles:
            raise ValueError(f"got {len(value)} for {profiles} profiles, allowed: one number per profile, or none")
        return value


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``step_breakdown``, published rows.
        shares: run, component, step_share_percent: the published parts with the derived rest, then the parts of the
            user's runs, ``unassigned`` always among them.
        speedups: component, part_speedup, step_speedup: one part faster, the others not, "modelled".
        limits: component, step_share_percent and what ``part_speedup`` and no time at all would buy, "modelled".
        share_curve: ep_size, step_share_percent: MoE's share of MoE + everything else over the size, "modelled".
        share_points: the same at the sizes with printed times, "derived".
        share_checks: ep_size, moe_ms, rest_ms, step_share_percent and what the printed share would mean, "derived".
        implied_ep_size: size at which the curve has the printed share.
        profiles: table ``kernel_profiles``; empty without ``profile_path``.
        components: run, component, part_of_step, kernel_us, step_share_percent, num_kernels; empty without a path.
            Times are null with a missing_reason where the forward passes of a recording are not known; so in the next.
        unassigned: run, kernel, kernel_us, step_share_percent, calls_per_forward; empty without a path.
        comparison: component, before_us, after_us, difference_us and both shares; empty without two profiles.
        run: the run that ``source`` names; None for "published".
        measured: run, setting, forward_ms and its quality: the timed steps of that run; empty without one.
        measured_shares: component, step_share_percent and setting: the target's step in that run; empty without one.
    """

    points: pl.DataFrame
    shares: pl.DataFrame
    speedups: pl.DataFrame
    limits: pl.DataFrame
    share_curve: pl.DataFrame
    share_points: pl.DataFrame
    share_checks: pl.DataFrame
    implied_ep_size: float
    profiles: pl.DataFrame
    components: pl.DataFrame
    unassigned: pl.DataFrame
    comparison: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame
    measured_shares: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published shares, what follows from them, the user's profiles, and a run, measured now if asked for.

    Raises:
        DataError: a profile, a stored run or the file of patterns is not what it should be.
        ParameterError: a profile to compare with, but none to compare; a ``source`` that is not allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = forward_runs.run_of(CHECKS.topic, params)
    of_run = step_breakdown_measured.profiles(run)
    points = published.read("step_breakdown")
    parts = published_parts(points)
    scaling = wide_ep.scaling()
    patterns = read_patterns(params.patterns_path)
    runs = of_run | read_runs(params)
    components = _over_runs(runs, params, lambda kernels: by_component(kernels, patterns), _COMPONENTS)
    left_over = _over_runs(
        runs, params, lambda kernels: unassigned(kernels, patterns).head(params.num_unassigned), _KERNELS
    )
    files = [run.files for run in runs.values()]
    return Evidence(
        points=points,
        shares=pl.concat([parts, profile_parts(components)], how="diagonal"),
        speedups=speedups(parts, params.part_speedup),
        limits=limits(parts, params.part_speedup),
        share_curve=share_curve(scaling),
        share_points=share_points(scaling),
        share_checks=share_checks(points, scaling),
        implied_ep_size=implied_ep_size(points, scaling),
        profiles=pl.concat(files) if files else schema("kernel_profiles").frame([]),
        components=components,
        unassigned=left_over,
        comparison=comparison(components, params),
        run=run,
        measured=step_breakdown_measured.steps(run),
        measured_shares=step_breakdown_measured.shares(run, of_run),
    )


def published_parts(points: pl.DataFrame) -> pl.DataFrame:
    """The published shares and the rest that they leave.

    Args:
        points: table ``step_breakdown``, one setting of one source.

    Returns:
        run, component, step_share_percent, origin ("published", the rest "derived"), source, formula.
    """
    known = points.select("component", "step_share_percent", "origin", "source", "formula")
    printed = [f"{share:g}" for share in known["step_share_percent"]]
    rest = pl.DataFrame(
        {
            "component": ["rest"],
            "step_share_percent": [100 - known["step_share_percent"].sum()],
            "origin": ["derived"],
            "source": [known["source"].unique().item()],
            "formula": [" − ".join(["100", *printed])],
        }
    )
    return pl.concat([known, rest]).select(pl.lit(PUBLISHED_RUN).alias("run"), pl.all())


def speedups(parts: pl.DataFrame, part_speedup: float) -> pl.DataFrame:
    """What the step gains over the speed-up of one part, the others unchanged.

    Args:
        parts: from :func:`published_parts`.
        part_speedup: reached by the curves, which go on to 8 at least.

    Returns:
        component, part_speedup, step_speedup, origin "modelled", source, formula.
    """
    grid = np.unique([*np.geomspace(1, max(8.0, part_speedup), 60), part_speedup])
    return pl.concat(
        pl.DataFrame({"part_speedup": grid, "step_speedup": whole_speedup(share / 100, grid)}).with_columns(
            pl.lit(name).alias("component"),
            pl.lit("modelled").alias("origin"),
            pl.lit(source).alias("source"),
            pl.lit(f"1 ÷ ({1 - share / 100:.2f} + {share / 100:.2f} ÷ speed-up of the part)").alias("formula"),
        )
        for name, share, source in parts.select("component", "step_share_percent", "source").iter_rows()
    )


def limits(parts: pl.DataFrame, part_speedup: float) -> pl.DataFrame:
    """What one faster part buys: at the given speed-up, and at most.

    Returns:
        component, step_share_percent, part_speedup, step_speedup, step_speedup_limit, origin "modelled", source.
    """
    rows = [
        {
            "component": name,
            "step_share_percent": share,
            "part_speedup": part_speedup,
            "step_speedup": float(whole_speedup(share / 100, part_speedup)),
            "step_speedup_limit": greatest_speedup(share / 100),
            "origin": "modelled",
            "source": source,
        }
        for name, share, source in parts.select("component", "step_share_percent", "source").iter_rows()
    ]
    return pl.DataFrame(rows)


def share_curve(scaling: EpScaling) -> pl.DataFrame:
    """MoE's share of MoE + everything else from 2 to 64 GPUs; outside the printed sizes an extrapolation.

    Returns:
        ep_size (fractional), step_share_percent, origin "modelled", source, formula.
    """
    sizes = np.geomspace(2, 64, 61)
    return pl.DataFrame({"ep_size": sizes, "step_share_percent": _share(scaling, sizes)}).with_columns(
        pl.lit("modelled").alias("origin"),
        pl.lit("S1").alias("source"),
        pl.lit(f"t ÷ (t + {scaling.rest_ms:g} ms), t = {scaling.constant_ms:.3f} + {scaling.shared_ms:.3f}/EP").alias(
            "formula"
        ),
    )


def share_points(scaling: EpScaling) -> pl.DataFrame:
    """MoE's share of MoE + everything else at the sizes with printed times.

    Returns:
        ep_size, step_share_percent, origin "derived", source, formula.
    """
    return _moe_times().select(
        "ep_size",
        (100 * pl.col("moe_ms") / (pl.col("moe_ms") + scaling.rest_ms)).alias("step_share_percent"),
        pl.lit("derived").alias("origin"),
        "source",
        pl.format("{} ÷ ({} + {})", "moe_ms", "moe_ms", pl.lit(f"{scaling.rest_ms:g}")).alias("formula"),
    )


def share_checks(points: pl.DataFrame, scaling: EpScaling) -> pl.DataFrame:
    """The printed MoE share beside the printed times: which share they make, and what the printed one would leave.

    "Everything else" may hold more than the target's step, such as the drafter: with the printed share, the target's
    step and the rest of it follow from the MoE time, and what is left of everything else lies outside the target.

    Returns:
        ep_size, moe_ms, rest_ms, step_share_percent (of MoE + everything else), step_ms (the target's step at the
        printed share), target_rest_ms, other_ms, origin "derived", source, formula.
    """
    share = _printed_share(points) / 100
    step = pl.col("moe_ms") / share
    return (
        _moe_times()
        .join(share_points(scaling).select("ep_size", "step_share_percent"), on="ep_size", maintain_order="left")
        .select(
            "ep_size",
            "moe_ms",
            pl.lit(scaling.rest_ms).alias("rest_ms"),
            "step_share_percent",
            step.alias("step_ms"),
            (step - pl.col("moe_ms")).alias("target_rest_ms"),
            (scaling.rest_ms - (step - pl.col("moe_ms"))).alias("other_ms"),
            pl.lit("derived").alias("origin"),
            "source",
            pl.lit(f"step = MoE ÷ {share:g}, rest of it = step − MoE").alias("formula"),
        )
    )


def implied_ep_size(points: pl.DataFrame, scaling: EpScaling) -> float:
    """Size at which MoE would have the printed share of MoE + everything else: b ÷ (rest · p ÷ (1 − p) − a)."""
    share = _printed_share(points) / 100
    return scaling.shared_ms / (scaling.rest_ms * share / (1 - share) - scaling.constant_ms)


def read_runs(params: Params) -> dict[str, KernelProfiles]:
    """The user's profiles by run: none, one, or "before" and "after".

    Raises:
        DataError: as :func:`rackbook.importers.kernel_profiles.read_kernel_profiles`.
        ParameterError: ``profile_after_path`` without ``profile_path``.
    """
    if params.profile_after_path and not params.profile_path:
        raise ParameterError(
            f"profile_after_path: got {params.profile_after_path!r} without profile_path; give the run before as well, "
            "or the one run as profile_path"
        )
    paths = [path for path in (params.profile_path, params.profile_after_path) if path]
    names = _STAGES if len(paths) > 1 else ("your profile",)
    every = params.nsight_forwards or [None] * len(paths)
    return {
        name: read_kernel_profiles(
            path,
            stage=name if name in _STAGES else None,
            hardware=params.profile_hardware,
            model=params.profile_model,
            nsight_forwards=forwards,
        )
        for name, path, forwards in zip(names, paths, every, strict=False)
    }


def profile_parts(components: pl.DataFrame) -> pl.DataFrame:
    """The user's runs in the parts of the published breakdown.

    Args:
        components: as in :class:`Evidence`.

    Returns:
        run, component (a part, or ``unassigned``), step_share_percent, origin, source.
    """
    parts = (
        components.group_by("run", "part_of_step", "origin", "source", maintain_order=True)
        .agg(pl.col("step_share_percent").sum())
        .rename({"part_of_step": "component"})
    )
    order = {part: number for number, part in enumerate((*PARTS, UNASSIGNED))}
    runs = components["run"].unique(maintain_order=True).to_list()
    return parts.sort(
        pl.col("run").replace_strict({run: number for number, run in enumerate(runs)}, return_dtype=pl.Int64),
        pl.col("component").replace_strict(order, return_dtype=pl.Int64),
    ).select("run", "component", "step_share_percent", "origin", "source")


def profile_setting(evidence: Evidence, params: Params) -> str:
    """Model and hardware of the profiles that are shown, for a subtitle; empty without one."""
    said = []
    if evidence.run is not None and not evidence.measured.is_empty():
        row = evidence.measured.row(0, named=True)
        said.append(
            f"{row['model']} on {row['hardware']}, {row['ep_size']} ranks, {row['requests_per_rank']} requests per "
            f"rank, {row['context_tokens']:,} tokens; {live.description(evidence.run)}"
        )
    if params.profile_path:
        own = f"model: {params.profile_model}, hardware: {params.profile_hardware}"
        said.append(f"your profile: {own}" if said else own)
    return "; ".join(said)


def comparison(components: pl.DataFrame, params: Params) -> pl.DataFrame:
    """The user's two profiles compared, else the run with its drafter against the target alone; else empty."""
    if params.profile_after_path:
        return compare(components)
    pair = (step_breakdown_measured.WITH_DRAFTER, step_breakdown_measured.TARGET_ONLY)
    if set(pair) <= set(components["run"]):
        return compare(components, pair)
    return vocabulary.frame(_COMPARISON)


def compare(components: pl.DataFrame, pair: tuple[str, str] = _STAGES) -> pl.DataFrame:
    """Two runs, component by component.

    Args:
        components: as in :class:`Evidence`.
        pair: the runs to take as before and after.

    Returns:
        component, before_us, after_us, difference_us (after − before), before_share_percent, after_share_percent,
        origin "derived", source, missing_reason where a run's times per forward pass are not known; the components in
        their order, ``unassigned`` last.
    """
    unknown = [name for name in pair if components.filter(pl.col("run") == name)["kernel_us"].null_count()]
    reason = f"no difference: the forward passes of {' and '.join(unknown)} are not given" if unknown else None
    before, after = (
        components.filter(pl.col("run") == name).select(
            "component",
            pl.col("kernel_us").alias(f"{stage}_us"),
            pl.col("step_share_percent").alias(f"{stage}_share_percent"),
            pl.col("source").alias(f"{stage}_source"),
        )
        for name, stage in zip(pair, _STAGES, strict=True)
    )
    return before.join(after, on="component", maintain_order="left").select(
        "component",
        "before_us",
        "after_us",
        (pl.col("after_us") - pl.col("before_us")).alias("difference_us"),
        "before_share_percent",
        "after_share_percent",
        pl.lit("derived").alias("origin"),
        pl.concat_str("before_source", "after_source", separator=", ").alias("source"),
        pl.lit(reason, pl.String).alias("missing_reason"),
    )


def why_no_difference(evidence: Evidence) -> str:
    """Why two runs cannot be compared in time; empty where they can."""
    if evidence.comparison.is_empty():
        return "one profile or none: no second run to compare with"
    reason = evidence.comparison["missing_reason"][0]
    return f"{reason}; set nsight_forwards" if reason else ""


def _over_runs(
    runs: dict[str, KernelProfiles],
    params: Params,
    sort: Callable[[pl.DataFrame], pl.DataFrame],
    columns: tuple[str, ...],
) -> pl.DataFrame:
    frames = []
    for name, run in runs.items():
        sources = run.files["source"]
        source = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} other ranks"
        frames.append(
            sort(over_ranks(run.kernels, params.rank_statistic))
            .with_columns(
                pl.lit(name).alias("run"),
                pl.lit("measured").alias("origin"),
                pl.lit(source).alias("source"),
                pl.lit(run.kernels["missing_reason"][0], pl.String).alias("missing_reason"),
            )
            .select(columns)
        )
    return pl.concat(frames) if frames else vocabulary.frame(columns)


def _moe_times() -> pl.DataFrame:
    return wide_ep.parts("moe").select("ep_size", pl.col("step_ms").alias("moe_ms"), "source")


def _share(scaling: EpScaling, ep_size: np.ndarray) -> np.ndarray:
    return 100 * scaling.moe_ms(ep_size) / scaling.step_ms(ep_size)


def _printed_share(points: pl.DataFrame) -> float:
    return points.filter(pl.col("component") == "moe")["step_share_percent"].item()


def _measured_share(evidence: Evidence, part: str) -> Finding | None:
    """A share that a run under the printed conditions found; None without one.

    The source prints no size: a run that agrees reproduces the claim, one that does not may have another size.
    """
    found = live.finding(evidence.run, evidence.measured_shares, "step_share_percent", _PRINTED | {"component": part})
    if found is None or found.found is None:
        return found
    claim = next(c for c in claims.register().claims if c.id == f"{CHECKS.topic}.{part}_share_percent")
    if claims.Verdict(claim, found).verdict == "reproduced":
        return found
    size = evidence.measured_shares["ep_size"][0]
    return Finding(
        None, note=f"{found.note}: {found.found:.1f} % at DEP{size}; the source prints no size for its share"
    )


_PRINTED = {
    "hardware": "GB300", "model": "deepseek-v4.1-flash", "requests_per_rank": 64, "context_tokens": 131_072,
    "timing_scope": "target_only",
}  # fmt: skip
"""Conditions of the printed shares; the hardware is that of the source's rack."""


@CHECKS("moe_share_percent")
def _moe_share(evidence: Evidence) -> Finding:
    if measured := _measured_share(evidence, "moe"):
        return measured
    made = ", ".join(
        f"{share:.1f} % at DEP{size}"
        for size, share in evidence.share_points.select("ep_size", "step_share_percent").iter_rows()
    )
    return Finding(None, note=f"the printed times make {made}, if everything else is the target's; no size is printed")


@CHECKS("attention_indexer_share_percent")
def _attention_indexer_share(evidence: Evidence) -> Finding:
    if measured := _measured_share(evidence, "attention_indexer"):
        return measured
    return Finding(None, note="one printed share; no other printed figure determines it")


@CHECKS("rest_share_percent")
def _rest_share(evidence: Evidence) -> Finding:
    rest = published_parts(evidence.points).filter(pl.col("component") == "rest").row(0, named=True)
    return Finding(rest["step_share_percent"], "derived", rest["formula"])
