"""Data-parallel ranks in lockstep: every step lasts as long as its slowest rank.

Semantics, exactly:

- Only prefill is simulated. Every rank serves its queue first in, first out.
- A request is visible to the step that starts at or after its arrival, and to no earlier one.
- In a step a rank computes up to ``max_num_batched_tokens`` visible tokens from the head of its queue. A prompt that
  does not fit is cut, and the rest is first in the next step; a step may hold the end of one prompt, whole prompts
  and the beginning of another.
- A token at position p of its prompt, cached prefix included, attends to p + 1 tokens. A rank's step takes
  ``fixed + per token · tokens + per attended token · attended tokens`` (:class:`StepCost`). A rank without a visible
  token runs a dummy step, which takes ``fixed``.
- The step of all ranks takes as long as the slowest rank's. The next step starts when it ends. While no rank has a
  visible token there are no steps, and time jumps to the next arrival.
- Time is whole nanoseconds: a step's duration is rounded to one, sums are exact, and the same input gives the same
  output on every machine. Nothing is random.

Not modelled: decode, limits on KV memory or running requests, evictions, and prefix hits that depend on the rank: a
request's cached prefix is a property of the request.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from rackbook.errors import ParameterError, one_of
from rackbook.replay.queues import Queue, deal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

Policy = Literal["round-robin", "least-requests", "least-tokens"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

_NEVER = 1 << 62
_WORTHWHILE = 64
"""Rank-steps from which on computing a stretch of steps with arrays is faster than one step after the other."""


@dataclass(frozen=True)
class StepCost:
    """How long a rank's step takes.

    Attributes:
        fixed_ms: of every step, also a dummy step.
        us_per_token: per token that the step computes.
        ps_per_attended_token: per pair of a computed token and a context token that it attends to.
    """

    fixed_ms: float
    us_per_token: float
    ps_per_attended_token: float

    def __post_init__(self) -> None:
        for name in ("fixed_ms", "us_per_token", "ps_per_attended_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ParameterError(f"{name}: got {value!r}, allowed: a number ≥ 0")
        if not (self.fixed_ms or self.us_per_token):
            raise ParameterError("fixed_ms and us_per_token are both 0: a step must take time")

    @property
    def coefficients_ns(self) -> tuple[float, float, float]:
        """The three costs in nanoseconds: fixed, per token, per attended token."""
        return self.fixed_ms * 1e6, self.us_per_token * 1e3, self.ps_per_attended_token * 1e-3

    def ns(self, tokens: ArrayLike, attended_tokens: ArrayLike) -> NDArray[np.float64]:
        """Duration of a rank's step in nanoseconds, not rounded."""
        fixed, per_token, per_attended = self.coefficients_ns
        return fixed + np.asarray(tokens) * per_token + np.asarray(attended_tokens) * per_attended

    def alone_s(self, requests: Queue, max_num_batched_tokens: int) -> float:
        """Seconds that one rank would need for a queue that never runs dry."""
        tokens = int(requests.new_tokens.sum())
        fixed, per_token, per_attended = self.coefficients_ns
        steps = -(-tokens // max_num_batched_tokens)
        attended = int(requests.attended_tokens.sum())
        return (steps * fixed + tokens * per_token + attended * per_attended) * 1e-9


@dataclass(frozen=True, eq=False)
class Run:
    """What the ranks did.

    Attributes:
        queues: one per rank.
        cost: of a rank's step.
        start_ns: start of each step; shape [steps].
        step_ns: duration of each step, the same on all ranks; shape [steps].
        tokens: tokens that each rank computes in each step, 0 in a dummy step; shape [steps, ranks].
        attended_tokens: context tokens that they attend to, summed; shape [steps, ranks].
    """

    queues: tuple[Queue, ...]
    cost: StepCost
    start_ns: NDArray[np.int64]
    step_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]
    attended_tokens: NDArray[np.int64]

    @property
    def own_ns(self) -> NDArray[np.int64]:
        """How long each rank's step would take without the others; shape [steps, ranks]."""
        return np.rint(self.cost.ns(self.tokens, self.attended_tokens)).astype(np.int64)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """End of each step; shape [steps]."""
        return self.start_ns + self.step_ns

    def wait_for_prompt_ns(self, rank: int) -> NDArray[np.int64]:
        """From each request's arrival to the end of the step that computes its last token; shape [requests]."""
        requests = self.queues[rank]
        step = np.searchsorted(np.cumsum(self.tokens[:, rank]), np.cumsum(requests.new_tokens))
        return self.end_ns[step] - requests.arrival_ns


