"""The step-time function of a server, from single prompts: how long a step takes for so many tokens at such a depth.

A prompt goes to all ranks at once, or to one alone while the others have nothing to do. Where ranks step together, two
that get their prompts a moment apart would compute them in steps of their own. So an opener goes out first, to one
rank, and the prompts while its step lasts: all of them are in the next step, which takes from the opener's answer to
their own. What a request costs outside of the steps is not in it. A prompt that one rank computes alone takes less time
than one on every rank where the ranks share the work of their tokens, as with the experts of a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import DataError, ParameterError
from rackbook.replay.loads import NONE, Load
from rackbook.replay.lockstep import StepCost
from rackbook.replay.queues import NS_PER_S
from rackbook.replay.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

OPENER, PROBE = "opener", "probe"
"""Names of the two requests of a probe, in the column of sessions."""

DELAY_S = 0.02
"""From the opener to the prompts; the opener's step should take longer."""

_OPENER_PART = 4


def probes(lengths: Sequence[int], repeats: int, num_ranks: int, max_num_batched_tokens: int) -> list[Load]:
    """What to send, one load after the other: each length on all ranks and on the first alone, and all of it again.

    Args:
        lengths: of the prompts, in tokens.
        repeats: how often the series is sent.
        num_ranks: data-parallel ranks.
        max_num_batched_tokens: most tokens that a rank computes in a step; an opener has a quarter of them.

    Raises:
        ParameterError: no length, or fewer than one repeat.
    """
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise ParameterError(f"got lengths {list(lengths)}, repeats {repeats}; allowed: lengths ≥ 1, repeats ≥ 1")
    opener = -(-max_num_batched_tokens // _OPENER_PART)
    return [
        _probe(opener, length, num_ranks, num_busy)
        for _ in range(repeats)
        for length in lengths
        for num_busy in (num_ranks, 1)
    ]


def _probe(opener_tokens: int, length: int, num_ranks: int, num_busy: int) -> Load:
    frame = pl.DataFrame(
        {
            "request": [0, 1],
            "session": [OPENER, PROBE],
            "arrival_s": [0.0, DELAY_S],
            "input_tokens": [opener_tokens, length],
            "cached_tokens": [0, 0],
            "output_tokens": [1, 1],
        }
    )
    ranks, sends = np.array([0, *range(num_busy)]), 1 + num_busy
    request = np.array([0] + [1] * num_busy)
    at_ns = np.where(request == 0, 0, round(DELAY_S * NS_PER_S))
    none = np.full(sends, NONE)
    return Load(Trace("probe", "simulated", frame), num_ranks, ranks, request, at_ns, none, np.zeros(sends, np.int64))


def fit(requests: pl.DataFrame, num_ranks: int, max_num_batched_tokens: int) -> StepCost:
    """Fixed cost, cost per token, cost of depth, and what the ranks share of the cost per token.

    Least squares of the relative deviations, on the median time of each length; no cost is negative.

    Args:
        requests: of :func:`probes`, as for :func:`medians`.
        num_ranks: data-parallel ranks.
        max_num_batched_tokens: most tokens that a rank computes in a step.

    Raises:
        DataError: fewer than three lengths, a probe without an answer, or times that no such function describes.
    """
    from scipy import optimize  # costs more to import than most commands take

    times = medians(requests)
    if times["input_tokens"].n_unique() < 3:
        raise DataError(
            f"a step-time function needs probes of at least 3 lengths, got {times['input_tokens'].n_unique()}"
        )
    seconds = times["step_s"].to_numpy()
    if (seconds <= 0).any():
        raise DataError("an opener's answer came no earlier than those of its prompts: the machine is too busy")
    costs, _ = optimize.nnls(_terms(times, num_ranks, max_num_batched_tokens) / seconds[:, None], np.ones_like(seconds))
    fixed, per_token, depth, shared = (float(cost) for cost in costs)
    if not (fixed or per_token):
        raise DataError("the probes' times grow with the depth alone: no step-time function describes them")
    return StepCost(fixed, per_token, depth, shared)


def modelled_s(times: pl.DataFrame, cost: StepCost, num_ranks: int, max_num_batched_tokens: int) -> pl.Series:
    """What a step-time function says of probes.

    Args:
        times: num_busy, input_tokens.
        cost: the function.
        num_ranks: data-parallel ranks.
        max_num_batched_tokens: most tokens that a rank computes in a step.
    """
    costs = (cost.fixed_ms, cost.us_per_token, cost.ps_per_attended_token, cost.shared_us_per_token)
    return pl.Series("modelled_s", _terms(times, num_ranks, max_num_batched_tokens) @ np.array(costs))


def _terms(times: pl.DataFrame, num_ranks: int, max_num_batched_tokens: int) -> np.ndarray:
    """Seconds per unit of each cost of :class:`StepCost`; shape [probes, 4]."""
    length, busy = (times[name].to_numpy().astype(float) for name in ("input_tokens", "num_busy"))
    steps = np.ceil(length / max_num_batched_tokens)
    attended = length * (length + 1) / 2
    return np.stack([steps * 1e-3, length * 1e-6, attended * 1e-12, length * busy / num_ranks * 1e-6], axis=1)


def medians(requests: pl.DataFrame) -> pl.DataFrame:
    """Median time of the probes by length and by the number of ranks that got them.

    Args:
        requests: rank, request, session, sent_s, done_s, input_tokens of the probes; a probe's opener has the number
            before its own.

    Returns:
        num_busy, input_tokens, step_s; ascending.

    Raises:
        DataError: no probe, or one without an answer.
    """
    openers, sent = (requests.filter(pl.col("session") == name) for name in (OPENER, PROBE))
    if sent.is_empty() or requests["done_s"].null_count():
        raise DataError(f"{requests['done_s'].null_count()} of {sent.height} probes have no answer")
    opened = openers.select(pl.col("request") + 1, pl.col("done_s").alias("opened_s"))
    # The first rank's: where ranks step together they all have the same, elsewhere it alone had an opener.
    first = sent.filter(pl.col("rank") == 0).join(opened, on="request", how="left")
    busy = sent.group_by("request").agg(pl.len().cast(pl.Int64).alias("num_busy"))
    begun = pl.max_horizontal("opened_s", "sent_s")
    return (
        first.join(busy, on="request")
        .group_by("num_busy", "input_tokens")
        .agg((pl.col("done_s") - begun).median().alias("step_s"))
        .sort("num_busy", "input_tokens")
    )
