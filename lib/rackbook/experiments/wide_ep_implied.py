"""03, what the two printed times imply: the fit's numbers and the memory bandwidth, within the rounding of both."""

from __future__ import annotations

import numpy as np
import polars as pl

from rackbook import catalog
from rackbook.models import wide_ep
from rackbook.models.ep_scaling import EpScaling
from rackbook.models.memory import routed_gb
from rackbook.models.wide_ep import HALF_UNIT_MS


def fit_table(scaling: EpScaling) -> pl.DataFrame:
    """The fit's two numbers: quantity, value, low, high, unit, origin, source, formula.

    Low and high say what the rounding of the two printed times allows; a two-point fit has no error bar.
    """
    constant, shared = float(scaling.rounding_ms(np.inf, HALF_UNIT_MS)), scaling.shared_rounding_ms(HALF_UNIT_MS)
    (small, slow), (large, fast) = wide_ep.parts("moe").select("ep_size", "step_ms").iter_rows()
    return _quantities(
        [
            (
                "a: MoE time that does not shrink",
                *_around(scaling.constant_ms, constant),
                "ms",
                f"{slow:g} − b ÷ {small}",
            ),
            (
                "b: MoE time that the GPUs share",
                *_around(scaling.shared_ms, shared),
                "ms",
                f"({slow:g} − {fast:g}) ÷ (1/{small} − 1/{large})",
            ),
        ],
        source="S1",
    )


def bandwidth_table(
    scaling: EpScaling, checkpoint: catalog.Checkpoint, bandwidth_tb_per_s: float, bandwidth_from: str
) -> pl.DataFrame:
    """The memory bandwidth that b implies if b is the reading of every routed expert, step by step.

    Args:
        scaling: the form through the two printed times.
        checkpoint: sizes of the weights.
        bandwidth_tb_per_s: the memory's bandwidth to compare with.
        bandwidth_from: where that is from, for the row that shows it.

    Returns:
        quantity, value, low, high, unit, origin "derived", source, formula; low and high from the rounding of the two
        printed times alone.
    """
    shared, half = scaling.shared_ms, scaling.shared_rounding_ms(HALF_UNIT_MS)
    entries, draft = (n.known / 1e9 for n in (checkpoint.expert_entries, checkpoint.draft_expert_entries))
    small, large = wide_ep.parts("moe")["ep_size"]
    difference = 1 / small - 1 / large
    with_scales, without = routed_gb(checkpoint), routed_gb(checkpoint, scales=False)
    given = f"{bandwidth_tb_per_s:g} TB/s"

    def implied(weights_gb: float) -> tuple[float, float, float]:
        return weights_gb / shared, weights_gb / (shared + half), weights_gb / (shared - half)

    return _quantities(
        [
            (
                "routed experts of the target",
                entries - draft,
                None,
                None,
                "billion weights",
                f"{entries:g} − {draft:g}",
            ),
            ("their weights without scales", without, None, None, "GB", f"{checkpoint.expert_bits.known} bits each"),
            ("their weights with scales", with_scales, None, None, "GB", "and one scale byte per 32 weights"),
            ("bandwidth that b implies, without scales", *implied(without), "TB/s", "weights ÷ b"),
            ("bandwidth that b implies, with scales", *implied(with_scales), "TB/s", "weights ÷ b"),
            ("bandwidth of the memory", bandwidth_tb_per_s, None, None, "TB/s", bandwidth_from),
            (
                "what b can read at that bandwidth",
                *_around(shared * bandwidth_tb_per_s, half * bandwidth_tb_per_s),
                "GB",
                f"b × {given}",
            ),
            (
                f"growth of the other MoE time, DEP{small} to DEP{large}, if all is read at that bandwidth",
                *_around((with_scales / bandwidth_tb_per_s - shared) * difference, half * difference),
                "ms",
                f"(weights ÷ {given} − b) × (1/{small} − 1/{large})",
            ),
            (
                "least bandwidth if what grows is an exchange in proportion to 1 − 1/EP",
                with_scales / (shared + scaling.constant_ms),
                None,
                None,
                "TB/s",
                "weights ÷ (a + b)",
            ),
        ],
        source="S1+vllm-recipe+vendor-hardware",
    )


def _around(value: float, half: float) -> tuple[float, float, float]:
    return value, value - half, value + half


def _quantities(rows: list[tuple[str, float, float | None, float | None, str, str]], source: str) -> pl.DataFrame:
    names = ("quantity", "value", "low", "high", "unit", "formula")
    return pl.DataFrame(
        [dict(zip(names, row, strict=True)) for row in rows],
        schema_overrides={"low": pl.Float64, "high": pl.Float64},
    ).select(*names[:-1], pl.lit("derived").alias("origin"), pl.lit(source).alias("source"), "formula")
