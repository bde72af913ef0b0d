"""The step-time function of a server, from single prompts: how long a rank takes for so many tokens at such a depth.

Every rank gets the same prompt at the same time and nothing else, so no rank waits for another. The next prompt goes
out when the last answer came. The time to the answer is that of the prompt's steps, with all that a request costs
besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import DataError, ParameterError
from rackbook.replay.lockstep import StepCost
from rackbook.replay.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence


def probe_trace(lengths: Sequence[int], repeats: int) -> Trace:
    """One user's prompts, from short to long and again.

    Args:
        lengths: of the prompts, in tokens.
        repeats: how often the series is sent.

    Raises:
        ParameterError: no length, or fewer than one repeat.
    """
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise ParameterError(f"got lengths {list(lengths)}, repeats {repeats}; allowed: lengths ≥ 1, repeats ≥ 1")
    tokens = list(lengths) * repeats
    frame = pl.DataFrame(
        {
            "request": range(len(tokens)),
            "session": ["probe"] * len(tokens),
            "arrival_s": [0.0] * len(tokens),
            "input_tokens": tokens,
            "cached_tokens": [0] * len(tokens),
            "output_tokens": [1] * len(tokens),
        }
    )
    return Trace("probe prompts", "simulated", frame)


def fit(requests: pl.DataFrame, max_num_batched_tokens: int) -> StepCost:
    """Fixed cost, cost per token and cost of depth that describe the probes best.

    Least squares of the relative deviations, on the median time of each prompt length; no cost is negative.

    Args:
        requests: sent_s, done_s, input_tokens of answered probes.
        max_num_batched_tokens: most tokens that a rank computes in a step.

    Raises:
        DataError: fewer than three lengths, or a probe without an answer.
    """
    from scipy import optimize  # costs more to import than most commands take

    times = medians(requests)
    if times.height < 3:
        raise DataError(f"a step-time function needs probes of at least 3 lengths, got {times.height}")
    length, seconds = times["input_tokens"].to_numpy().astype(float), times["answer_s"].to_numpy()
    terms = np.stack(
        [np.ceil(length / max_num_batched_tokens) * 1e-3, length * 1e-6, length * (length + 1) / 2 * 1e-12], axis=1
    )
    costs, _ = optimize.nnls(terms / seconds[:, None], np.ones_like(seconds))
    return StepCost(*(float(cost) for cost in costs))


def medians(requests: pl.DataFrame) -> pl.DataFrame:
    """Median time of the probes by length.

    Returns:
        input_tokens, answer_s; ascending.

    Raises:
        DataError: a probe without an answer.
    """
    if requests.is_empty() or requests["done_s"].null_count():
        raise DataError(f"{requests['done_s'].null_count()} of {requests.height} probes have no answer")
    return (
        requests.group_by("input_tokens", maintain_order=True)
        .agg((pl.col("done_s") - pl.col("sent_s")).median().alias("answer_s"))
        .sort("input_tokens")
    )
