"""When each request of a replay goes out: open loop by time, or closed loop by user; mirrored on all ranks, or lagged.

In open loop a request goes out at its time, whether or not earlier answers came back. In closed loop a number of users
work through the sessions: the next turn goes out when the answer to the last came back, plus the time to think. Agent
traffic is closed: its sessions limit its throughput. Which of the two is used matters: in open loop above capacity a
queue of prompts builds up, every step is full, and ranks differ in depth alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError
from rackbook.replay.queues import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rackbook.replay.traces import Trace

NONE = -1


@dataclass(frozen=True, eq=False)
class Load:
    """What is sent to which rank when; one entry per send.

    Attributes:
        trace: the requests.
        num_ranks: data-parallel ranks, each of which gets every request.
        rank: that it goes to; shape [sends].
        request: of the trace; shape [sends].
        at_ns: since the start; :data:`NONE` where it waits for an answer; shape [sends].
        previous: the send whose answer it waits for; :data:`NONE` where it waits for none; shape [sends].
        think_ns: from that answer to this send; 0 where it waits for none; shape [sends].
        together: a request that waits for an answer goes out to all ranks at once, when the last of them has answered
            the one before.
    """

    trace: Trace
    num_ranks: int
    rank: NDArray[np.int64]
    request: NDArray[np.int64]
    at_ns: NDArray[np.int64]
    previous: NDArray[np.int64]
    think_ns: NDArray[np.int64]
    together: bool = False

    def __len__(self) -> int:
        return self.rank.size

    @property
    def num_chains(self) -> int:
        """Sends that wait for no answer; in closed loop, the users of all ranks."""
        return int((self.previous == NONE).sum())


def open_loop(trace: Trace, num_ranks: int, lag_s: float = 0.0) -> Load:
    """Every rank gets every request at its time, rank r later by r · lag_s.

    Args:
        trace: the requests and their times.
        num_ranks: at least one.
        lag_s: 0 for a mirror replay.

    Raises:
        ParameterError: no rank, or a negative lag.
    """
    lags = _lags_ns(num_ranks, lag_s)
    arrival = np.rint(trace.requests["arrival_s"].to_numpy() * NS_PER_S).astype(np.int64)
    at = (arrival[:, None] + lags[None, :]).ravel()
    order = np.argsort(at, kind="stable")  # mirrored sends of one request stay in order of the ranks
    request, rank = np.divmod(order, num_ranks)
    none = np.full(at.size, NONE)
    return Load(trace, num_ranks, rank, request, at[order], none, np.zeros(at.size, np.int64))


def closed_loop(
    trace: Trace, num_ranks: int, lag_s: float = 0.0, *, users: int, think_s: float = 0.0, seed: int = 0
) -> Load:
    """Every rank has the same users, who work through the same sessions; those of rank r begin later by r · lag_s.

    Each session, in order of its first request, goes to the user with the fewest requests so far; a request without a
    session is one of its own. A user takes the turns of a session in order, then the next session. The times of the
    trace are not used.

    Without a lag a user's next request goes out to all ranks at once, when the last of them has answered. If each rank
    had it after its own answer, an answer that comes a moment late to one of them would put that rank a step behind,
    and nothing would bring the ranks together again.

    Args:
        trace: the requests.
        num_ranks: at least one.
        lag_s: 0 for a mirror replay.
        users: per rank; no more than there are sessions.
        think_s: mean time from an answer to the same user's next request, and from the start to a user's first. Each
            is drawn evenly between nothing and twice that, and is the same on every rank. Users who do not think send
            together whenever a step ends, for ever in the groups in which the first steps happened to take them; two
            ranks that begin with different groups then differ in every step, mirrored or not.
        seed: of the times to think.

    Raises:
        ParameterError: no rank, a negative time, or more users than sessions.
    """
    lags = _lags_ns(num_ranks, lag_s)
    if not 0 <= think_s < float("inf"):
        raise ParameterError(f"think_s: got {think_s!r}, allowed: a number ≥ 0 [s]")
    sessions: dict[object, list[int]] = {}
    for request, session in enumerate(trace.requests["session"].to_list()):
        sessions.setdefault(request if session is None else session, []).append(request)
    if not 1 <= users <= len(sessions):
        raise ParameterError(f"users: got {users}, allowed: 1 to {len(sessions)}, the sessions of {trace.name}")
    chains: list[list[int]] = [[] for _ in range(users)]
    for turns in sessions.values():
        min(chains, key=len).extend(turns)
    drawn = np.random.default_rng([seed, 11]).uniform(0, 2 * think_s * NS_PER_S, trace.requests.height)
    think = np.rint(drawn).astype(np.int64).tolist()
    rows = []
    # Users outside, ranks inside: first requests go out in that order, so that mirrored ranks begin with the same one.
    for chain in chains:
        for rank in range(num_ranks):
            first, lag = len(rows), int(lags[rank])
            rows += [
                (rank, request, NONE, first + turn - 1, think[request])
                if turn
                else (rank, request, lag + think[request], NONE, 0)
                for turn, request in enumerate(chain)
            ]
    return Load(trace, num_ranks, *np.array(rows, np.int64).T.copy(), together=lag_s == 0)


def _lags_ns(num_ranks: int, lag_s: float) -> NDArray[np.int64]:
    if num_ranks < 1:
        raise ParameterError(f"num_ranks: got {num_ranks}, allowed: ≥ 1")
    if not 0 <= lag_s < float("inf"):
        raise ParameterError(f"lag_s: got {lag_s!r}, allowed: a number ≥ 0 [s]")
    return np.rint(np.arange(num_ranks) * lag_s * NS_PER_S).astype(np.int64)
