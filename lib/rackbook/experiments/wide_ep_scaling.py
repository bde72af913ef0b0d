"""What does wide expert parallelism buy from DEP4 to DEP32, and what bounds it?

Two published times of the target's MoE part, the form a + b/EP through them, the throughput per GPU that follows, the
least time in which the memory delivers the experts, and the places where the sources' figures do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rackbook import catalog, published
from rackbook.claims import Checks, Finding
from rackbook.experiments import forward_runs, live, parameter_rules, wide_ep_implied, wide_ep_measured
from rackbook.models import wide_ep
from rackbook.models.ep_scaling import EpScaling, popularity_read_in
from rackbook.models.memory import GIB, mxfp4_bytes, routed_entries, routed_gb, weights_gib_per_gpu
from rackbook.models.speculation import experts_touched, read_ms
from rackbook.models.wide_ep import HALF_UNIT_MS
from rackbook.runs import Run

CHECKS = Checks("wide_ep_scaling")
doubts = live.doubts

MODEL = "deepseek-v4.1-flash"
PRINTED_HARDWARE = "gb300"
"""The rack that S1 is about; its wide-EP section names no hardware."""
CLAIMED_DRAFT_TOKENS = 5
READ_SHARE = 0.99


class Params(BaseModel):
    """Parameters of notebook 03."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ep_sizes: list[int] = Field(default=[4, 8, 16, 32, 64], min_length=2, description="expert-parallel sizes to show")
    rest_ms: float = Field(default=10.0, gt=0, description="everything but the target's MoE in a step, at every size")
    acceptance_length: float = Field(default=3.51, ge=1, description="tokens that a step yields per request")
    gain_threshold_percent: float = Field(
        default=10.0, gt=0, lt=100, description="gain below which a doubling is marked"
    )
    hardware: parameter_rules.Gpu = Field(
        default=PRINTED_HARDWARE, description="GPU, by its file name in data/hardware"
    )
    bandwidth_tb_per_s: float | None = Field(
        default=None, gt=0, description="memory bandwidth of a GPU; none for the nominal one"
    )
    requests_per_gpu: int = Field(default=64, ge=1, description="load at which the experts read are counted")
    draft_tokens: int = Field(default=CLAIMED_DRAFT_TOKENS, ge=0, description="tokens drafted per request and step")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb300-nvl72", description=live.CLUSTER)
    measured_ep_sizes: list[int] = Field(default=[4, 8, 16, 32], min_length=1, description="sizes to measure")
    measured_context_tokens: int = Field(default=131_072, ge=2, description="context to measure at")

    _ascending = field_validator("ep_sizes")(parameter_rules.ascending)
    _no_more_than_checked = model_validator(mode="after")(parameter_rules.no_more_than_checked)


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``wide_ep_scaling``, published.
        scaling: a + b/EP through the two MoE times, and the rest of the step.
        fit: its two numbers with the range that the rounding of the printed times allows.
        curve: step_ms by ep_size and component ("target MoE", "whole step"), origin "modelled".
        steps: the same at the chosen sizes, and the published MoE times.
        sizes: one row per chosen size: moe_ms, rest_ms, step_ms, step_low_ms and step_high_ms (rounding only),
            step_share_percent of the MoE, steps_per_s, throughput_per_gpu_ratio, output_tok_per_s_per_gpu.
        ratio_curve: throughput_per_gpu_ratio by ep_size, origin "modelled".
        doublings: one row per pair of neighbouring sizes: gain_percent, gain_per_doubling_percent, below_threshold,
            gpu_saving_ms.
        bandwidth: the arithmetic of the memory bandwidth that b implies: quantity, value, low, high, unit.
        roofline: one row per chosen size at the printed load: experts_touched_percent, hbm_floor_ms, moe_ms,
            beside_read_ms, hbm_use_percent, moe_origin.
        coverage: experts_touched_percent by ep_size and requests_per_rank, origin "modelled".
        coverage_at: the same at the chosen load, with popularity_percent and checked_tokens.
        memory: weights per GPU at EP8 by reading and weight_part.
        cross_checks: printed figures beside what others imply: quantity, value, found, difference_percent, unit,
            reading.
        run: the run that ``source`` names; None for "published".
        measured: one row per size of that run: setting, moe_ms, forward_ms and its quality; empty without one.
    """

    points: pl.DataFrame
    scaling: EpScaling
    fit: pl.DataFrame
    curve: pl.DataFrame
    steps: pl.DataFrame
    sizes: pl.DataFrame
    ratio_curve: pl.DataFrame
    doublings: pl.DataFrame
    bandwidth: pl.DataFrame
    roofline: pl.DataFrame
    coverage: pl.DataFrame
    coverage_at: pl.DataFrame
    memory: pl.DataFrame
    cross_checks: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published times, the form through them, what follows from it, and a run, measured now if asked for.

    Raises:
        DataError: unknown hardware, hardware whose bandwidth is not known, or a stored run that is damaged.
        ParameterError: a ``source`` that is not allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = forward_runs.run_of(CHECKS.topic, params)
    measured = wide_ep_measured.sizes(run)
    scaling = wide_ep.scaling(params.rest_ms)
    sizes = by_size(scaling, params)
    coverage, coverage_at = experts_read(params)
    return Evidence(
        points=published.read("wide_ep_scaling"),
        scaling=scaling,
        fit=wide_ep_implied.fit_table(scaling),
        curve=step_curve(scaling, params),
        steps=pl.concat([step_points(sizes), wide_ep_measured.points(measured)]),
        sizes=sizes,
        ratio_curve=ratio_curve(scaling, params),
        doublings=doublings(scaling, params),
        bandwidth=wide_ep_implied.bandwidth_table(
            scaling, _checkpoint(), bandwidth_of(params), _bandwidth_origin(params)
        ),
        roofline=roofline(scaling, params),
        coverage=coverage,
        coverage_at=coverage_at,
        memory=wide_ep.weights_by_reading(scaling, _checkpoint(), bandwidth_of(params)),
        cross_checks=wide_ep.cross_checks(_checkpoint(), _nominal()),
        run=run,
        measured=measured,
    )


def shown_sample(evidence: Evidence, sample: str) -> str:
    """The subtitle of the step chart, with the run's hardware beside the published sample."""
    if evidence.measured.is_empty():
        return sample
    row = evidence.measured.row(0, named=True)
    return (
        f"{sample}; squares: {row['hardware']}, {row['requests_per_rank']} requests, {live.description(evidence.run)}"
    )


