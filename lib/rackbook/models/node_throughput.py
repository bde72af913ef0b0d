"""What the sources print about engines on one node of 8 GPUs, and what printed figures say about each other."""

from __future__ import annotations

from typing import Any

import polars as pl

from rackbook import published

K = 1024


def run(engine: str, input_tokens: int) -> dict[str, Any]:
    """The row of table ``single_node`` of an engine at a prompt length."""
    points = published.read("single_node")
    return points.filter((pl.col("engine") == engine) & (pl.col("input_tokens") == input_tokens)).row(0, named=True)


def prefill(engine: str) -> dict[str, Any]:
    """The row of table ``single_node_prefill`` of an engine."""
    return published.read("single_node_prefill").filter(pl.col("engine") == engine).row(0, named=True)


def graph_runs() -> tuple[dict[str, Any], dict[str, Any]]:
    """The two rows of table ``single_node_graphs``: with the smaller and with the larger captured steps."""
    few, many = published.read("single_node_graphs").sort("max_capture_tokens").to_dicts()
    return few, many


def printed_ratio(phase: str, input_tokens: int | None) -> float:
    """Ratio vLLM ÷ DeepInfer as printed, for a phase and a prompt length; None for the ratio without one."""
    table = published.read("single_node_ratio").filter(pl.col("phase") == phase)
    same = pl.col("input_tokens").is_null() if input_tokens is None else pl.col("input_tokens") == input_tokens
    return table.filter(same)["speedup"].item()


def total_tok_per_s(run: dict[str, Any]) -> float:
    """Input and output tokens per second of a run with fixed lengths, from its output tokens per second."""
    return run["output_tok_per_s"] * (run["input_tokens"] + run["output_tokens"]) / run["output_tokens"]


def output_tok_per_s(run: dict[str, Any]) -> float:
    """Output tokens per second of a run with fixed lengths, from its total: the inverse of the above."""
    share = run["output_tokens"] / (run["input_tokens"] + run["output_tokens"])
    return run["total_tok_per_s"] * share


def decode_quotient() -> float:
    """Ratio vLLM ÷ DeepInfer, output throughput at 1K → 1K, from the printed throughputs."""
    return run("vLLM", K)["output_tok_per_s"] / run("DeepInfer", K)["output_tok_per_s"]


def prefill_quotient() -> float:
    """Ratio vLLM ÷ DeepInfer, prefill throughput, from the printed throughputs."""
    return prefill("vLLM")["prefill_tok_per_s"] / prefill("DeepInfer")["prefill_tok_per_s"]


def prefill_tok_per_s_per_gpu() -> float:
    """Prefill throughput of vLLM per GPU, from the printed throughput of the node."""
    row = prefill("vLLM")
    return row["prefill_tok_per_s"] / row["num_gpus"]


def graphs_gain_percent() -> float:
    """What the larger captured steps gain in output throughput; one run each."""
    few, many = graph_runs()
    return 100 * (many["output_tok_per_s"] / few["output_tok_per_s"] - 1)


def ratios() -> pl.DataFrame:
    """Printed figures beside what other printed figures give; a side that is not there is null, and why is said.

    Returns:
        quantity, value (printed), found (here), difference_percent, unit, reading, origin "derived", source.
    """
    short, long = run("vLLM", 128), run("vLLM", K)
    few, many = graph_runs()
    elided = "the row of the table is elided in the source"
    rows: list[tuple[str, float | None, float | None, str, str, str]] = [
        (
            "total, vLLM 128 → 1K",
            short["total_tok_per_s"],
            total_tok_per_s(short),
            "tokens/s",
            "from the printed output",
            "S2",
        ),
        ("total, vLLM 1K → 1K", None, total_tok_per_s(long), "tokens/s", elided, "S2"),
        (
            "vLLM ÷ DeepInfer, decode 1K → 1K",
            printed_ratio("decode", K),
            decode_quotient(),
            "×",
            "rounds to the printed 2.0, but is not 'at least twice'",
            "S2",
        ),
        ("vLLM ÷ DeepInfer, decode 8K → 1K", printed_ratio("decode", 8 * K), None, "×", elided, "S2"),
        (
            "vLLM ÷ DeepInfer, prefill",
            printed_ratio("prefill", None),
            prefill_quotient(),
            "×",
            "the printed ratio has a measurement of its own that the summary omits",
            "S2",
        ),
        (
            "prefill per GPU, vLLM",
            prefill("vLLM")["prefill_tok_per_s_per_gpu"],
            prefill_tok_per_s_per_gpu(),
            "tokens/s/GPU",
            "printed as 'about'",
            "S2",
        ),
        (
            "output, vLLM 1K → 1K, repeated in the text",
            many["output_tok_per_s"],
            long["output_tok_per_s"],
            "tokens/s",
            "the table's figure, rounded",
            "S2",
        ),
        (
            f"gain of graphs to {many['max_capture_tokens']:,} over {few['max_capture_tokens']:,} tokens",
            None,
            graphs_gain_percent(),
            "%",
            "not printed; one run each",
            "S2",
        ),
    ]
    return pl.DataFrame(
        [
            {
                "quantity": quantity,
                "value": None if value is None else float(value),
                "found": found,
                "difference_percent": None if value is None or found is None else 100 * (found / value - 1),
                "unit": unit,
                "reading": reading,
                "origin": "derived",
                "source": source,
            }
            for quantity, value, found, unit, reading, source in rows
        ],
        infer_schema_length=None,
    )