def replay(queues: Sequence[Queue], cost: StepCost, max_num_batched_tokens: int) -> Run:
    """Run the queues until they are empty.

    Steps follow each other one by one only where an arrival may change the next one. A rank whose visible tokens fill
    its next steps computes the same chunks whatever arrives meanwhile, so such stretches are computed with arrays, and
    the result is the same to the nanosecond. Ranks that are given the very same queue object, as in a mirror replay,
    do the same in every step and are computed once.

    Args:
        queues: one per rank.
        cost: of a rank's step.
        max_num_batched_tokens: most tokens that a rank computes in a step.

    Raises:
        ParameterError: no rank, or a cap below 1.
    """
    budget = _checked(len(queues), max_num_batched_tokens)
    different = list({id(q): q for q in queues}.values())
    line = _TokenLine(different)
    ranks = line.ranks()
    steps = _Steps(len(ranks))
    coefficients = cost.coefficients_ns
    now, one_by_one, look_ahead = 0, 0, _WORTHWHILE
    while True:
        if one_by_one == 0:
            stretch = line.stretch(ranks, now, budget, cost, look_ahead)
            if stretch is not None:
                starts, durations, positions = stretch
                now = steps.extend(starts, durations, positions)
                line.move(ranks, positions[:, -1])
                # Where arrivals keep cutting it short, look less far ahead, and step singly for a while.
                short = len(starts) * len(ranks) < _WORTHWHILE
                one_by_one, look_ahead = 4 * _WORTHWHILE if short else 0, max(_WORTHWHILE, 4 * len(starts))
                continue
            one_by_one = _WORTHWHILE
        one_by_one -= 1
        duration = _step(ranks, now, budget, coefficients, steps.positions)
        if duration >= 0:
            now = steps.append(now, duration)
        else:
            now = min(rank.due for rank in ranks)
            if now == _NEVER:
                break
    start, step, positions = steps.arrays()
    tokens, attended = line.computed(positions)
    place = {id(q): number for number, q in enumerate(different)}
    places = [place[id(q)] for q in queues]
    return Run(tuple(queues), cost, start, step, tokens[places].T, attended[places].T)


def route(
    requests: Queue, num_ranks: int, policy: Policy, cost: StepCost, max_num_batched_tokens: int
) -> tuple[Run, NDArray[np.int64]]:
    """Run one stream of requests, each sent to a rank on arrival.

    "round-robin" deals in turn; "least-requests" picks the rank with the fewest requests sent and not finished,
    "least-tokens" the one with the fewest tokens sent and not computed; ties go to the lowest rank. The router counts
    what it sends at once, and learns what a step finished when the next step has started: an arrival during a step, or
    at its very end, is routed without that step's results.

    Args:
        requests: the stream, in order of arrival.
        num_ranks: data-parallel ranks.
        policy: how the rank is chosen.
        cost: of a rank's step.
        max_num_batched_tokens: most tokens that a rank computes in a step.

    Returns:
        The run, and the rank of each request; shape [requests].

    Raises:
        ParameterError: an unknown policy, no rank, or a cap below 1.
    """
    budget = _checked(num_ranks, max_num_batched_tokens)
    if policy not in POLICIES:
        raise ParameterError(one_of(policy, POLICIES, "policy"))
    if policy == "round-robin":
        chosen = np.arange(len(requests)) % num_ranks
        return replay(deal(requests, chosen, num_ranks), cost, budget), chosen
    ranks = [_Rank([], [0], [0], [], 0) for _ in range(num_ranks)]
    arrival, cached, new = (a.tolist() for a in (requests.arrival_ns, requests.cached_tokens, requests.new_tokens))
    attended = requests.attended_tokens.tolist()
    coefficients = cost.coefficients_ns
    outstanding: Callable[[_Rank], int] = _Rank.requests_left if policy == "least-requests" else _Rank.tokens_left
    load = [0] * num_ranks
    steps = _Steps(num_ranks)
    choices: list[int] = []
    now, sent = 0, 0
    while True:
        while sent < len(arrival) and arrival[sent] <= now:
            number = load.index(min(load))
            load[number] += 1 if policy == "least-requests" else new[sent]
            ranks[number].send(cached[sent], new[sent], attended[sent])
            choices.append(number)
            sent += 1
        load = [outstanding(rank) for rank in ranks]
        duration = _step(ranks, now, budget, coefficients, steps.positions)
        if duration >= 0:
            now = steps.append(now, duration)
        elif sent < len(arrival):
            now = arrival[sent]
        else:
            break
    start, step, positions = steps.arrays()
    chosen = np.array(choices, dtype=np.int64)
    queues = deal(requests, chosen, num_ranks)
    line = _TokenLine(queues)
    tokens, attended = line.computed(positions + line.start[:, None])
    return Run(queues, cost, start, step, tokens.T, attended.T), chosen