def bandwidth_of(params: Params) -> float:
    """Memory bandwidth of one GPU in TB/s: the given one, or the nominal one of the hardware.

    Raises:
        DataError: unknown hardware, or hardware whose bandwidth is not known.
    """
    nominal = catalog.hardware(params.hardware).hbm_tb_per_s
    return nominal.known if params.bandwidth_tb_per_s is None else params.bandwidth_tb_per_s


def _bandwidth_origin(params: Params) -> str:
    hardware = catalog.hardware(params.hardware)
    if params.bandwidth_tb_per_s is None:
        return f"nominal, {hardware.name}"
    nominal = hardware.hbm_tb_per_s.value
    instead = "unknown bandwidth" if nominal is None else f"{nominal:g} TB/s"
    return f"as given, instead of the {instead} of {hardware.name}"


def _checkpoint() -> catalog.Checkpoint:
    return catalog.model(MODEL).checkpoint


def _nominal() -> float:
    return catalog.hardware(PRINTED_HARDWARE).hbm_tb_per_s.known


def _grid(params: Params) -> list[int]:
    sizes = [*params.ep_sizes, *wide_ep.parts("moe")["ep_size"]]
    return np.unique(np.geomspace(min(sizes), max(sizes), 80).round().astype(int)).tolist()


def _form(scaling: EpScaling) -> str:
    return f"{scaling.constant_ms:.3f} ms + {scaling.shared_ms:.3f} ms ÷ EP"


def step_curve(scaling: EpScaling, params: Params) -> pl.DataFrame:
    """MoE time and whole step at every size between the smallest and the largest: ep_size, component, step_ms."""
    grid = _grid(params)
    form = _form(scaling)
    parts = (
        ("target MoE", scaling.moe_ms(grid), form),
        ("whole step", scaling.step_ms(grid), f"{form} + {scaling.rest_ms:g} ms"),
    )
    return pl.concat(
        pl.DataFrame({"ep_size": grid, "component": [component] * len(grid), "step_ms": times}).with_columns(
            pl.lit("modelled").alias("origin"), pl.lit("S1").alias("source"), pl.lit(formula).alias("formula")
        )
        for component, times, formula in parts
    )


