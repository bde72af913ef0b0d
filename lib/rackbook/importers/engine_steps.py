"""Per-step records of a vLLM engine, as dynamo's forward-pass metrics write them (one row per engine step)."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.tables import schema

FILE = "fpm_metrics_phase.csv"
_NEEDED = ("ctx_tokens", "decode_requests", "decode_kv_tokens", "latency_ms")


def read_engine_steps(path: str | Path, *, hardware: str, model: str) -> pl.DataFrame:
    """Read measured engine steps.

    Args:
        path: an ``fpm_metrics_phase.csv``, or a folder that holds one.
        hardware: what the steps ran on, as far as it is known.
        model: the model that was served.

    Returns:
        Table ``engine_steps``: one row per step that did work, in file order, origin "measured".

    Raises:
        DataError: no such file, a file without context depths (``fpm_metrics.csv``), missing columns,
            a latency that is not positive, or no step at all.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    name = shown(file)
    if not file.is_file():
        raise DataError(f"{name}: no such file; expected a {FILE} or a folder that holds one")
    try:
        raw = pl.read_csv(file, infer_schema=False)
    except (pl.exceptions.PolarsError, UnicodeDecodeError) as problem:
        raise DataError(f"{name}: not a readable CSV: {problem}") from None
    if missing := [column for column in _NEEDED if column not in raw.columns]:
        raise DataError(
            f"{name}: columns {', '.join(missing)} are missing, got {', '.join(raw.columns)}; "
            f"take the {FILE} of the same run, which records context depths"
        )
    numbers = raw.select(pl.col(column).cast(pl.Float64, strict=False) for column in _NEEDED).with_row_index(
        "step", offset=1
    )
    bad = numbers.filter(
        pl.any_horizontal(pl.col(_NEEDED).is_null() | pl.col(_NEEDED).is_nan()) | (pl.col("latency_ms") <= 0)
    )
    if bad.height:
        row = bad.row(0, named=True)
        raise DataError(f"{name}, row {row['step'] + 1}: got {row}, expected numbers ≥ 0 and latency_ms > 0")
    steps = numbers.filter((pl.col("decode_requests") > 0) | (pl.col("ctx_tokens") > 0))
    if steps.is_empty():
        raise DataError(f"{name}: no step with work in {raw.height} rows")
    return schema("engine_steps").frame(
        steps.select(
            pl.lit(hardware).alias("hardware"),
            pl.lit(model).alias("model"),
            pl.col("step").cast(pl.Int64),
            pl.col("ctx_tokens").cast(pl.Int64).alias("num_prefill_tokens"),
            pl.col("decode_requests").cast(pl.Int64).alias("num_decode_requests"),
            pl.when(pl.col("decode_requests") > 0)
            .then(pl.col("decode_kv_tokens") / pl.col("decode_requests"))
            .alias("mean_context_tokens"),
            pl.col("latency_ms").alias("step_ms"),
            pl.lit("measured").alias("origin"),
            pl.lit(file.parent.name).alias("source"),
            ("row " + (pl.col("step") + 1).cast(pl.String)).alias("locator"),
        ),
        where=name,
    )
