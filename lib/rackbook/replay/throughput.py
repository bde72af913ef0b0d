"""How fast a replay went, from its requests alone: over the whole run, and while all ranks had work.

A request is done at one moment, but its tokens were computed before it. An engine serves prompts nearly in the order in
which they came, so the prompt tokens of a request are spread evenly over the time in which the rank worked for it: from
the answer before it, or from when the first of the requests then unanswered was sent, to its own answer. The stagger of
a lag replay is not imbalance: the common window begins when the last rank has given its first answer, and ends when the
first rank has given its last but one. The first request of a rank has to wait for the end of a step that the others are
in, and its last one waits alone; both happen once in a replay, and no longer run would see more of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import DataError

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Work:
    """Prompt tokens that a rank has computed by a time.

    Attributes:
        time_s: where the rank begins or ends a request, ascending.
        tokens: computed by then; it grows evenly in between.
        answered_s: when it gave its answers, ascending.
    """

    time_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    answered_s: NDArray[np.float64]

    @property
    def begin_s(self) -> float:
        """When the rank got its first request."""
        return float(self.time_s[0])

    @property
    def end_s(self) -> float:
        """When it gave its last answer."""
        return float(self.time_s[-1])

    @property
    def first_answer_s(self) -> float:
        """When it gave its first answer."""
        return float(self.answered_s[0])

    @property
    def last_but_one_s(self) -> float:
        """When it gave the last answer before its very last; the first if there is no other."""
        earlier = self.answered_s[self.answered_s < self.answered_s[-1]]
        return float(earlier[-1] if earlier.size else self.answered_s[0])

    def at(self, time_s: float) -> float:
        """Tokens computed by a time."""
        return float(np.interp(time_s, self.time_s, self.tokens))

    def reached_s(self, tokens: float) -> float:
        """When that many tokens had been computed; where the rank was idle after that, when it began to be."""
        place = int(np.searchsorted(self.tokens, tokens))  # the first to hold as many
        if place in (0, len(self.tokens)):
            return float(self.time_s[0 if place == 0 else -1])
        span = slice(place - 1, place + 1)
        return float(np.interp(tokens, self.tokens[span], self.time_s[span]))

    def busy_s(self, begin_s: float, end_s: float) -> float:
        """Seconds between two times in which it had a request to work on."""
        length = np.diff(np.clip(self.time_s, begin_s, end_s))
        return float(length[np.diff(self.tokens) > 0].sum())

    def answered_within(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """When the first answer not before the begin, and the last not after the end, were given.

        Raises:
            DataError: there are no two answers in that time.
        """
        inside = self.answered_s[(self.answered_s >= begin_s) & (self.answered_s <= end_s)]
        if inside.size < 2 or inside[0] == inside[-1]:
            raise DataError(f"a rank gave fewer than two answers between {begin_s:.2f} and {end_s:.2f} s")
        return float(inside[0]), float(inside[-1])


def work(requests: pl.DataFrame) -> list[Work]:
    """The work of each rank in a replay.

    Args:
        requests: rank, sent_s, done_s, input_tokens; every request answered.

    Raises:
        DataError: a request without an answer, or no request at all.
    """
    missing = requests.filter(requests["done_s"].is_null() | requests["input_tokens"].is_null())
    if requests.is_empty() or not missing.is_empty():
        raise DataError(f"throughput needs answered requests: {missing.height} of {requests.height} have no answer")
    return [_work_of(requests.filter(requests["rank"] == rank)) for rank in requests["rank"].unique().sort().to_list()]


def _work_of(requests: pl.DataFrame) -> Work:
    by_end = requests.sort("done_s", "sent_s")
    sent, done, tokens = (by_end[name].to_numpy() for name in ("sent_s", "done_s", "input_tokens"))
    oldest = np.minimum.accumulate(sent[::-1])[::-1]  # of the requests that are not answered before this one is
    times, sums, total = [float(oldest[0])], [0.0], 0.0
    for begin, end, amount in zip(oldest.tolist(), done.tolist(), tokens.tolist(), strict=True):
        if begin > times[-1]:
            times.append(begin)
            sums.append(total)
        total += amount
        if end > times[-1]:
            times.append(end)
            sums.append(total)
        else:
            sums[-1] = total
    return Work(np.array(times), np.array(sums), done)


@dataclass(frozen=True)
class Throughput:
    """How fast a replay went.

    Attributes:
        from_s: beginning of the common window.
        to_s: its end.
        window_tok_per_s: prompt tokens per second of all ranks in the window.
        whole_tok_per_s: the same from the first request to the last answer.
        run_s: length of the whole replay.
        busy_percent: share of the window in which a rank has a request to work on; mean of the ranks.
    """

    from_s: float
    to_s: float
    window_tok_per_s: float
    whole_tok_per_s: float
    run_s: float
    busy_percent: float


def window(ranks: list[Work]) -> tuple[float, float]:
    """The time in which all ranks work on their requests.

    Raises:
        DataError: there is none.
    """
    begin, end = max(w.first_answer_s for w in ranks), min(w.last_but_one_s for w in ranks)
    if end <= begin:
        raise DataError(
            f"no common window: the last rank gives its first answer after {begin:.2f} s, the first its last but one "
            f"after {end:.2f} s; shorten the lag or give the ranks more requests"
        )
    return begin, end


def measured(requests: pl.DataFrame) -> Throughput:
    """The throughput of a replay; see :func:`work`.

    Raises:
        DataError: requests without an answer, or no common window.
    """
    ranks = work(requests)
    begin, end = window(ranks)
    in_window = sum(w.at(end) - w.at(begin) for w in ranks)
    first, last = min(w.begin_s for w in ranks), max(w.end_s for w in ranks)
    total = float(requests["input_tokens"].sum())
    busy = sum(w.busy_s(begin, end) for w in ranks) / (len(ranks) * (end - begin))
    return Throughput(
        begin, end, in_window / (end - begin), total / (last - first), last - first, min(100 * busy, 100.0)
    )


def same_work_loss(mirror: pl.DataFrame, lag: pl.DataFrame) -> float:
    """1 − lag ÷ mirror for the stretch of work that the ranks do in the lag replay's common window.

    In the window of a lag replay the first rank is past its first requests and the last has not come to its last. Where
    requests differ, that is other work than the mirror replay's whole. So each rank's time for its stretch, from its
    first answer in the window to its last, is compared with its time for as many tokens in the mirror replay: the loss
    is 1 − mirrored time ÷ lagged time, both summed over the ranks. A stretch ends at answers, not at the window's
    edges, since a rank may be idle there, and idle time cannot be found again by the work done.

    Args:
        mirror: requests of the mirror replay.
        lag: requests of the lag replay of the same trace.

    Raises:
        DataError: requests without an answer, no common window, a rank with fewer than two answers in it, or other
            ranks or tokens.
    """
    mirrored, lagged = work(mirror), work(lag)
    if [w.tokens[-1] for w in mirrored] != [w.tokens[-1] for w in lagged]:
        raise DataError("the two replays are not of the same requests on the same ranks")
    begin, end = window(lagged)
    took_mirrored = took_lagged = 0.0
    for alone, together in zip(mirrored, lagged, strict=True):
        first, last = together.answered_within(begin, end)
        took_mirrored += alone.reached_s(together.at(last)) - alone.reached_s(together.at(first))
        took_lagged += last - first
    return 1 - took_mirrored / took_lagged