def by_size(scaling: EpScaling, params: Params) -> pl.DataFrame:
    """The step and the throughput per GPU at each chosen size; columns as :class:`Evidence` says.

    A row is "derived" where both parts of the step are printed, else "modelled".
    """
    printed = dict(wide_ep.parts("moe").select("ep_size", "step_ms").iter_rows())
    printed_rest = dict(wide_ep.parts("rest").select("ep_size", "step_ms").iter_rows())
    load = wide_ep.load()
    first = float(scaling.step_ms(params.ep_sizes[0]))
    rows = []
    for size in params.ep_sizes:
        moe, step = float(scaling.moe_ms(size)), float(scaling.step_ms(size))
        rounding = float(scaling.rounding_ms(size, HALF_UNIT_MS))
        derived = size in printed and printed_rest[size] == scaling.rest_ms
        rows.append(
            {
                "ep_size": size,
                "moe_ms": moe,
                "rest_ms": scaling.rest_ms,
                "step_ms": step,
                "step_low_ms": step - rounding,
                "step_high_ms": step + rounding,
                "step_share_percent": 100 * moe / step,
                "steps_per_s": 1e3 / step,
                "throughput_per_gpu_ratio": first / step,
                "output_tok_per_s_per_gpu": load * params.acceptance_length * 1e3 / step,
                "origin": "derived" if derived else "modelled",
                "source": "S1",
                "formula": f"{moe:.4g} ms + {scaling.rest_ms:g} ms",
            }
        )
    return pl.DataFrame(rows)


def step_points(sizes: pl.DataFrame) -> pl.DataFrame:
    """The chosen sizes and the published MoE times as points of the step chart: ep_size, component, step_ms."""
    kept = ("ep_size", "component", "step_ms", "origin", "source")
    whole = sizes.with_columns(pl.lit("whole step").alias("component")).select(kept)
    printed = wide_ep.parts("moe").with_columns(pl.lit("target MoE").alias("component")).select(kept)
    between = (
        sizes.filter(~pl.col("ep_size").is_in(printed["ep_size"].to_list()))
        .with_columns(
            pl.lit("target MoE").alias("component"),
            pl.col("moe_ms").alias("step_ms"),
            pl.lit("modelled").alias("origin"),
        )
        .select(kept)
    )
    return pl.concat([printed, between, whole])


def ratio_curve(scaling: EpScaling, params: Params) -> pl.DataFrame:
    """Throughput per GPU relative to the smallest chosen size: ep_size, throughput_per_gpu_ratio."""
    grid = [size for size in _grid(params) if size >= params.ep_sizes[0]]
    ratio = scaling.step_ms(params.ep_sizes[0]) / scaling.step_ms(grid)
    return pl.DataFrame({"ep_size": grid, "throughput_per_gpu_ratio": ratio}).with_columns(
        pl.lit("modelled").alias("origin"), pl.lit("S1").alias("source")
    )


def doublings(scaling: EpScaling, params: Params) -> pl.DataFrame:
    """What each next size gains; a pair that is not a doubling is converted to the gain of one doubling.

    ``gpu_saving_ms`` is what the step shrinks by: if anything else in the step grows by as much, the gain is gone.

    Returns:
        doubling, baseline_ep_size, ep_size, gain_percent, gain_per_doubling_percent, below_threshold, gpu_saving_ms,
        origin "modelled", source, formula.
    """
    rows = []
    for small, large in zip(params.ep_sizes, params.ep_sizes[1:], strict=False):
        per_doubling = scaling.gain_per_doubling(small, large)
        before, after = float(scaling.step_ms(small)), float(scaling.step_ms(large))
        rows.append(
            {
                "doubling": f"{small} → {large}",
                "baseline_ep_size": small,
                "ep_size": large,
                "gain_percent": 100 * scaling.gain(small, large),
                "gain_per_doubling_percent": 100 * per_doubling,
                "below_threshold": bool(100 * per_doubling < params.gain_threshold_percent),
                "gpu_saving_ms": before - after,
                "origin": "modelled",
                "source": "S1",
                "formula": f"{before:.4g} ms ÷ {after:.4g} ms",
            }
        )
    return pl.DataFrame(rows)


def size_at_threshold(evidence: Evidence, params: Params) -> float:
    """The size to which a doubling gains exactly the threshold; a doubling to a larger one gains less."""
    return evidence.scaling.size_of_gain(params.gain_threshold_percent / 100)


