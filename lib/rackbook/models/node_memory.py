"""What the two printed deployments hold in the memory of each GPU: weights, KV cache, and what is not named.

Three printed figures of the KV cache give three sizes of a token. What could join them is a guess, and is said so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from rackbook import catalog, published
from rackbook.models.memory import GIB, weights_gib_per_gpu

if TYPE_CHECKING:
    from rackbook.catalog import Checkpoint

NODE, RECIPE = "S2", "vllm-recipe"
"""The two sources that print a deployment: S2 the node of 8 B300, the vLLM recipe four H200."""


def deployment(source: str) -> dict[str, Any]:
    """The row of table ``single_node_memory`` that a source prints."""
    return published.read("single_node_memory").filter(pl.col("source") == source).row(0, named=True)


def kv_bytes_per_token(row: dict[str, Any]) -> float:
    """Printed size of a deployment's KV cache ÷ printed number of tokens that it holds."""
    return row["kv_cache_gib_per_gpu"] * GIB / row["kv_cache_tokens_per_rank"]


def kv_cache_mtok(row: dict[str, Any], footprint: float) -> float:
    """Millions of tokens that a deployment's KV cache would hold at so many bytes per token."""
    return row["kv_cache_gib_per_gpu"] * GIB / footprint / 1e6


def weights_by_deployment(checkpoint: Checkpoint) -> pl.DataFrame:
    """Weights per GPU of both printed deployments beside two readings of the checkpoint's parts.

    Returns:
        hardware, num_gpus, parallelism, reading, value (printed), found, difference_percent, unit, origin "derived",
        source, formula.
    """
    readings = {"all scales with the experts": True, "Engram's scales outside": False}
    rows = []
    for row in published.read("single_node_memory").to_dicts():
        for reading, engram_scales in readings.items():
            parts = weights_gib_per_gpu(checkpoint, row["num_gpus"], engram_scales=engram_scales)
            found = sum(parts.values())
            rows.append(
                {
                    "hardware": row["hardware"],
                    "num_gpus": row["num_gpus"],
                    "parallelism": row["parallelism"],
                    "reading": reading,
                    "value": row["weights_gib_per_gpu"],
                    "found": found,
                    "difference_percent": 100 * (found / row["weights_gib_per_gpu"] - 1),
                    "unit": "GiB",
                    "origin": "derived",
                    "source": "vllm-recipe",
                    "formula": f"(experts + scales) ÷ {row['num_gpus']} + attention, dense, routers + embedding, head",
                }
            )
    return pl.DataFrame(rows)


def memory_budget() -> pl.DataFrame:
    """What of a B300's memory the source names: quantity, value, unit, origin, source, formula."""
    row = deployment(NODE)
    hbm_gb = catalog.hardware(row["hardware"].lower()).hbm_gb.known
    total = hbm_gb * 1e9 / GIB
    weights, cache = row["weights_gib_per_gpu"], row["kv_cache_gib_per_gpu"]
    rest = total - weights - cache
    rows = [
        ("weights", weights, "GiB", "published", "S2", None),
        ("KV cache", cache, "GiB", "published", "S2", None),
        ("memory of the GPU", total, "GiB", "derived", "vendor-hardware", f"{hbm_gb:g} × 10⁹ B"),
        ("not named", rest, "GiB", "derived", "S2+vendor-hardware", "memory − weights − KV cache"),
        ("not named", 100 * rest / total, "% of the memory", "derived", "S2+vendor-hardware", "÷ memory"),
    ]
    return pl.DataFrame(rows, schema=["quantity", "value", "unit", "origin", "source", "formula"], orient="row")


def kv_figures(footprint: float) -> pl.DataFrame:
    """The three figures of the KV cache, as bytes per token, with the range of their rounding.

    For a capacity printed as "about", one unit of its last digit; for a size, half a unit.

    Args:
        footprint: bytes per token of the global KV cache, as S1 prints it.

    Returns:
        reading, kv_bytes_per_token, low, high, kv_cache_mtok (what the 160 GiB of the B300 deployment hold at
        that figure), context_tokens (what each of its 256 sequences could then have), origin, source, formula.
    """
    node, recipe = deployment(NODE), deployment(RECIPE)
    capacity, seqs = node["kv_cache_gib_per_gpu"] * GIB, node["max_seqs_per_rank"]
    rows: list[tuple[str, float, float, float, str, str, str]] = [
        ("S1: footprint of the global KV cache", footprint, footprint - 0.5, footprint + 0.5, "published", "S1", "")
    ]
    for row, half_gib in ((recipe, 0.05), (node, 0.5)):
        unit_tokens = 1e6
        gib, tokens = row["kv_cache_gib_per_gpu"], row["kv_cache_tokens_per_rank"]
        rows.append(
            (
                f"{row['source']}: {row['num_gpus']}×{row['hardware']}, {row['parallelism']}",
                kv_bytes_per_token(row),
                (gib - half_gib) * GIB / (tokens + unit_tokens),
                (gib + half_gib) * GIB / (tokens - unit_tokens),
                "derived",
                row["source"],
                f"{gib:g} GiB ÷ {tokens / 1e6:g}M tokens",
            )
        )
    return pl.DataFrame(
        [
            {
                "reading": reading,
                "kv_bytes_per_token": per_token,
                "low": low,
                "high": high,
                "kv_cache_mtok": capacity / per_token / 1e6,
                "context_tokens": int(capacity / per_token / seqs),
                "origin": origin,
                "source": source,
                "formula": formula,
            }
            for reading, per_token, low, high, origin, source, formula in rows
        ]
    )


def kv_candidates(footprint: float, max_model_len: int) -> pl.DataFrame:
    """Explanations of the KV figures, none of them established: what each would have to be on both deployments.

    Args:
        footprint: bytes per token of the global KV cache, as S1 prints it.
        max_model_len: longest request, in tokens, that the capacity is counted for.

    Returns:
        assumption, quantity, hardware, found, unit, origin "modelled", source, formula.
    """
    rows = []
    for row in (deployment(NODE), deployment(RECIPE)):
        per_token = kv_bytes_per_token(row)
        for assumption, quantity, found, unit, formula in (
            (
                "the 890 B are one of several KV groups, all as large",
                "KV groups",
                per_token / footprint,
                "groups",
                "bytes per token ÷ 890",
            ),
            (
                "the 890 B hold for 4-bit elements, the caches have wider ones",
                "bits per element",
                4 * per_token / footprint,
                "bits",
                "4 × bytes per token ÷ 890",
            ),
            (
                "the capacity counts requests of max_model_len, each with a fixed part (windows, padding)",
                "fixed part of a request",
                (per_token - footprint) * max_model_len / 1e6,
                "MB",
                f"(bytes per token − 890) × {max_model_len:,} tokens",
            ),
        ):
            rows.append(
                {
                    "assumption": assumption,
                    "quantity": quantity,
                    "hardware": row["hardware"],
                    "found": found,
                    "unit": unit,
                    "origin": "modelled",
                    "source": f"S1+{row['source']}",
                    "formula": formula,
                }
            )
    return pl.DataFrame(rows).sort("assumption", maintain_order=True)
