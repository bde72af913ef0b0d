"""The iterations that the ranks of an engine log, put side by side: do they step together, and with equal work?

Each rank numbers its iterations itself and does not log all of them, so equal numbers are not always the same step. The
numbers of two ranks differ by a constant while both run; it is the one at which most of their times agree.
"""

from __future__ import annotations

import polars as pl

SAME = 0.05
"""Two ranks took the same time if they differ by no more than this part of the longer one."""

_SHIFTS = range(-16, 17)
_JOINT = {
    "iteration": pl.Int64, "longest_ms": pl.Float64, "shortest_ms": pl.Float64, "same_tokens": pl.Boolean,
}  # fmt: skip


def joint(steps: pl.DataFrame, num_ranks: int) -> pl.DataFrame:
    """The iterations of one replay that every rank logged.

    Args:
        steps: rank, iteration, num_prefill_tokens, step_ms of one replay.
        num_ranks: of the engine.

    Returns:
        iteration (as the first rank counts), longest_ms and shortest_ms over the ranks, same_tokens (all ranks computed
        as many prompt tokens).
    """
    own = [_of(steps, rank) for rank in range(num_ranks)]
    if any(frame.is_empty() for frame in own):
        return pl.DataFrame(schema=_JOINT)
    joined = own[0].rename({"ms": "ms_0", "tokens": "tokens_0"})
    for rank, other in enumerate(own[1:], start=1):
        shifted = _shifted(other, _shift(own[0], other))
        joined = joined.join(shifted.rename({"ms": f"ms_{rank}", "tokens": f"tokens_{rank}"}), on="iteration")
    times, tokens = ([f"{name}_{rank}" for rank in range(num_ranks)] for name in ("ms", "tokens"))
    equal = pl.all_horizontal(pl.col(name) == pl.col("tokens_0") for name in tokens)
    return joined.sort("iteration").select(
        "iteration",
        pl.max_horizontal(times).alias("longest_ms"),
        pl.min_horizontal(times).alias("shortest_ms"),
        equal.alias("same_tokens"),
    )


def _of(steps: pl.DataFrame, rank: int) -> pl.DataFrame:
    mine = steps.filter(pl.col("rank") == rank).unique("iteration", keep="last", maintain_order=True)
    return mine.select("iteration", pl.col("step_ms").alias("ms"), pl.col("num_prefill_tokens").alias("tokens"))


def _shifted(frame: pl.DataFrame, by: int) -> pl.DataFrame:
    return frame.with_columns(pl.col("iteration") + by)


def _shift(first: pl.DataFrame, other: pl.DataFrame) -> int:
    """What to add to the other's numbers; the smallest shift among equally good ones."""
    times = dict(first.select("iteration", "ms").iter_rows())
    others = other.select("iteration", "ms").rows()

    def agreeing(shift: int) -> int:
        pairs = ((ms, times[number + shift]) for number, ms in others if number + shift in times)
        return sum(min(pair) >= (1 - SAME) * max(pair) for pair in pairs)

    return max(sorted(_SHIFTS, key=abs), key=agreeing)