def roofline(scaling: EpScaling, params: Params) -> pl.DataFrame:
    """The MoE time at each chosen size and the least time to read the experts that a step touches.

    At the load at which the MoE times are printed, experts spread evenly, each touched expert read once per step.

    Returns:
        ep_size, requests_per_rank, experts_touched_percent, hbm_floor_ms, moe_ms, beside_read_ms,
        hbm_use_percent, moe_origin ("published" where the MoE time is printed), hardware, origin "modelled" (as the
        floor is), source, formula.
    """
    bandwidth, load, experts = bandwidth_of(params), wide_ep.load(), catalog.model(MODEL).experts
    size_gb = routed_gb(_checkpoint())
    printed = wide_ep.parts("moe")["ep_size"].to_list()
    rows = []
    for size in params.ep_sizes:
        tokens = size * load * (1 + params.draft_tokens)
        touched = experts_touched(experts.num_routed.known, experts.top_k.known, tokens)
        floor = read_ms(touched * size_gb * 1e9, size, bandwidth)
        moe = float(scaling.moe_ms(size))
        rows.append(
            {
                "ep_size": size,
                "requests_per_rank": load,
                "experts_touched_percent": 100 * touched,
                "hbm_floor_ms": floor,
                "moe_ms": moe,
                "beside_read_ms": moe - floor,
                "hbm_use_percent": 100 * floor / moe,
                "moe_origin": "published" if size in printed else "modelled",
                "hardware": catalog.hardware(params.hardware).name,
                "origin": "modelled",
                "source": "S1+vllm-recipe+vendor-hardware",
                "formula": f"{size_gb:.1f} GB ÷ ({size} × {bandwidth:g} TB/s)",
            }
        )
    return pl.DataFrame(rows)


def experts_read(params: Params) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Which share of the experts a step reads, by size and load, and at the chosen load.

    Returns:
        Two frames: ep_size, requests_per_rank, checked_tokens (over all GPUs), experts_touched_percent,
        popularity_percent, origin "modelled", source. ``popularity_percent`` is how popular an expert must be, of the
        mean, for 99 of 100 steps to read it.
    """
    experts = catalog.model(MODEL).experts
    num_experts, top_k = experts.num_routed.known, experts.top_k.known
    mean = top_k / num_experts

    def row(size: int, load: int) -> dict[str, Any]:
        tokens = size * load * (1 + params.draft_tokens)
        return {
            "ep_size": size,
            "requests_per_rank": load,
            "checked_tokens": tokens,
            "experts_touched_percent": 100 * experts_touched(num_experts, top_k, tokens),
            "popularity_percent": 100 * popularity_read_in(READ_SHARE, tokens) / mean,
            "origin": "modelled",
            "source": "S1+S2",
        }

    largest = max(256, params.requests_per_gpu)
    loads = np.unique(np.geomspace(1, largest, 60).round().astype(int)).tolist()
    grid = pl.DataFrame([row(size, load) for size in params.ep_sizes for load in loads])
    return grid, pl.DataFrame([row(size, params.requests_per_gpu) for size in params.ep_sizes])


_ALONE = Finding(None, note="one printed time; the other figures do not determine it")


_CLAIMED = {
    "hardware": "GB300", "model": "deepseek-v4.1-flash", "requests_per_rank": 64, "context_tokens": 131_072,
    "draft_tokens": CLAIMED_DRAFT_TOKENS, "timing_scope": "target_only",
}  # fmt: skip
"""Conditions of the printed times; the hardware is that of the source's rack."""


def _moe_check(ep_size: int) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        return live.finding(evidence.run, evidence.measured, "moe_ms", _CLAIMED | {"ep_size": ep_size}) or _ALONE

    return check


for _ep_size in (4, 32):
    CHECKS(f"moe_dep{_ep_size}_ms")(_moe_check(_ep_size))


@CHECKS("rest_ms")
def _rest(_: Evidence) -> Finding:
    return Finding(
        None,
        note="printed as an approximation for both sizes; the MoE share of 62 % would determine it if its parallel "
        "size and the drafter's time were printed",
    )


@CHECKS("draft_comm_offsets_gain")
def _draft(_: Evidence) -> Finding:
    saving = float(wide_ep.scaling().step_ms(16) - wide_ep.scaling().step_ms(32))
    return Finding(None, note=f"no time of the draft is printed; {saving:.2f} ms of it would cancel DEP16 to DEP32")


@CHECKS("gain_diminishes")
def _diminishes(evidence: Evidence) -> Finding:
    at = [
        live.finding(evidence.run, evidence.measured, "forward_ms", _CLAIMED | {"ep_size": size})
        for size in (4, 8, 16, 32)
    ]
    times = [float(each.found) for each in at if each is not None and each.found is not None]
    if len(times) == len(at):
        gains = [small / large - 1 for small, large in pairwise(times)]
        words = ", ".join(f"{100 * gain:.1f} %" for gain in gains)
        note = f"{words} per doubling of the target's step, run {evidence.run.id}"
        return Finding(gains == sorted(gains, reverse=True), "measured", note)
    return Finding(
        None, note="DEP8 and DEP16 are not printed; the form a + b/EP implies it, and two points test no form"
    )


