"""Request traces: what they hold, and how they are drawn; :mod:`rackbook.replay.trace_files` reads them.

A trace says which requests come when and how long they are, for one client. How they are dealt to ranks is the business
of :mod:`rackbook.replay.queues` and :mod:`rackbook.replay.loads`; so is whether a request waits for an earlier answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import polars as pl

from rackbook.errors import DataError, ParameterError, one_of

COLUMNS = {
    "request": pl.Int64,
    "session": pl.String,
    "arrival_s": pl.Float64,
    "input_tokens": pl.Int64,
    "cached_tokens": pl.Int64,
    "output_tokens": pl.Int64,
}

LengthLaw = Literal["fixed", "exponential", "lognormal"]
LENGTH_LAWS: tuple[LengthLaw, ...] = get_args(LengthLaw)


@dataclass(frozen=True, eq=False)
class Trace:
    """A list of requests.

    Attributes:
        name: what it is, for titles and messages.
        origin: "measured" for a recorded one, "simulated" for a drawn one.
        requests: one row per request in order of arrival: request (0, 1, …), session (text; null where the source does
            not tell), arrival_s (seconds from the start, ascending), input_tokens (prefix included), cached_tokens (the
            known prefix, less than the input; null where the source does not tell), output_tokens.
    """

    name: str
    origin: Literal["measured", "simulated"]
    requests: pl.DataFrame

    def __post_init__(self) -> None:
        if dict(self.requests.schema) != COLUMNS:
            raise DataError(f"{self.name}: got columns {dict(self.requests.schema)}, expected {COLUMNS}")
        if self.requests.is_empty():
            raise DataError(f"{self.name}: no requests")
        arrival, input_tokens, cached = (pl.col(c) for c in ("arrival_s", "input_tokens", "cached_tokens"))
        rules = {
            "request": (pl.col("request") == pl.int_range(pl.len()), "0, 1, 2, … in order"),
            "arrival_s": ((arrival >= 0) & arrival.is_finite(), "a number ≥ 0 [s]"),
            "input_tokens": (input_tokens >= 1, "a whole number ≥ 1 [tokens]"),
            "cached_tokens": (cached.is_null() | cached.is_between(0, input_tokens - 1), "0 to input − 1, or null"),
            "output_tokens": (pl.col("output_tokens") >= 0, "a whole number ≥ 0 [tokens]"),
        }  # fmt: skip
        for name, (rule, allowed) in rules.items():
            wrong = self.requests.with_row_index("row").filter(~rule.fill_null(value=False))
            if not wrong.is_empty():
                raise DataError(
                    f"{self.name}, request {wrong['row'][0]}, column {name}: got {wrong[name][0]!r}, allowed: {allowed}"
                )
        early = self.requests.with_row_index("row").filter(arrival.diff() < 0)
        if not early.is_empty():
            raise DataError(
                f"{self.name}, request {early['row'][0]}, column arrival_s: earlier than the request before, "
                "allowed: in order of arrival"
            )

    def head(self, num_requests: int) -> Trace:
        """The first requests."""
        return replace(self, requests=self.requests.head(num_requests))

    def scaled(self, *, rate: float = 1.0, length: float = 1.0) -> Trace:
        """The same trace faster or with longer requests.

        Args:
            rate: arrivals per second are multiplied by this.
            length: input, cached and output tokens are multiplied by this and rounded; a prompt keeps at least one
                token, and at least one beyond its prefix.

        Raises:
            ParameterError: a factor that is not positive.
        """
        for name, factor in (("rate", rate), ("length", length)):
            if not 0 < factor < float("inf"):
                raise ParameterError(f"{name}: got {factor!r}, allowed: a number > 0")
        counts = ("input_tokens", "cached_tokens", "output_tokens")
        long = {c: (pl.col(c) * length).round().cast(pl.Int64) for c in counts}
        input_tokens = pl.max_horizontal(long["input_tokens"], 1)
        cached = pl.when(pl.col("cached_tokens").is_not_null()).then(
            pl.min_horizontal(long["cached_tokens"], input_tokens - 1)
        )
        factors = [f"{name} × {factor:g}" for name, factor in (("rate", rate), ("length", length)) if factor != 1]
        return replace(
            self,
            name=", ".join([self.name, *factors]),
            requests=self.requests.with_columns(
                pl.col("arrival_s") / rate,
                input_tokens.alias("input_tokens"),
                cached.alias("cached_tokens"),
                long["output_tokens"],
            ),
        )


@dataclass(frozen=True)
class Sessions:
    """How agent sessions look; all assumed, none of it is published with the replay.

    The defaults are chosen so that the input lengths of the requests have the quantiles of a recorded AgentX run on
    another model, to about a tenth: see :func:`agentic`.

    Attributes:
        mean_turns: requests of a session; their number is geometric.
        shared_prefix_tokens: system prompt and tools, the same in every session, always cached.
        first_median_tokens: median of the first task text.
        added_median_tokens: median of what a user or a tool adds before each further turn.
        input_sigma: standard deviation of the logarithm of both; they are lognormal.
        output_median_tokens: median of an answer, lognormal.
        output_sigma: standard deviation of its logarithm.
        gap_median_s: median of the time from one request of a session to the next, lognormal.
        gap_sigma: standard deviation of its logarithm.
        max_context_tokens: a session ends before its input would exceed this.
    """

    mean_turns: float = 25.0
    shared_prefix_tokens: int = 20_480
    first_median_tokens: float = 4_000.0
    added_median_tokens: float = 750.0
    input_sigma: float = 1.4
    output_median_tokens: float = 360.0
    output_sigma: float = 1.5
    gap_median_s: float = 5.0
    gap_sigma: float = 1.0
    max_context_tokens: int = 1_048_576


def agentic(
    generator: np.random.Generator, num_requests: int, *, requests_per_s: float = 1.0, sessions: Sessions | None = None
) -> Trace:
    """Draw agent traffic: sessions of many turns, each request holding the whole conversation so far.

    Sessions begin as a Poisson stream that has been going on for ten mean session lengths when the trace begins, so
    that young and old sessions are mixed as in the long run. The input of a turn is the shared prefix, the first task
    text and all answers and additions so far; all but what came after the last answer is its known prefix.

    Args:
        generator: source of randomness.
        num_requests: length of the trace.
        requests_per_s: mean rate of all sessions together.
        sessions: how sessions look.

    Returns:
        A trace of exactly ``num_requests`` requests with sessions and known prefixes.

    Raises:
        ParameterError: an argument out of range, or sessions that the context limit hardly ever lets begin.
    """
    law = sessions or Sessions()
    if num_requests < 1 or not requests_per_s > 0 or not law.mean_turns >= 1:
        raise ParameterError(
            f"got num_requests = {num_requests!r}, requests_per_s = {requests_per_s!r}, mean_turns = "
            f"{law.mean_turns!r}; allowed: at least one request, a rate > 0, at least one turn"
        )
    warm_up_s = 10 * law.mean_turns * law.gap_median_s * float(np.exp(law.gap_sigma**2 / 2))
    window_s = 1.5 * num_requests / requests_per_s
    for _ in range(6):
        rows = _session_rows(generator, law, requests_per_s, warm_up_s, window_s)
        if rows.height >= num_requests:
            break
        window_s *= 2
    else:
        raise ParameterError(
            f"max_context_tokens = {law.max_context_tokens:,}: got {rows.height} requests that fit, in a time in which "
            f"{requests_per_s * window_s / 2:,.0f} should have come; allowed: a limit well above a first request"
        )
    chosen = rows.head(num_requests).with_row_index("request").with_columns(pl.col("arrival_s") - rows["arrival_s"][0])
    return Trace("synthetic agent sessions", "simulated", chosen.select(pl.col(c).cast(t) for c, t in COLUMNS.items()))


def _session_rows(
    generator: np.random.Generator, law: Sessions, requests_per_s: float, warm_up_s: float, window_s: float
) -> pl.DataFrame:
    num_sessions = int(generator.poisson(requests_per_s / law.mean_turns * (warm_up_s + window_s)))
    turns = generator.geometric(1 / law.mean_turns, num_sessions)
    total = int(turns.sum())

    def drawn(median: float, sigma: float) -> np.ndarray:
        return median * np.exp(sigma * generator.standard_normal(total))

    session = np.repeat(np.arange(num_sessions), turns)
    first_row = np.repeat(np.cumsum(turns) - turns, turns)
    is_first = np.arange(total) == first_row
    began_s = np.repeat(generator.uniform(-warm_up_s, window_s, num_sessions), turns)
    gap_s = np.where(is_first, 0, drawn(law.gap_median_s, law.gap_sigma))
    median = np.where(is_first, law.first_median_tokens, law.added_median_tokens)
    added = np.maximum(np.rint(median * drawn(1.0, law.input_sigma)), 1).astype(np.int64)
    output = np.maximum(np.rint(drawn(law.output_median_tokens, law.output_sigma)), 1).astype(np.int64)
    arrival_s = began_s + _since(gap_s, first_row) + gap_s
    before = _since(added + output, first_row)
    cached = law.shared_prefix_tokens + before
    frame = pl.DataFrame(
        {
            "session": session,
            "arrival_s": arrival_s,
            "input_tokens": cached + added,
            "cached_tokens": cached,
            "output_tokens": output,
        }
    ).with_columns(pl.col("session").cast(pl.String))
    fits = (pl.col("input_tokens") <= law.max_context_tokens) & pl.col("arrival_s").is_between(0, window_s)
    return frame.filter(fits).sort("arrival_s", maintain_order=True)


def _since(values: np.ndarray, first_row: np.ndarray) -> np.ndarray:
    """Sum of the earlier rows of the same session."""
    before = np.cumsum(values) - values
    return before - before[first_row]


def independent(
    generator: np.random.Generator,
    num_requests: int,
    law: LengthLaw,
    mean_input_tokens: float,
    *,
    sigma: float = 1.0,
    max_context_tokens: int = 1_048_576,
) -> Trace:
    """Draw requests whose lengths are independent, without prefix, all arriving at the start.

    Args:
        generator: source of randomness.
        num_requests: length of the trace.
        law: "fixed", "exponential" or "lognormal".
        mean_input_tokens: mean of the law, before rounding and the cap.
        sigma: standard deviation of the logarithm; only "lognormal" reads it.
        max_context_tokens: longer draws are cut to this.

    Raises:
        ParameterError: an unknown law, or an argument out of range.
    """
    if law not in LENGTH_LAWS:
        raise ParameterError(one_of(law, LENGTH_LAWS, "length law"))
    if num_requests < 1 or not mean_input_tokens >= 1 or not sigma > 0:
        raise ParameterError(
            f"got num_requests = {num_requests!r}, mean_input_tokens = {mean_input_tokens!r}, sigma = {sigma!r}; "
            "allowed: at least one request, a mean ≥ 1, a sigma > 0"
        )
    if law == "fixed":
        lengths = np.full(num_requests, float(mean_input_tokens))
    elif law == "exponential":
        lengths = generator.exponential(mean_input_tokens, num_requests)
    else:
        lengths = mean_input_tokens * np.exp(sigma * generator.standard_normal(num_requests) - sigma**2 / 2)
    tokens = np.clip(np.rint(lengths), 1, max_context_tokens).astype(np.int64)
    frame = pl.DataFrame(
        {
            "request": np.arange(num_requests),
            "session": pl.Series([None] * num_requests, dtype=pl.String),
            "arrival_s": np.zeros(num_requests),
            "input_tokens": tokens,
            "cached_tokens": np.zeros(num_requests, dtype=np.int64),
            "output_tokens": np.ones(num_requests, dtype=np.int64),
        }
    )
    name = f"{law} lengths, mean {mean_input_tokens:,.0f}" + (f", sigma {sigma:g}" if law == "lognormal" else "")
    return Trace(name, "simulated", frame)
