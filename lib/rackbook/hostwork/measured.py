"""A recorded run of host-side measurements, as tables with what follows from them: laws of growth, costs per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.errors import DataError
from rackbook.models.growth_fit import LEAST_POINTS, Growth, compare_growth
from rackbook.tables import column

if TYPE_CHECKING:
    from rackbook.runs import Run

OWN_CORE, SHARED_CORE = "a core per rank", "more ranks than cores"

GROWING = ("sync_p50_ms", "segments_per_rank", "cpu_us_per_rank")
"""What is fitted against the ranks: the time, and what needs no core per rank to be counted."""

BEFORE_COPY = ("list → int32", "new", "cold")
AFTER_COPY = ("int32 → int32", "reused", "cold")
"""The copies that stand for an admission before and after the fixes, when a simulation takes its cost from a run."""

COSTS_OF_COPIES = {"measured list": BEFORE_COPY, "measured int32": AFTER_COPY}

_COPY = ("copy", "allocation", "cache_state")


def all_reduces(run: Run) -> pl.DataFrame:
    """The all-reduces of a run, with the regime in which each was measured."""
    regime = pl.when(pl.col("oversubscribed")).then(pl.lit(SHARED_CORE)).otherwise(pl.lit(OWN_CORE))
    points = run.points("all_reduces").with_columns(regime.alias("regime"))
    if "segments_per_rank" not in points.columns:  # runs of before they were counted
        points = points.with_columns(pl.lit(None, pl.Float64).alias("segments_per_rank"))
    return points


def growth_fits(points: pl.DataFrame) -> pl.DataFrame:
    """Both laws of growth on every all-reduce, quantity and regime; powers of two only, since folding costs more hops.

    Args:
        points: of :func:`all_reduces`.

    Returns:
        all_reduce, regime, quantity, unit, growth_law, num_points, fit_constant, fit_slope, fit_error_percent,
        evidence_ratio, better_law (the law that the points name, "neither" or "cannot tell", see
        :class:`rackbook.models.growth_fit.Growth`), origin "modelled", source, missing_reason. Where there are too few
        numbers of ranks there is one row without a law that says so. A regime is never mixed with the other.
    """
    rows = []
    for (name, regime), group in points.group_by("all_reduce", "regime", maintain_order=True):
        for quantity in GROWING:
            if not group[quantity].count():  # not counted in this run
                continue
            described = column(quantity)
            head = {
                "all_reduce": name,
                "regime": regime,
                "quantity": described.label,
                "unit": described.unit,
                "num_points": powers_of_two(group).height,
                "source": group["source"][0],
                "origin": "modelled",
            }
            found = growth(group, quantity)
            if found is None:
                why = f"a fit needs {LEAST_POINTS} numbers of ranks that are powers of two"
                rows.append(head | {"missing_reason": why})
                continue
            rows += [
                head
                | {
                    "growth_law": law,
                    "fit_constant": fit.constant,
                    "fit_slope": fit.slope,
                    "fit_error_percent": fit.error_percent,
                    "evidence_ratio": found.evidence_ratio,
                    "better_law": found.verdict,
                }
                for law, fit in found.fits.items()
            ]
    names = (
        "all_reduce", "regime", "quantity", "unit", "growth_law", "num_points", "fit_constant", "fit_slope",
        "fit_error_percent", "evidence_ratio", "better_law", "origin", "source", "missing_reason",
    )  # fmt: skip
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in names})


def named_laws(run: Run, fits: pl.DataFrame) -> pl.DataFrame:
    """What the fits come to, shortly.

    One row per all-reduce, regime and quantity; one for an all-reduce and regime of which nothing can be fitted; one
    for an all-reduce that was not measured.

    Args:
        run: the run.
        fits: of :func:`growth_fits`.

    Returns:
        all_reduce, regime, quantity, unit, num_points, better_law, evidence_ratio, and of the law that is off less
        fit_constant, fit_slope and fit_error_percent; origin, source, missing_reason.
    """
    key = ["all_reduce", "regime", "quantity"]
    best = fits.sort("fit_error_percent", nulls_last=True, maintain_order=True).unique(key, keep="first")
    order = fits.select(key).unique(maintain_order=True)
    found = order.join(best, on=key, how="left", maintain_order="left").select(
        *key, "unit", "num_points", "better_law", "evidence_ratio", "fit_constant", "fit_slope", "fit_error_percent",
        "origin", "source", "missing_reason",
    )  # fmt: skip
    without = found.filter(pl.col("better_law").is_null()).unique(["all_reduce", "regime"], maintain_order=True)
    without = without.with_columns(pl.lit(None, pl.String).alias("quantity"), pl.lit(None, pl.String).alias("unit"))
    absent = pl.DataFrame(
        [
            {"all_reduce": name, "missing_reason": why, "origin": "measured", "source": run.id}
            for name, why in run.provenance.get("absent", {}).items()
        ],
        schema=dict.fromkeys(("all_reduce", "missing_reason", "origin", "source"), pl.String),
    )
    return pl.concat([found.drop_nulls("better_law"), without, absent], how="diagonal")


def facts(run: Run) -> pl.DataFrame:
    """What a run was measured on, and what speaks against it.

    Returns:
        quantity, fact (text), origin "measured", source.
    """
    machine = run.provenance.get("machine", {})
    versions = {name: version for name, version in (machine.get("packages") or {}).items() if version}
    versions |= {name: version for name, version in run.provenance.get("ranks", {}).items() if version}
    rows = {
        "processor": machine.get("cpu"),
        "usable cores": machine.get("usable_cores"),
        "memory (GiB)": machine.get("memory_gib"),
        "system": f"{machine.get('system')}, kernel {machine.get('kernel')}, Python {machine.get('python')}",
        "packages": ", ".join(f"{name} {versions[name]}" for name in ("numpy", "torch", "vllm") if name in versions),
        "load average at the start": machine.get("load_1min"),
        "started (UTC)": run.provenance["started_utc"],
        "lasted (s)": run.provenance.get("duration_s"),
        "doubts": "; ".join(run.flags) or "none",
    }
    shown = [(what, "not recorded" if fact is None else str(fact)) for what, fact in rows.items()]
    return pl.DataFrame(shown, schema={"quantity": pl.String, "fact": pl.String}, orient="row").with_columns(
        pl.lit("measured").alias("origin"), pl.lit(run.id).alias("source")
    )


def growth(points: pl.DataFrame, quantity: str) -> Growth | None:
    """Both laws on one all-reduce in one regime; None with too few numbers of ranks, or where a value is 0 or missing.

    Args:
        points: rows of one all-reduce and regime.
        quantity: one of :data:`GROWING`.
    """
    used = powers_of_two(points).drop_nulls(quantity)
    used = used.group_by("num_ranks").agg(pl.col(quantity).median()).sort("num_ranks")
    if used.height < LEAST_POINTS or (used[quantity] <= 0).any():
        return None
    return compare_growth(used["num_ranks"].to_list(), used[quantity].to_list())


def fitted_growth(points: pl.DataFrame, quantity: str) -> pl.DataFrame:
    """The named law of every all-reduce at the powers of two that were measured, to be drawn beside the points.

    Returns:
        all_reduce, regime, growth_law, num_ranks, the quantity, origin "modelled", source, formula.
    """
    rows = []
    for (name, regime), group in points.group_by("all_reduce", "regime", maintain_order=True):
        found = growth(group, quantity)
        if found is None or found.better is None:
            continue
        fit = found.fits[found.better]
        unit = f" {unit}" if (unit := column(quantity).unit) else ""
        for ranks in sorted(powers_of_two(group)["num_ranks"].unique().to_list()):
            rows.append(
                {
                    "all_reduce": name,
                    "regime": regime,
                    "growth_law": fit.law,
                    "num_ranks": ranks,
                    quantity: fit.at(ranks),
                    "origin": "modelled",
                    "source": group["source"][0],
                    "formula": f"α = {round(fit.constant, 9) + 0.0:.3g}{unit}, β = {fit.slope:.3g}{unit}",
                }
            )
    names = ("all_reduce", "regime", "growth_law", "num_ranks", quantity, "origin", "source", "formula")
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in names})


def copies(run: Run) -> pl.DataFrame:
    """The copies of a prompt, each method with a name of its own."""
    return run.points("copies").with_columns(_copy_method().alias("copy_method"))


def copy_costs(points: pl.DataFrame) -> pl.DataFrame:
    """What a copy costs per token: a least-squares line over the prompt lengths, per method and cache state.

    Args:
        points: of :func:`copies`.

    Returns:
        copy, allocation, cache_state, ns_per_token with its 95 % interval ns_per_token_low and ns_per_token_high,
        fixed_us (the line at no token), num_points, origin "modelled", source, formula. The line is ruled by the long
        prompts; short ones fit caches and cost less per token.
    """
    from rackbook.models.line import fit_line  # scipy takes its time to import

    rows = []
    for key, group in points.group_by(*_COPY, maintain_order=True):
        if group["prompt_tokens"].n_unique() < 3:
            raise DataError(f"copies, {', '.join(map(str, key))}: a cost per token needs three prompt lengths or more")
        line = fit_line(group["prompt_tokens"].to_list(), group["copy_p50_ms"].to_list())
        low, high = line.slope_interval()
        rows.append(
            {
                **dict(zip(_COPY, key, strict=True)),
                "ns_per_token": line.slope * 1e6,
                "ns_per_token_low": low * 1e6,
                "ns_per_token_high": high * 1e6,
                "fixed_us": line.intercept * 1e3,
                "num_points": group.height,
                "origin": "modelled",
                "source": group["source"][0],
                "formula": "least squares of CPU time over prompt length",
            }
        )
    return pl.DataFrame(rows)


def cost_of(costs: pl.DataFrame, copy: tuple[str, str, str]) -> float:
    """CPU time per token in ns of one copy, given as (copy, allocation, cache state).

    Raises:
        DataError: the run did not measure it.
    """
    found = costs.filter(pl.col(name) == value for name, value in zip(_COPY, copy, strict=True))
    if found.height != 1:
        raise DataError(f"the run has {found.height} costs for the copy {', '.join(copy)}, expected one")
    return found["ns_per_token"][0]


def _copy_method() -> pl.Expr:
    return pl.format("{}, {} memory", pl.col("copy"), pl.col("allocation"))


def powers_of_two(points: pl.DataFrame) -> pl.DataFrame:
    """The rows whose number of ranks is a power of two."""
    return points.filter(pl.col("num_ranks").is_in([1 << power for power in range(1, 31)]))
