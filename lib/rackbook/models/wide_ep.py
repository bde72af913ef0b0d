"""What the sources print about wide expert parallelism, and what their figures say about each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook import published
from rackbook.models.ep_scaling import EpScaling, fit_ep_scaling
from rackbook.models.memory import GIB, routed_gb, weights_gib_per_gpu

if TYPE_CHECKING:
    from rackbook.catalog import Checkpoint

HALF_UNIT_MS = 0.05
"""Half a unit of the last digit of the two printed MoE times."""


def parts(component: str) -> pl.DataFrame:
    """Rows of table ``wide_ep_scaling`` of a part of the step, "moe" or "rest", by size."""
    return published.read("wide_ep_scaling").filter(pl.col("component") == component).sort("ep_size")


def load() -> int:
    """Requests per GPU at which the MoE times are printed."""
    return published.read("wide_ep_scaling")["requests_per_rank"].unique().item()


def scaling(rest_ms: float | None = None) -> EpScaling:
    """The form through the printed MoE times; the rest of the step is the printed one unless another is given."""
    moe = parts("moe")
    rest = parts("rest")["step_ms"].unique().item() if rest_ms is None else rest_ms
    return fit_ep_scaling(moe["ep_size"], moe["step_ms"], float(rest))


def weights_per_gpu() -> tuple[float, int]:
    """What S2 prints for the weights on each GPU, in GiB, and over how many GPUs the experts are split there."""
    row = published.read("single_node_memory").filter(pl.col("source") == "S2").row(0, named=True)
    return row["weights_gib_per_gpu"], row["num_gpus"]


def weights_by_reading(form: EpScaling, checkpoint: Checkpoint, bandwidth: float) -> pl.DataFrame:
    """Weights on each GPU at EP8: printed, from the checkpoint's parts, and from b at the memory bandwidth.

    Args:
        form: gives b.
        checkpoint: parts of the model.
        bandwidth: memory bandwidth of one GPU in TB/s, at which b is read.

    Returns:
        reading, weight_part, gib_per_gpu, origin, source, formula; a rest only where the experts leave one.
    """
    printed, num_gpus = weights_per_gpu()
    shared = form.shared_ms * 1e-3 * bandwidth * 1e12 / num_gpus / GIB
    rest = printed - shared
    left = "and what is left of the printed" if rest > 0 else "more than all that is printed"

    def rows(reading: str, parts: dict[str, float], source: str, formula: str, origin: str = "derived"):
        return [
            {
                "reading": reading,
                "weight_part": part,
                "gib_per_gpu": gib,
                "origin": origin,
                "source": source,
                "formula": formula,
            }
            for part, gib in parts.items()
        ]

    sharded = f"experts and scales ÷ {num_gpus}, the rest on each GPU"
    return pl.DataFrame(
        [
            *rows("printed", {"all weights": printed}, "S2", "", "published"),
            *rows("parts of the checkpoint", weights_gib_per_gpu(checkpoint, num_gpus), "vllm-recipe", sharded),
            *rows(
                "the same, Engram's scales outside",
                weights_gib_per_gpu(checkpoint, num_gpus, engram_scales=False),
                "vllm-recipe",
                f"{sharded}; scales of the experts only",
            ),
            *rows(
                f"b read at {bandwidth:g} TB/s, {left}",
                {"experts": shared} | ({"rest of the sum": rest} if rest > 0 else {}),
                "S1+S2+vendor-hardware",
                f"b × {bandwidth:g} TB/s ÷ {num_gpus}",
            ),
        ]
    )


def cross_checks(checkpoint: Checkpoint, hbm_tb_per_s: float) -> pl.DataFrame:
    """Printed figures beside what other printed figures imply, whatever the parameters.

    Args:
        checkpoint: parts of the model.
        hbm_tb_per_s: nominal memory bandwidth of one GPU of the rack that S1 is about.

    Returns:
        quantity, value (printed), found (here), difference_percent, unit, reading, origin, source, formula.
    """
    form = scaling()
    moe = dict(parts("moe").select("ep_size", "step_ms").iter_rows())
    share = published.read("step_breakdown").filter(pl.col("component") == "moe")["step_share_percent"].item()
    saving = published.read("engine_gap_gpu").row(0, named=True)
    sweep = published.read("context_sweep").filter(pl.col("context_tokens") == 131072).row(0, named=True)
    printed_weights, num_gpus = weights_per_gpu()
    from_size, to_size = saving["baseline_ep_size"], saving["ep_size"]
    saved = float(form.step_ms(from_size) - form.step_ms(to_size))
    rows: list[tuple[str, float, float, str, str, str, str]] = [
        (
            f"GPU time saved, DEP{from_size} to DEP{to_size}",
            saving["gpu_saving_ms"],
            saved,
            "ms",
            "the only printed figure between the two points; its load is not printed",
            "S1",
            f"b × (1/{from_size} − 1/{to_size})",
        )
    ]
    for size, time in moe.items():
        outside = form.rest_ms - time * (100 / share - 1)
        rows.append(
            (
                f"MoE share of the target's step, if it is DEP{size}'s",
                share,
                100 * time / (time + form.rest_ms),
                "%",
                f"fits only if {outside:.1f} of the {form.rest_ms:g} ms are outside the target's step",
                "S1",
                f"{time:g} ÷ ({time:g} + {form.rest_ms:g})",
            )
        )
    rows += [
        (
            f"target's step at DEP{sweep['ep_size']}, 128K",
            sweep["step_ms"],
            100 * moe[sweep["ep_size"]] / share,
            "ms",
            f"printed at {sweep['requests_per_rank']} requests per GPU, here {load()}, if the share is this size's",
            "S1",
            f"{moe[sweep['ep_size']]:g} ms ÷ {share:g} %",
        ),
        (
            f"weights per GPU at EP{num_gpus}",
            printed_weights,
            sum(weights_gib_per_gpu(checkpoint, num_gpus).values()),
            "GiB",
            "two sources; experts and scales split, everything else on each GPU, Engram outside",
            "S2+vllm-recipe",
            f"({checkpoint.expert_gib.known:g} + {checkpoint.scale_gib.known:g}) ÷ {num_gpus} + "
            f"{checkpoint.dense_gib.known:g} + {checkpoint.embedding_gib.known:g}",
        ),
        (
            "weights of the routed target experts (from the checkpoint)",
            routed_gb(checkpoint),
            form.shared_ms * hbm_tb_per_s,
            "GB",
            "b is too short to read them all at the nominal bandwidth",
            "S1+vllm-recipe+vendor-hardware",
            f"b × {hbm_tb_per_s:g} TB/s",
        ),
        (
            "memory bandwidth",
            hbm_tb_per_s,
            routed_gb(checkpoint) / form.shared_ms,
            "TB/s",
            "the same, as a bandwidth",
            "S1+vllm-recipe+vendor-hardware",
            f"{routed_gb(checkpoint):.1f} GB ÷ b",
        ),
    ]
    return pl.DataFrame(
        [
            {
                "quantity": quantity,
                "value": float(value),
                "found": found,
                "difference_percent": 100 * (found / value - 1),
                "unit": unit,
                "reading": reading,
                "origin": "derived",
                "source": source,
                "formula": formula,
            }
            for quantity, value, found, unit, reading, source, formula in rows
        ]
    )