class _Rank:
    """Where a rank stands; its tokens lie one after the other in lists that it may share with other ranks.

    Attributes:
        arrivals: arrival of each of its requests, and then never.
        ends: position at which each request ends, after the position at which the first begins.
        attended: attended tokens up to each of those positions.
        cached: prefix of each request.
        first: number of its first request in the lists.
        last: number of its last visible request, one less than ``first`` if there is none.
        due: arrival of the next request.
        limit: position up to which tokens are visible.
        position: position up to which tokens are computed.
        head: number of the request that holds the token before ``position``; any earlier one is finished.
        paid: attended tokens up to ``position``.
    """

    __slots__ = ("arrivals", "attended", "cached", "due", "ends", "first", "head", "last", "limit", "paid", "position")

    def __init__(
        self, arrivals: list[int], ends: list[int], attended: list[int], cached: list[int], first: int
    ) -> None:
        self.arrivals = [*arrivals, _NEVER]
        self.ends, self.attended, self.cached, self.first = ends, attended, cached, first
        self.last, self.head, self.due = first - 1, first, self.arrivals[0]
        self.limit = self.position = ends[first]
        self.paid = attended[first]

    def admit(self, now: int) -> None:
        """Make what has arrived visible."""
        visible = bisect_right(self.arrivals, now, self.last + 1 - self.first)
        self.last = self.first + visible - 1
        self.limit, self.due = self.ends[self.last + 1], self.arrivals[visible]

    def send(self, cached: int, new: int, attended: int) -> None:
        """Append a request that is visible at once."""
        self.cached.append(cached)
        self.ends.append(self.limit + new)
        self.attended.append(self.attended[-1] + attended)
        self.last += 1
        self.limit += new

    def requests_left(self) -> int:
        """Visible requests that are not finished."""
        if self.position == self.limit:
            return 0
        return self.last + 1 - self.head - (self.position == self.ends[self.head + 1])

    def tokens_left(self) -> int:
        """Visible tokens that are not computed."""
        return self.limit - self.position


def _step(ranks: list[_Rank], now: int, budget: int, coefficients: tuple[float, float, float], positions: array) -> int:
    """One step: admit, move the ranks, append their positions; its duration, −1 if no rank had a token."""
    fixed, per_token, per_attended = coefficients
    longest = -1.0
    reached = []
    for rank in ranks:
        if rank.due <= now:
            rank.admit(now)
        position, limit = rank.position, rank.limit
        if position == limit:
            reached.append(position)
            continue
        new = position + budget
        if new < limit:
            ends, head = rank.ends, rank.head
            while ends[head + 1] < new:
                head += 1
            inside = new - ends[head]
            attended = rank.attended[head] + inside * rank.cached[head] + (inside * (inside + 1) >> 1)
        else:
            new, head = limit, rank.last
            attended = rank.attended[head + 1]
        own = fixed + (new - position) * per_token + (attended - rank.paid) * per_attended
        if own > longest:
            longest = own
        rank.position, rank.head, rank.paid = new, head, attended
        reached.append(new)
    if longest < 0:
        return -1
    positions.extend(reached)
    return round(longest)