def _fit_check(value: Callable[[EpScaling], float], basis: str, note: str) -> Callable[[Evidence], Finding]:
    def check(_: Evidence) -> Finding:
        return Finding(float(value(wide_ep.scaling())), basis, note)

    return check


CHECKS("fit_constant_ms")(_fit_check(lambda s: s.constant_ms, "derived", "two points, exactly determined"))
CHECKS("fit_slope_ms")(_fit_check(lambda s: s.shared_ms, "derived", "two points, exactly determined"))
CHECKS("fit_dep8_ms")(_fit_check(lambda s: s.moe_ms(8), "modelled", "a + b/8: what the fit gives, no error bar"))
CHECKS("fit_dep16_ms")(_fit_check(lambda s: s.moe_ms(16), "modelled", "a + b/16: what the fit gives, no error bar"))


def _experts_from_fit_gb(scaling: EpScaling) -> float:
    return scaling.shared_ms * _nominal()


def _replicated_gib() -> float:
    parts = weights_gib_per_gpu(_checkpoint(), 1)
    return sum(gib for part, gib in parts.items() if part not in ("experts", "scales"))


CHECKS("expert_bytes_from_fit_gb")(_fit_check(_experts_from_fit_gb, "derived", "b × nominal bandwidth"))
CHECKS("expert_gib_per_gpu_dep8")(
    _fit_check(lambda s: _experts_from_fit_gb(s) * 1e9 / 8 / GIB, "derived", "b × nominal bandwidth ÷ 8")
)
CHECKS("replicated_gib_per_gpu_dep8")(
    _fit_check(
        lambda s: wide_ep.weights_per_gpu()[0] - _experts_from_fit_gb(s) * 1e9 / 8 / GIB,
        "derived",
        "the remainder of the printed sum, so it cannot disagree with it; the checkpoint's parts leave "
        f"{_replicated_gib():.1f} GiB",
    )
)
CHECKS("implied_bandwidth_tb_per_s")(
    _fit_check(lambda s: routed_gb(_checkpoint()) / s.shared_ms, "derived", "weights with scales ÷ b")
)


@CHECKS("bandwidth_above_hbm")
def _above(_: Evidence) -> Finding:
    scaling = wide_ep.scaling()
    least = routed_gb(_checkpoint()) / (scaling.shared_ms + scaling.shared_rounding_ms(HALF_UNIT_MS))
    return Finding(
        least > _nominal(),
        "derived",
        f"at least {least:.2f} TB/s within the rounding of the printed times; b is shorter than the reading, so "
        "something else grows with EP, or not all is read",
    )


@CHECKS("routed_entries_billion")
def _entries(_: Evidence) -> Finding:
    return Finding(routed_entries(_checkpoint()) / 1e9, "derived", "all expert entries less the draft's")


@CHECKS("routed_weights_gb")
def _weights(_: Evidence) -> Finding:
    return Finding(routed_gb(_checkpoint(), scales=False), "derived", "entries at 4 bit")


@CHECKS("routed_weights_with_scales_gb")
def _weights_with_scales(_: Evidence) -> Finding:
    return Finding(routed_gb(_checkpoint()), "derived", "entries at 4 bit, one scale byte per 32")


@CHECKS("expert_checkpoint_gib")
def _all_experts(_: Evidence) -> Finding:
    checkpoint = _checkpoint()
    entries, bits = checkpoint.expert_entries.known, checkpoint.expert_bits.known
    found = mxfp4_bytes(entries, bits=bits, scales=False) / GIB
    return Finding(found, "derived", f"{entries / 1e9:g} billion entries at {bits} bit")


@CHECKS("expert_entries_billion")
def _expert_entries(_: Evidence) -> Finding:
    checkpoint = _checkpoint()
    gib, bits = checkpoint.expert_gib.known, checkpoint.expert_bits.known
    return Finding(gib * GIB * 8 / bits / 1e9, "derived", f"{gib:g} GiB at {bits} bit")


@CHECKS("hbm_tb_per_s", "h200_hbm_tb_per_s")
def _data_sheet(_: Evidence) -> Finding:
    return Finding(None, note="printed by the vendor only; no other figure determines it")
