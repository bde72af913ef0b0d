"""What is printed about balancedness, beside uniform routing, and which part of the gap between them is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook import catalog
from rackbook.errors import DataError
from rackbook.experts.balancedness import recovered_fraction, recovered_range
from rackbook.experts.uniform import Batch

if TYPE_CHECKING:
    from rackbook.experts.uniform import Part

MODEL = "deepseek-v4.1-flash"
HALF_UNIT = 0.005
"""Half a unit of the last digit in which the source prints a balancedness."""

WITHOUT, WITH = "as routed, without EPLB", "as routed, with EPLB"
UNIFORM_PRINTED, UNIFORM_DRAWN = "uniform routing, printed", "uniform routing, drawn here"
PRINTED, DRAWN = "print", "draws made here"


def published_readings(points: pl.DataFrame) -> list[Batch]:
    """The published uniform baselines as batches, in every reading of what the source does not print.

    Printed are ranks, requests per rank and top-k. Not printed are the tokens per request: read here as one token and
    the drafts of a step for the target, and the drafts for the draft. The draft's experts are those of the model's
    recipe; the other readings give it as many as the target has.

    Args:
        points: table ``expert_balance``.

    Returns:
        The target, the draft, and three more readings of the draft: the target's experts with the same tokens, with one
        more, and with one token.
    """
    model = catalog.model(MODEL)
    drafted, many, few = model.draft.block_tokens.known, model.experts.num_routed.known, model.draft.num_routed.known
    target, draft = (uniform_row(points, part) for part in ("target", "draft"))
    sizes = {row["part"]: (row["ep_size"], row["requests_per_rank"]) for row in (target, draft)}
    return [
        Batch("target", *sizes["target"], 1 + drafted, many, target["top_k"]),
        Batch("draft", *sizes["draft"], drafted, few, draft["top_k"]),
        *(
            Batch("draft", *sizes["draft"], tokens, many, draft["top_k"])
            for tokens in dict.fromkeys((drafted, drafted + 1, 1))
        ),
    ]


def balance_states(points: pl.DataFrame, at_published: pl.DataFrame) -> pl.DataFrame:
    """The four balancedness figures of each part side by side.

    The mean over draws of max ÷ mean is at least the inverse of the mean of mean ÷ max (Jensen's inequality), so
    busiest_to_mean, that inverse, bounds the busiest rank's average excess from below.

    Args:
        points: table ``expert_balance``.
        at_published: table ``uniform_balance`` of :func:`published_readings`.

    Returns:
        part, balance_of, balancedness_per_layer_step, busiest_to_mean, origin, source; by part.
    """
    rows = []
    for part in ("target", "draft"):
        drawn = _first(at_published, part, "simulated")
        for balance_of, row in (
            (WITHOUT, published_row(points, part, "observed", "static")),
            (WITH, published_row(points, part, "observed", "eplb")),
            (UNIFORM_PRINTED, uniform_row(points, part)),
            (UNIFORM_DRAWN, drawn),
        ):
            value = row["balancedness_per_layer_step"]
            rows.append(
                {
                    "part": part,
                    "balance_of": balance_of,
                    "balancedness_per_layer_step": value,
                    "busiest_to_mean": 1 / value,
                    "origin": row["origin"],
                    "source": row["source"],
                }
            )
    return pl.DataFrame(rows)


def recovered(states: pl.DataFrame, at_published: pl.DataFrame) -> pl.DataFrame:
    """Part of the gap to uniform routing that EPLB closes, with the range that the printed digits allow.

    A printed figure stands for everything that rounds to it; a figure that was drawn stands for its interval.

    Args:
        states: as :func:`balance_states` returns it.
        at_published: table ``uniform_balance`` of :func:`published_readings`.

    Returns:
        part, uniform_from, before, after, uniform_balancedness, recovered_percent, recovered_low_percent,
        recovered_high_percent, formula, origin ("derived" from printed figures alone, "simulated" where uniform routing
        was drawn), source.
    """
    rows = []
    for part in ("target", "draft"):
        value = dict(
            states.filter(pl.col("part") == part).select("balance_of", "balancedness_per_layer_step").iter_rows()
        )
        drawn = _first(at_published, part, "simulated")
        before, after = value[WITHOUT], value[WITH]
        for uniform_from, uniform, bounds, origin, source in (
            (PRINTED, value[UNIFORM_PRINTED], _rounds_to(value[UNIFORM_PRINTED]), "derived", "S1"),
            (
                DRAWN,
                value[UNIFORM_DRAWN],
                (drawn["balancedness_low"], drawn["balancedness_high"]),
                "simulated",
                f"S1, {drawn['source']}",
            ),
        ):
            low, high = recovered_range(_rounds_to(before), _rounds_to(after), bounds)
            rows.append(
                {
                    "part": part,
                    "uniform_from": uniform_from,
                    "before": before,
                    "after": after,
                    "uniform_balancedness": uniform,
                    "recovered_percent": 100 * recovered_fraction(before, after, uniform),
                    "recovered_low_percent": 100 * low,
                    "recovered_high_percent": 100 * high,
                    "formula": f"({after:g} − {before:g}) ÷ ({uniform:.4g} − {before:g})",
                    "origin": origin,
                    "source": source,
                }
            )
    return pl.DataFrame(rows)


def printed_baselines(states: pl.DataFrame) -> pl.DataFrame:
    """The printed balancedness of uniform routing, with all that rounds to it.

    Args:
        states: as :func:`balance_states` returns it.

    Returns:
        part, balancedness_per_layer_step, balancedness_low, balancedness_high, origin, source.
    """
    value = pl.col("balancedness_per_layer_step")
    return states.filter(pl.col("balance_of") == UNIFORM_PRINTED).select(
        "part",
        value,
        (value - HALF_UNIT).alias("balancedness_low"),
        (value + HALF_UNIT).alias("balancedness_high"),
        "origin",
        "source",
    )


def _rounds_to(printed: float) -> tuple[float, float]:
    return printed - HALF_UNIT, printed + HALF_UNIT


def published_row(points: pl.DataFrame, part: Part, routing: str, placement: str) -> dict[str, object]:
    """One row of table ``expert_balance``.

    Raises:
        DataError: no such row, or several.
    """
    rows = points.filter(
        (pl.col("part") == part) & (pl.col("routing") == routing) & (pl.col("placement") == placement)
    ).to_dicts()
    if len(rows) != 1:
        raise DataError(
            f"expert_balance: got {len(rows)} rows of part {part}, routing {routing}, placement {placement}; expected 1"
        )
    return rows[0]


def uniform_row(points: pl.DataFrame, part: Part) -> dict[str, object]:
    """The row of uniform routing, which alone has the setting printed beside it."""
    return published_row(points, part, "uniform", "static")


def _first(at_published: pl.DataFrame, part: str, origin: str) -> dict[str, object]:
    return at_published.filter((pl.col("part") == part) & (pl.col("origin") == origin)).row(0, named=True)