class _TokenLine:
    """The tokens of all ranks one after the other, for arithmetic on many positions at once.

    Attributes:
        queues: one per rank.
        ends: position at which each request ends, after a first 0; shape [requests + 1].
        attended: attended tokens up to each of those positions; shape [requests + 1].
        cached: prefix of each request; shape [requests].
        first: number of each rank's first request; shape [ranks].
        start: position at which each rank's tokens begin; shape [ranks].
    """

    def __init__(self, queues: Sequence[Queue]) -> None:
        self.queues = queues
        self.ends = _cumulated([q.new_tokens for q in queues])
        self.attended = _cumulated([q.attended_tokens for q in queues])
        self.cached = np.concatenate([q.cached_tokens for q in queues])
        self.first = np.cumsum([0, *(len(q) for q in queues[:-1])])
        self.start = self.ends[self.first]

    def ranks(self) -> list[_Rank]:
        """The ranks before the first step; they share their lists."""
        ends, attended, cached = self.ends.tolist(), self.attended.tolist(), self.cached.tolist()
        return [
            _Rank(q.arrival_ns.tolist(), ends, attended, cached, first)
            for q, first in zip(self.queues, self.first.tolist(), strict=True)
        ]

    def request_at(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the request that holds the token before a position."""
        return np.maximum(np.searchsorted(self.ends, position) - 1, 0)

    def attended_at(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Attended tokens up to a position."""
        if not self.cached.size:
            return np.zeros_like(position)
        request = self.request_at(position)
        inside = position - self.ends[request]
        return self.attended[request] + inside * self.cached[request] + (inside * (inside + 1) >> 1)

    def computed(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and attended tokens of each step, from the positions after it; shape [ranks, steps]."""
        start = self.start[:, None]
        return (
            np.diff(positions, prepend=start),
            np.diff(self.attended_at(positions), prepend=self.attended_at(start)),
        )

    def stretch(
        self, ranks: list[_Rank], now: int, budget: int, cost: StepCost, look_ahead: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
        """The next steps that no arrival changes.

        Returns:
            Start and duration of at least one and at most ``look_ahead`` steps, shape [steps], and the positions after
            each, shape [ranks, steps]; None where the visible tokens last for too few steps to be worthwhile.
        """
        for rank in ranks:
            rank.admit(now)
        num_steps = min(look_ahead, -(-max(rank.tokens_left() for rank in ranks) // budget))
        if num_steps * len(ranks) < _WORTHWHILE:
            return None
        position, limit, paid = (
            np.array([[getattr(rank, name)] for rank in ranks]) for name in ("position", "limit", "paid")
        )
        positions = np.minimum(position + budget * np.arange(1, num_steps + 1), limit)
        own = cost.ns(np.diff(positions, prepend=position), np.diff(self.attended_at(positions), prepend=paid))
        durations = np.rint(own.max(axis=0)).astype(np.int64)
        starts = now + np.cumsum(durations) - durations
        undisturbed = num_steps
        for rank in ranks:
            full_steps, arrived_by = rank.tokens_left() // budget, int(np.searchsorted(starts, rank.due))
            undisturbed = min(undisturbed, max(full_steps, arrived_by))
        return starts[:undisturbed], durations[:undisturbed], positions[:, :undisturbed]

    def move(self, ranks: list[_Rank], position: NDArray[np.int64]) -> None:
        """Put the ranks at these positions."""
        moved = (position, self.request_at(position), self.attended_at(position))
        for rank, *to in zip(ranks, *(a.tolist() for a in moved), strict=True):
            rank.position, rank.head, rank.paid = to


class _Steps:
    """The record of a run."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.starts, self.durations, self.positions = array("q"), array("q"), array("q")

    def append(self, start: int, duration: int) -> int:
        """Note a step whose positions are noted already; returns its end."""
        self.starts.append(start)
        self.durations.append(duration)
        return start + duration

    def extend(self, starts: NDArray[np.int64], durations: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """Note several steps, positions of shape [ranks, steps]; returns the end of the last."""
        for record, values in ((self.starts, starts), (self.durations, durations), (self.positions, positions.T)):
            record.frombytes(np.ascontiguousarray(values).tobytes())
        return self.starts[-1] + self.durations[-1]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Starts and durations, shape [steps], and positions, shape [ranks, steps]."""
        start, duration, position = (
            np.frombuffer(record, dtype=np.int64) if record else np.zeros(0, dtype=np.int64)
            for record in (self.starts, self.durations, self.positions)
        )
        return start, duration, np.ascontiguousarray(position.reshape(-1, self.num_ranks).T)


def _cumulated(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.concatenate(parts))])


def _checked(num_ranks: int, max_num_batched_tokens: int) -> int:
    if num_ranks < 1:
        raise ParameterError(f"num_ranks: got {num_ranks}, allowed: ≥ 1")
    if max_num_batched_tokens < 1:
        raise ParameterError(f"max_num_batched_tokens: got {max_num_batched_tokens}, allowed: ≥ 1")
    return max_num_batched_tokens
