"""The published figures of host work, taken apart: what each fix changed, what overlaps, what an admission costs."""

from __future__ import annotations

import polars as pl

from rackbook.models.collective import growth_law, hop_ms, sync_ms
from rackbook.models.host_steps import ADMISSION, BURSTS, SYNC, before_and_after
from rackbook.models.step_account import Pair, Removal, StepGrowth
from rackbook.tables import column

METRICS = (
    "total_tok_per_s_per_gpu", "interactivity_p90_tok_per_s", "dp_sync_ms", "step_ms", "admissions_per_step",
    "admission_cpu_ms",
)  # fmt: skip
"""What the source gives before and after a fix, in the order in which it is shown."""

ROUNDING_MS = {"dp_sync_ms": 0.05, "step_ms": 0.005}
"""Half a unit of the last printed digit."""


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


def account_of_growth(growth: StepGrowth, from_size: int, to_size: int, source: str) -> pl.DataFrame:
    """From the narrower engine's step to the wider one's, part by part.

    Args:
        growth: both steps, and by how much less the wider one runs on the GPU.
        from_size: expert-parallel size of the narrower engine.
        to_size: of the wider one.
        source: of the published steps.

    Returns:
        account_part, from_ms, to_ms, change_ms, origin ("published" for the printed steps, "derived" else), source,
        formula; in the order of reading.
    """
    gpu_end = growth.from_step_ms - growth.gpu_saving_ms
    rows = [
        (f"step at DEP{from_size}", 0.0, growth.from_step_ms, "published", None),
        ("GPU", growth.from_step_ms, gpu_end, "derived", "the printed difference"),
        ("not GPU", gpu_end, growth.to_step_ms, "derived", "growth of the step + GPU time saved"),
        (f"step at DEP{to_size}", 0.0, growth.to_step_ms, "published", None),
    ]
    return _account(rows, source)


def account_of_removal(sync: Removal, num_ranks: int, source: str) -> pl.DataFrame:
    """From the step before a shorter synchronisation to the step after it, part by part.

    Returns:
        As :func:`account_of_growth`. The hidden part of the synchronisation moved nothing and has no bar.
    """
    rows = [
        (f"step at DEP{num_ranks}, before", 0.0, sync.step_before_ms, "published", None),
        ("sync, waited for", sync.step_before_ms, sync.step_after_ms, "derived", "step before − step after"),
        (f"step at DEP{num_ranks}, after", 0.0, sync.step_after_ms, "published", None),
    ]
    return _account(rows, source)


def account_of_pair(pair: Pair, source: str) -> pl.DataFrame:
    """A forward pass by itself and the engine's step of the same batch, part by part.

    Args:
        pair: the two times, with or without the host's.
        source: where they come from.

    Returns:
        As :func:`account_of_growth`, origin "measured" or, for the gap and its parts, "derived". Host work that runs
        behind the GPU lies inside the forward pass. A negative gap shortens: the two are not of one batch.
    """
    rows = [("forward pass", 0.0, pair.forward_ms, "measured", None)]
    if pair.not_cpu_ms is None:
        rows.append(("gap", pair.forward_ms, pair.engine_ms, "derived", "engine step − forward pass"))
    else:
        host_end, hidden_ms = pair.engine_ms - pair.not_cpu_ms, pair.hidden_cpu_ms[0]
        parts = [
            ("host, hidden behind the GPU", pair.forward_ms - hidden_ms, pair.forward_ms, "host work − gap"),
            ("host, not hidden", pair.forward_ms, host_end, "the smaller of gap and host work"),
            ("neither", host_end, pair.engine_ms, "gap − host work: other GPU work, or other ranks"),
        ]
        rows += [(part, start, end, "derived", formula) for part, start, end, formula in parts if end > start]
    rows.append(("engine step", 0.0, pair.engine_ms, "measured", None))
    return _account(rows, source)


def _account(rows: list[tuple[str, float, float, str, str | None]], source: str) -> pl.DataFrame:
    names = ("account_part", "from_ms", "to_ms", "origin", "formula")
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in names}, orient="row").with_columns(
        (pl.col("to_ms") - pl.col("from_ms")).alias("change_ms"), pl.lit(source).alias("source")
    )


def published_cap(points: pl.DataFrame) -> int:
    """The published cap on admissions per step."""
    return before_and_after(points, BURSTS, "admissions_per_step")[1]


def source_of(points: pl.DataFrame, pr: int) -> str:
    """The source of a fix's rows."""
    return points.filter(pl.col("pr") == pr)["source"][0]
